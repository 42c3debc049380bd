"""Percentiles with their confidence intervals.

Two-sided intervals are interpolated between order statistics (binomial, without a shape assumed),
so that they cover the true percentile as often as their confidence level states. One-sided bounds
are exact order statistics; they prove an SLO met or missed, as in MLPerf's early stopping. Both
take autocorrelation times (`dependence`): the requests of a run share its queue, and the token gaps
of a request are alike (`effective_n`), so n samples count for fewer independent samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from loadgen.measure.statistics.intervals import INDEPENDENT, BoundTimes, Interval, Values
from loadgen.measure.statistics.proportions import at_most, coarse, tails


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile with its two-sided interval. `few`: fewer than ten samples lie beyond it.
    `n_effective`: the number of independent samples with the same information; None if it was not
    estimated."""

    value: float
    low: float | None
    high: float | None
    few: bool
    n_effective: float | None = None


def nearest_rank(n: int, quantile: float) -> int:
    """The 1-based rank ⌈q·n⌉ of the q-quantile among n ≥ 1 sorted samples."""
    return min(n, max(1, math.ceil(round(quantile * n, 9))))


def has_few(n: float, quantile: float) -> bool:
    """Whether n < 10 / (1 − q), so that fewer than ten samples lie beyond the percentile."""
    return n * (1 - quantile) < 10 - 1e-9


@lru_cache(4096)  # the figures of a report repeat the same calls
def order_ranks(
    n: int, quantile: float, confidence: float, time: float = 1.0
) -> tuple[int | None, int | None]:
    """1-based ranks (l, u) with P(X₍l₎ > ξ) ≤ α/2 and P(X₍u₎ < ξ) ≤ α/2; None where no such rank
    exists.

    B samples, of which q are expected, lie at or below the true quantile ξ: l is the largest rank
    with P(B < l) ≤ α/2, u the smallest with P(B ≥ u) ≤ α/2, α = 1 − confidence. `time` (≤ 8) is
    the autocorrelation time of the samples.

    Source: David & Nagaraja, Order Statistics (3rd ed.), §7.1.
    """
    low, high = tails(n, quantile, (1 - confidence) / 2, time)
    return low or None, high if high <= n else None


def interval_places(
    n: int, quantile: float, confidence: float, time: float = 1.0
) -> tuple[float | None, float | None]:
    """The places of a percentile's lower and upper bound among n sorted samples: 1-based ranks with
    a fraction, for interpolation; None where the samples cannot give that bound.

    Each bound misses the true quantile with a probability of (nearly) α/2, α = 1 − confidence.
    Where only a single bound exists, it misses the quantile with α, so that the interval still
    covers as often as its level states. `time` (≤ 8) is the autocorrelation time of the samples.

    Source: J. Nyblom, Statistics & Probability Letters 14(2), 1992 (of which Hettmansperger &
    Sheather's interval for the median is a special case).
    """
    return (
        low_place(n, quantile, confidence, time),
        high_place(n, quantile, confidence, time),
    )


@lru_cache(4096)
def low_place(n: int, quantile: float, confidence: float, time: float) -> float | None:
    """The first of `interval_places`."""
    half = (1 - confidence) / 2
    if not _has_place(n, quantile, half, time):
        return None
    tail = half if _has_place(n, 1 - quantile, half, time) else 2 * half
    return _place(n, quantile, tail, time)


def high_place(n: int, quantile: float, confidence: float, time: float) -> float | None:
    """The second of `interval_places`."""
    place = low_place(n, 1 - quantile, confidence, time)
    return None if place is None else n + 1 - place


def _has_place(n: int, quantile: float, tail: float, time: float) -> bool:
    """Whether no hit among n samples of a chain (`proportions`) is as rare as `tail`."""
    to_hit = 2 * quantile / (time + 1)
    return (1 - quantile) * (1 - to_hit) ** (n - 1) <= tail


def _place(n: int, quantile: float, tail: float, time: float) -> float | None:
    """r + λ with P((1 − λ)·X₍r₎ + λ·X₍r+1₎ > ξ) ≈ tail; None where P(X₍₁₎ > ξ) already exceeds
    tail.

    π_r = P(X₍r₎ > ξ) = P(B ≤ r − 1), π_r ≤ tail < π_{r+1}, and λ = 1 / (1 + r(1 − q)(π_{r+1} −
    tail) / ((n − r)·q·(tail − π_r))).
    """
    rank, _ = tails(n, quantile, tail, time)
    if rank == 0 or rank >= n:
        return float(n) if rank >= n else None
    below = at_most(rank - 1, n, quantile, time)
    above = at_most(rank, n, quantile, time)
    if below >= tail:  # equal, up to rounding
        return float(rank)
    odds = rank * (1 - quantile) * (above - tail) / ((n - rank) * quantile * (tail - below))
    return rank + 1 / (1 + odds)


