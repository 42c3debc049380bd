"""Token counts in bins of constant relative width, and the survival function over them.

Counts below 16 have a bin of their own; above, each octave has eight, so a bin is at most 1/8 of
its count wide. The last bin is "as long as allowed": answers that ended at their `max_tokens`.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.predictor import LengthDist

Shares = NDArray[np.float64]  # of answers per bin, sum 1

_HALF = 8  # bins per octave
_N_OCTAVES = 20
_HAIR = 1e-13  # sums of shares that should be equal differ by less
LONGEST = 16 << _N_OCTAVES  # tokens; longer answers count as unlimited
UNLIMITED = _HALF * (_N_OCTAVES + 2)  # index of the last bin
N_BINS = UNLIMITED + 1


def bin_of(n_tokens: int) -> int:
    """The bin of an answer of `n_tokens`."""
    if n_tokens >= LONGEST:
        return UNLIMITED
    shift = max(0, n_tokens.bit_length() - 4)
    return _HALF * shift + (n_tokens >> shift)


def _edges() -> list[int]:
    """First count of each bin but the last, which begins at LONGEST."""
    small = list(range(2 * _HALF))
    large = [(_HALF + i) << s for s in range(1, _N_OCTAVES + 1) for i in range(_HALF)]
    return [*small, *large, LONGEST]


EDGES = _edges()
_WIDTHS = np.diff(np.array(EDGES, dtype=np.float64))  # [UNLIMITED], tokens


class Survival:
    """P(L ≥ x) of a length L, from shares per bin; counts within a bin are equally likely.

    `_at[i]` is P(L ≥ EDGES[i]) and `_below[i]` the sum of P(L ≥ m) over m = 1 … EDGES[i].
    """

    __slots__ = ("_at", "_below", "_falling")

    def __init__(self, shares: Shares) -> None:
        at = np.append(1.0, 1.0 - np.cumsum(shares[:-1])).clip(min=0.0)  # [N_BINS]
        # Within a bin P falls linearly: the sum over its w counts is w·(P_i + P_i+1)/2 less half
        # a step, since the bin's first edge belongs to the sum before it.
        sums = _WIDTHS * (at[:-1] + at[1:]) / 2 - (at[:-1] - at[1:]) / 2
        below = np.append(0.0, np.cumsum(sums))
        self._at: list[float] = at.tolist()
        self._below: list[float] = below.tolist()
        self._falling: list[float] = (-at).tolist()

    def remaining(self, n_output: int, max_tokens: int) -> LengthDist:
        """min(L, max_tokens) − n_output, given L > n_output."""
        most = max(1, max_tokens - n_output)
        tail = self.at_least(n_output + 1)
        if tail <= 0.0:
            return LengthDist(float(most), float(most), float(most))
        mean = (self.sum_to(max_tokens) - self.sum_to(n_output)) / tail
        q50, q90 = (
            float(min(most, max(1, self._first_below(tail * left) - n_output)))
            for left in (0.5, 0.1)
        )
        return LengthDist(min(float(most), max(1.0, mean)), q50, q90)

    def at_least(self, n_tokens: int) -> float:
        """P(L ≥ n_tokens)."""
        i = bin_of(n_tokens)
        if i == UNLIMITED:
            return self._at[-1]
        width = EDGES[i + 1] - EDGES[i]
        return self._at[i] - (self._at[i] - self._at[i + 1]) * (n_tokens - EDGES[i]) / width

    def sum_to(self, n_tokens: int) -> float:
        """The sum of P(L ≥ m) over m = 1 … n_tokens: E[min(L, n_tokens)]."""
        i = bin_of(n_tokens)
        if i == UNLIMITED:
            return self._below[-1] + (n_tokens - LONGEST) * self._at[-1]
        t, width = n_tokens - EDGES[i], EDGES[i + 1] - EDGES[i]
        slope = (self._at[i] - self._at[i + 1]) / width
        return self._below[i] + t * self._at[i] - slope * t * (t + 1) / 2

    def _first_below(self, mass: float) -> int:
        """The smallest n with P(L > n) ≤ mass."""
        mass += _HAIR
        i = bisect_left(self._falling, -mass) - 1  # P(L ≥ EDGES[i]) > mass ≥ P(L ≥ EDGES[i + 1])
        if i >= UNLIMITED:
            return LONGEST
        fall = self._at[i] - self._at[i + 1]
        width = EDGES[i + 1] - EDGES[i]
        steps = (self._at[i] - mass) * width / fall
        return EDGES[i] + max(0, -int(-steps // 1) - 1)
