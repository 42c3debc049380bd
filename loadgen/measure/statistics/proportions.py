"""Proportions: the distribution of a count of samples, intervals of a share, and the sample sizes
that settle an SLO.

Counts of independent samples are binomial. Counts of samples with an autocorrelation time τ are
taken for those of a two-state Markov chain with the same share and the same τ, whose hits come in
runs of about (τ + 1) / 2; with τ = 1 its counts are binomial.

The distributions are computed without scipy, whose import takes longer than a whole report, within
nine standard deviations plus 50 τ of the mean, and scaled to sum to 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.intervals import INDEPENDENT, BoundTimes, Interval

_HALVINGS = 60  # of an interval of length 1: beyond the resolution of a float64
_ROUGH_HALVINGS = 20  # to 10⁻⁶, for distributions that take a millisecond


LARGEST_TIME = 8.0
"""Longer autocorrelation times are reduced to 8 by counting in larger units: the distribution
hardly changes, and its computation takes less time."""


def coarse(n: int, time: float) -> tuple[int, float]:
    """n samples with autocorrelation time `time` in units of time / 8 samples: (n', τ' ≤ 8) with
    n'/τ' = n/τ. Unchanged up to τ = 8."""
    if time <= LARGEST_TIME:
        return n, max(1.0, time)
    units = max(1, round(n * LARGEST_TIME / time))
    return units, min(time, LARGEST_TIME)


@lru_cache(maxsize=64)  # the metrics of a run have the same n: a dozen calls per entry
def probabilities(n: int, share: float, time: float = 1.0) -> tuple[int, NDArray[np.float64]]:
    """(k₀, [P(B = k₀), P(B = k₀ + 1), …]) of the count of n samples, 0 < share < 1. The
    probabilities left out sum to less than 10⁻¹⁵."""
    mean = n * share
    half = 9 * math.sqrt(mean * (1 - share) * time) + 50 * time
    first, last = max(0, math.floor(mean - half)), min(n, math.ceil(mean + half))
    weights = (
        _binomial(n, share, first, last) if time <= 1 else _markov(n, share, time, first, last)
    )
    weights /= weights.sum()
    weights.flags.writeable = False  # the cache returns this array to later callers
    return first, weights


def _binomial(n: int, share: float, first: int, last: int) -> NDArray[np.float64]:
    """P(k + 1) / P(k) = (n − k) / (k + 1) · share / (1 − share)."""
    counts = np.arange(first, last, dtype=np.float64)
    steps = np.log((n - counts) / (counts + 1)) + (math.log(share) - math.log1p(-share))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights: NDArray[np.float64] = np.exp(logs - logs.max())
    return weights


def _markov(n: int, share: float, time: float, first: int, last: int) -> NDArray[np.float64]:
    """The hits of a stationary chain with P(hit) = share and lag-1 correlation φ = (τ − 1) /
    (τ + 1), from its characteristic function by an inverse Fourier transform.

    With the transition matrix weighted by e^{iθ} for each hit, the function of n steps is
    A λ₁ⁿ⁻¹ + B λ₂ⁿ⁻¹ with the matrix' eigenvalues λ; A and B follow from n = 1 and 2.

    Source: A. W. F. Edwards, Annals of Human Genetics 24, 1960 (the distribution of the counts).
    """
    size = 1 << (last - first).bit_length()
    factor = (time - 1) / (time + 1)
    turn = np.exp(2j * np.pi * np.arange(size // 2 + 1) / size)
    stay_miss, to_hit = 1 - share * (1 - factor), share * (1 - factor)
    to_miss, stay_hit = (1 - share) * (1 - factor), 1 - (1 - share) * (1 - factor)
    trace, determinant = stay_miss + stay_hit * turn, factor * turn
    root = np.sqrt(trace * trace - 4 * determinant)
    large, small = (trace + root) / 2, (trace - root) / 2
    once = (1 - share) + share * turn
    twice = (1 - share) * (stay_miss + to_hit * turn) + share * turn * (to_miss + stay_hit * turn)
    gap = np.where(np.abs(large - small) < 1e-14, 1e-14, large - small)
    whole = (twice - small * once) / gap * large ** (n - 1)
    whole += (large * once - twice) / gap * small ** (n - 1)
    weights = np.roll(np.fft.irfft(np.conj(whole), size), -(first % size))[: last - first + 1]
    return np.maximum(weights, 0.0)


def at_most(k: float, n: int, share: float, time: float = 1.0) -> float:
    """P(B ≤ k) for n samples of that share; linear between whole counts of coarse units."""
    if k < 0 or k >= n or not 0 < share < 1:
        return float(k >= n or (k >= 0 and share <= 0))
    if time > LARGEST_TIME:
        units, time = coarse(n, time)
        lower, part = divmod(k * units / n, 1)
        below = at_most(lower, units, share, time)
        return below + part * (at_most(lower + 1, units, share, time) - below)
    first, weights = probabilities(n, share, max(1.0, time))
    return float(weights[: max(0, int(k) + 1 - first)].sum())


def at_least(k: float, n: int, share: float, time: float = 1.0) -> float:
    """P(B ≥ k), summed from the upper end so that small probabilities stay exact."""
    return at_most(n - k, n, 1 - share, time)


def tails(n: int, share: float, tail: float, time: float = 1.0) -> tuple[int, int]:
    """(largest l with P(B < l) ≤ tail, smallest u with P(B ≥ u) ≤ tail); 0 ≤ l, u ≤ n + 1. The
    time is at most 8 (`coarse`)."""
    first, weights = probabilities(n, share, time)
    below = np.cumsum(weights)  # P(B ≤ first + i)
    above = np.cumsum(weights[::-1])  # P(B ≥ last − i)
    last = first + len(weights) - 1
    low = first + int(np.searchsorted(below, tail, side="right"))
    high = last + 1 - int(np.searchsorted(above, tail, side="right"))
    return low, high


def share_where(holds: Callable[[float], bool], halvings: int = _HALVINGS) -> float:
    """The share in [0, 1] at which a predicate turns from false to true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2