def percentile(
    ordered: Values,
    quantile: float,
    confidence: float,
    n_infinite: int = 0,
    times: BoundTimes | None = INDEPENDENT,
) -> Percentile:
    """The nearest-rank percentile of `ordered` (ascending) followed by `n_infinite` samples of
    +inf, with its two-sided interval at `confidence`.

    `times` are the autocorrelation times of the samples; without them both bounds are open. Without
    samples the value is NaN and both bounds are open. Where a bound falls between a finite sample
    and +inf, the lower bound is the finite sample and the upper bound +inf.
    """
    n = len(ordered) + n_infinite
    if n == 0:
        return Percentile(math.nan, None, None, True)
    value = _at(ordered, nearest_rank(n, quantile))
    if times is None:
        return Percentile(value, None, None, True)

    def between(place: float | None, units: int, is_low: bool) -> float | None:
        """The value at a place among `units` samples: (p − ½) / units of all samples lie below it.
        Two positive neighbours are interpolated in logarithms, since tail samples lie far apart."""
        if place is None:
            return None
        rank, part = divmod((place - 0.5) * n / units + 0.5, 1)
        if part < 1e-9:
            return _at(ordered, min(n, max(1, int(rank))))
        below, above = _at(ordered, max(1, int(rank))), _at(ordered, min(n, int(rank) + 1))
        if math.isinf(above):
            return below if is_low else above
        if below > 0:
            return float(below * (above / below) ** part)
        return below + part * (above - below)

    (low_n, low_time), (high_n, high_time) = (coarse(n, time) for time in times)
    low = between(low_place(low_n, quantile, confidence, low_time), low_n, is_low=True)
    high = between(high_place(high_n, quantile, confidence, high_time), high_n, is_low=False)
    return Percentile(
        value=value,
        low=None if low is None else min(value, low),
        high=None if high is None else max(value, high),
        few=has_few(n / max(times), quantile),
    )


def percentile_bounds(
    ordered: Values,
    quantile: float,
    confidence: float,
    n_infinite: int = 0,
    times: BoundTimes | None = INDEPENDENT,
) -> Interval:
    """The same percentile with two exact one-sided bounds, each an order statistic and valid at
    `confidence` or more. These bounds prove an SLO met or missed."""
    n = len(ordered) + n_infinite
    if n == 0:
        return Interval(math.nan)
    value = _at(ordered, nearest_rank(n, quantile))
    if times is None:
        return Interval(value)
    (low_n, low_time), (high_n, high_time) = (coarse(n, time) for time in times)
    low, _ = order_ranks(low_n, quantile, 2 * confidence - 1, low_time)
    _, high = order_ranks(high_n, quantile, 2 * confidence - 1, high_time)
    return Interval(
        value,
        None if low is None else min(value, _at(ordered, max(1, low * n // low_n))),
        None if high is None else max(value, _at(ordered, min(n, -(-high * n // high_n)))),
    )


def _at(ordered: Values, rank: int) -> float:
    """The sample of a 1-based rank; +inf past the finite samples."""
    return float(ordered[rank - 1]) if rank <= len(ordered) else math.inf


def effective_n(hits: Values, sizes: Values) -> float:
    """The number of independent samples that Σ sizes clustered samples are equivalent to, for the
    share of samples at or below a value.

    Per cluster (request), `hits` of its `sizes` samples lie at or below the value. With the share p
    = Σ hits / Σ sizes and V = G/(G−1) · Σ(hitsᵢ − p·sizesᵢ)² / (Σ sizes)² its clustered variance
    over G clusters, the number is p(1−p)/V, at most Σ sizes; G where the variance vanishes.

    Source: Korn & Graubard, Survey Methodology 24(2), 1998.
    """
    total, n_clusters = float(sizes.sum()), len(sizes)
    share = float(hits.sum()) / total
    if n_clusters < 2:
        return 1.0
    spread = float(np.square(hits - share * sizes).sum()) * n_clusters / (n_clusters - 1)
    if spread <= 0 or not 0 < share < 1:
        return float(n_clusters)
    return min(total, share * (1 - share) * total * total / spread)


def fewest_samples(quantile: float) -> int:
    """The smallest n that has a percentile: ⌈1 / (1 − q)⌉ samples, so that one lies beyond it."""
    return math.ceil(round(1 / (1 - quantile), 6))


def planned_for(n: int) -> float:
    """The mean number of random arrivals with which 95 to 98 % of the draws have at least n."""
    return n + 2 * math.sqrt(n)
