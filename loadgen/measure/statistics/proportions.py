"""Proportions: the exact binomial distribution, intervals of a share, and the sample sizes that
settle an SLO.

The distribution is computed without scipy, whose import takes longer than a whole report.
Probabilities are computed within nine standard deviations plus 50 of the mean, from the ratios of
neighbours, and scaled to sum to 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.intervals import Interval

_HALVINGS = 60  # of an interval of length 1: beyond the resolution of a float64


@lru_cache(maxsize=64)  # the metrics of a run have the same n: a dozen calls per entry
def probabilities(n: int, share: float) -> tuple[int, NDArray[np.float64]]:
    """(k₀, [P(B = k₀), P(B = k₀ + 1), …]) for B ~ Bin(n, share), 0 < share < 1. The probabilities
    left out sum to less than 10⁻¹⁵.

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
    weights.flags.writeable = False  # the cache returns this array to later callers
    return first, weights


def at_most(k: int, n: int, share: float) -> float:
    """P(Bin(n, share) ≤ k)."""
    if k < 0 or k >= n or not 0 < share < 1:
        return float(k >= n or (k >= 0 and share <= 0))
    first, weights = probabilities(n, share)
    return float(weights[: max(0, k + 1 - first)].sum())


def at_least(k: int, n: int, share: float) -> float:
    """P(Bin(n, share) ≥ k), summed from the upper end so that small probabilities stay exact."""
    return at_most(n - k, n, 1 - share)


def tails(n: int, share: float, tail: float) -> tuple[int, int]:
    """(largest l with P(B < l) ≤ tail, smallest u with P(B ≥ u) ≤ tail); 0 ≤ l, u ≤ n + 1."""
    first, weights = probabilities(n, share)
    below = np.cumsum(weights)  # P(B ≤ first + i)
    above = np.cumsum(weights[::-1])  # P(B ≥ last − i)
    last = first + len(weights) - 1
    low = first + int(np.searchsorted(below, tail, side="right"))
    high = last + 1 - int(np.searchsorted(above, tail, side="right"))
    return low, high


def share_where(holds: Callable[[float], bool]) -> float:
    """The share in [0, 1] at which a predicate turns from false to true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2


def wilson(hits: int, n: int, confidence: float) -> Interval:
    """The share hits / n with Wilson's score interval; NaN and open bounds when n = 0.

    Source: Brown, Cai & DasGupta, Statistical Science 16(2), 2001, §3.1.1.
    """
    if n == 0:
        return Interval(math.nan)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = hits / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if hits == 0 else centre - half  # exactly 0 and 1 at the ends, despite rounding
    return Interval(share, low, 1.0 if hits == n else centre + half)


def exact_bounds(hits: int, n: int, confidence: float) -> Interval:
    """The share hits / n with two one-sided Clopper-Pearson bounds, each at `confidence`."""
    if n == 0:
        return Interval(math.nan)
    tail = 1 - confidence
    low = share_where(lambda share: at_least(hits, n, share) > tail) if hits > 0 else 0.0
    high = share_where(lambda share: at_most(hits, n, share) < tail) if hits < n else 1.0
    return Interval(hits / n, low, high)


def least_n(misses: int, quantile: float, confidence: float) -> int:
    """The smallest n at which `misses` misses still prove that at least a share q of requests meets
    the SLO.

    Proven means P(Bin(n, 1 − q) ≤ misses) ≤ 1 − confidence. Zero misses: 299 for P99 at 95 %, 459
    at 99 %.

    Source: MLPerf inference rules, early stopping.
    """
    return _first(lambda n: _proves(misses, n, 1 - quantile, confidence), misses + 1) or 0


def needed_n(misses: int, n: int, quantile: float, confidence: float) -> int | None:
    """About how many samples would prove that a share of at least q meets the SLO, or that it does
    not, if the miss rate stays at misses / n.

    None without samples, and where the miss rate is 1 − q (exactly, or so nearly that 10⁹ samples
    would not settle it).
    """
    allowed = 1 - quantile
    if n == 0 or math.isclose(misses / n, allowed, rel_tol=1e-9):
        return None
    rate = misses / n
    if rate < allowed:
        return _first(lambda m: _proves(math.ceil(rate * m - 1e-9), m, allowed, confidence), 1)
    return _first(lambda m: _refutes(math.floor(rate * m + 1e-9), m, allowed, confidence), 1)


def _proves(misses: int, n: int, allowed: float, confidence: float) -> bool:
    """Whether `misses` or fewer of n would be too rare if the true miss share were `allowed`."""
    return misses < n and at_most(misses, n, allowed) <= 1 - confidence


def _refutes(misses: int, n: int, allowed: float, confidence: float) -> bool:
    """Whether `misses` or more of n would be too rare if the true miss share were `allowed`."""
    return misses > 0 and at_least(misses, n, allowed) <= 1 - confidence


def _first(holds: Callable[[int], bool], start: int) -> int | None:
    """The smallest n ≥ start at which a predicate holds that stays true (nearly always) from there
    on."""
    high = start
    while not holds(high):
        if high > 10**9:
            return None
        high *= 2
    return start + bisect_left(range(start, high + 1), True, key=holds)
