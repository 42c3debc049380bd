"""Token counts in bins of constant relative width, and the survival function over the bins.

Each count below 16 has its own bin. Above, each octave has eight bins, so a bin is at most 1/8 of
its count wide. The last bin holds answers that ended at their `max_tokens`.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from reference_engine.state.predictor import LengthDist

Shares = NDArray[np.float64]  # of answers per bin, [N_BINS], sum 1

_PER_OCTAVE = 8
_N_OCTAVES = 20
_TOLERANCE = 1e-13  # equal sums of shares differ by less, from rounding
LONGEST = 16 << _N_OCTAVES  # tokens; longer answers count as unlimited
UNLIMITED = _PER_OCTAVE * (_N_OCTAVES + 2)  # index of the last bin
N_BINS = UNLIMITED + 1


def bin_of(n_tokens: int) -> int:
    """The bin of an answer of `n_tokens`."""
    if n_tokens >= LONGEST:
        return UNLIMITED
    shift = max(0, n_tokens.bit_length() - 4)
    return _PER_OCTAVE * shift + (n_tokens >> shift)


def _edges() -> list[int]:
    small = list(range(2 * _PER_OCTAVE))
    large = [(_PER_OCTAVE + i) << s for s in range(1, _N_OCTAVES + 1) for i in range(_PER_OCTAVE)]
    return [*small, *large, LONGEST]


EDGES = _edges()  # the first count of each bin
_WIDTHS = np.diff(np.array(EDGES, dtype=np.float64))  # [UNLIMITED], tokens


class Survival:
    """P(L ≥ x) of a length L in tokens, from shares per bin. The counts within a bin are equally
    likely.

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
        """The distribution of min(L, max_tokens) − n_output, given L > n_output. If that has
        probability 0, all three figures are max_tokens − n_output. Never below 1."""
        most = max(1, max_tokens - n_output)
        tail = self.at_least(n_output + 1)
        if tail <= _TOLERANCE:
            return LengthDist(float(most), float(most), float(most))
        mean = (self.sum_to(max_tokens) - self.sum_to(n_output)) / tail
        q50, q90 = (
            float(min(most, max(1, self._quantile(tail * above) - n_output)))
            for above in (0.5, 0.1)
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
        """The sum of P(L ≥ m) over m = 1 … n_tokens, which is E[min(L, n_tokens)]."""
        i = bin_of(n_tokens)
        if i == UNLIMITED:
            return self._below[-1] + (n_tokens - LONGEST) * self._at[-1]
        t, width = n_tokens - EDGES[i], EDGES[i + 1] - EDGES[i]
        slope = (self._at[i] - self._at[i + 1]) / width
        return self._below[i] + t * self._at[i] - slope * t * (t + 1) / 2

    def _quantile(self, above: float) -> int:
        """The smallest n with P(L > n) ≤ above."""
        above += _TOLERANCE
        # P(L ≥ EDGES[i]) > above ≥ P(L ≥ EDGES[i + 1])
        i = bisect_left(self._falling, -above) - 1
        if i >= UNLIMITED:
            return LONGEST
        fall = self._at[i] - self._at[i + 1]
        width = EDGES[i + 1] - EDGES[i]
        steps = (self._at[i] - above) * width / fall
        return EDGES[i] + max(0, -int(-steps // 1) - 1)