def wilson(
    hits: int, n: int, confidence: float, times: BoundTimes | None = INDEPENDENT
) -> Interval:
    """The share hits / n with Wilson's score interval over n / τ samples; NaN and open bounds when
    n = 0, open bounds without `times`.

    Source: Brown, Cai & DasGupta, Statistical Science 16(2), 2001, §3.1.1.
    """
    if n == 0:
        return Interval(math.nan)
    share = hits / n
    if times is None:
        return Interval(share)
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def bound(time: float, sign: int) -> float:
        worth = n / time
        centre = (share + z * z / (2 * worth)) / (1 + z * z / worth)
        variance = share * (1 - share) / worth + z * z / (4 * worth * worth)
        return centre + sign * z / (1 + z * z / worth) * math.sqrt(variance)

    low = 0.0 if hits == 0 else bound(times[0], -1)  # exactly 0 and 1 at the ends, despite rounding
    return Interval(share, low, 1.0 if hits == n else bound(times[1], 1))


def exact_bounds(
    hits: int, n: int, confidence: float, times: BoundTimes | None = INDEPENDENT
) -> Interval:
    """The share hits / n with two one-sided Clopper-Pearson bounds, each at `confidence`; open
    without `times`."""
    if n == 0:
        return Interval(math.nan)
    if times is None:
        return Interval(hits / n)
    tail, (low_time, high_time) = 1 - confidence, times
    low, high = 0.0, 1.0
    halvings = _HALVINGS if max(times) <= 1 else _ROUGH_HALVINGS
    if hits > 0:
        low = share_where(lambda share: at_least(hits, n, share, low_time) > tail, halvings)
    if hits < n:
        high = share_where(lambda share: at_most(hits, n, share, high_time) < tail, halvings)
    return Interval(hits / n, low, high)


def chance_of_more(hits: int, n: int, other_hits: int, other_n: int) -> float:
    """The probability of at least `hits` among n samples, if all hits of both groups fell on their
    samples at random: the one-sided p-value of Fisher's exact test, small if the share of the first
    group is larger. 1 for a group without samples.

    Source: Fisher, Statistical Methods for Research Workers, 5th edition (1934), section 21.02."""
    total, all_hits = n + other_n, hits + other_hits
    ways = sum(
        math.comb(n, k) * math.comb(other_n, all_hits - k)
        for k in range(hits, min(n, all_hits) + 1)
    )
    return ways / math.comb(total, all_hits)


def least_n(misses: int, quantile: float, confidence: float) -> int:
    """The smallest n at which `misses` misses still prove that at least a share q of requests meets
    the SLO.

    Proven means P(Bin(n, 1 − q) ≤ misses) ≤ 1 − confidence. Zero misses: 299 for P99 at 95 %, 459
    at 99 %.

    Source: MLPerf inference rules, early stopping.
    """
    return first_n(lambda n: proves(misses, n, 1 - quantile, confidence), misses + 1) or 0


def needed_n(
    misses: int,
    n: int,
    quantile: float,
    confidence: float,
    times: Callable[[int], BoundTimes | None] = lambda n: INDEPENDENT,
) -> int | None:
    """About how many samples would prove that a share of at least q meets the SLO, or that it does
    not, if the miss rate stays at misses / n. `times(n)` are the autocorrelation times of a run of
    n samples, None where it is too short.

    None without samples, and where the miss rate is 1 − q (exactly, or so nearly that 10⁹ samples
    would not settle it).
    """
    allowed = 1 - quantile
    if n == 0 or math.isclose(misses / n, allowed, rel_tol=1e-9):
        return None
    rate = misses / n

    def settles(m: int) -> bool:
        both = times(m)
        if both is None:
            return False
        if rate < allowed:
            return proves(math.ceil(rate * m - 1e-9), m, allowed, confidence, both[1])
        return refutes(math.floor(rate * m + 1e-9), m, allowed, confidence, both[0])

    return first_n(settles, 1)


def proves(misses: int, n: int, allowed: float, confidence: float, time: float = 1.0) -> bool:
    """Whether `misses` or fewer of n would be too rare if the true miss share were `allowed`."""
    return misses < n and at_most(misses, n, allowed, time) <= 1 - confidence


def refutes(misses: int, n: int, allowed: float, confidence: float, time: float) -> bool:
    """Whether `misses` or more of n would be too rare if the true miss share were `allowed`."""
    return misses > 0 and at_least(misses, n, allowed, time) <= 1 - confidence


def first_n(holds: Callable[[int], bool], start: int) -> int | None:
    """The smallest n ≥ start at which a predicate holds that stays true (nearly always) from there
    on."""
    high = start
    while not holds(high):
        if high > 10**9:
            return None
        high *= 2
    return start + bisect_left(range(start, high + 1), True, key=holds)
