"""The exact binomial distribution, without scipy, whose import takes longer than a whole report.

Probabilities are computed where they are not negligible (nine standard deviations and fifty more to
either side), from the ratios of neighbours, and scaled to sum to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_HALVINGS = 60  # of an interval of length 1: past what a float64 tells apart


@lru_cache(maxsize=64)  # metrics of one run have the same n: each is asked for a dozen times
def window(n: int, share: float) -> tuple[int, NDArray[np.float64]]:
    """(k₀, [P(B = k₀), P(B = k₀ + 1), …]) for B ~ Bin(n, share), 0 < share < 1; what lies outside
    has a probability below 10⁻¹⁵ in all.

    P(k + 1) / P(k) = (n − k) / (k + 1) · share / (1 − share).
    """
    mean = n * share
    half = 9 * math.sqrt(mean * (1 - share)) + 50
    first, last = max(0, math.floor(mean - half)), min(n, math.ceil(mean + half))
    counts = np.arange(first, last, dtype=np.float64)
    steps = np.log((n - counts) / (counts + 1)) + (math.log(share) - math.log1p(-share))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights: NDArray[np.float64] = np.exp(logs - logs.max())
    weights /= weights.sum()
    weights.flags.writeable = False  # it is given out again
    return first, weights


def at_most(k: int, n: int, share: float) -> float:
    """P(Bin(n, share) ≤ k)."""
    if k < 0 or k >= n or not 0 < share < 1:
        return float(k >= n or (k >= 0 and share <= 0))
    first, weights = window(n, share)
    return float(weights[: max(0, k + 1 - first)].sum())


def at_least(k: int, n: int, share: float) -> float:
    """P(Bin(n, share) ≥ k); summed from its own end, so that small ones are exact, too."""
    return at_most(n - k, n, 1 - share)


def tails(n: int, share: float, tail: float) -> tuple[int, int]:
    """(largest l with P(B < l) ≤ tail, smallest u with P(B ≥ u) ≤ tail); 0 ≤ l, u ≤ n + 1."""
    first, weights = window(n, share)
    below = np.cumsum(weights)  # P(B ≤ first + i)
    above = np.cumsum(weights[::-1])  # P(B ≥ last − i)
    last = first + len(weights) - 1
    low = first + int(np.searchsorted(below, tail, side="right"))
    high = last + 1 - int(np.searchsorted(above, tail, side="right"))
    return low, high


def share_where(rises: Callable[[float], bool]) -> float:
    """The share in [0, 1] at which a predicate turns from false to true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if rises(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2
