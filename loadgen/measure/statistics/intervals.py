"""Confidence intervals, and the mean with its interval by Student's t: of clustered samples, and
over several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.student_t import student_t

Values = NDArray[np.float64]
"""Values of the same quantity: float64, shape [n]."""


BoundTimes = tuple[float, float]
"""Autocorrelation times in samples, for the lower and for the upper bound of an interval: n samples
count as n/τ independent samples (`dependence`)."""

INDEPENDENT: BoundTimes = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its lower and upper bound. A bound is None where none exists (open)."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> Interval:
        low, high = (None if b is None else b * factor for b in (self.low, self.high))
        return Interval(self.value * factor, low, high)


def mean_bounds(
    sums: Values, sizes: Values, confidence: float, times: BoundTimes | None = INDEPENDENT
) -> Interval:
    """The mean Σ sums / Σ sizes over clusters (requests), with two one-sided bounds by Student's t.

    `sums` and `sizes` hold an entry per cluster; with sizes of 1 this is the ordinary mean. With
    fewer than two clusters, or without `times` (in clusters), both bounds are None; without samples
    the value is NaN.
    """
    n_clusters, total = len(sums), float(sizes.sum())
    if total == 0:
        return Interval(math.nan)
    mean = float(sums.sum()) / total
    if n_clusters < 2 or times is None:
        return Interval(mean)
    spread = float(np.square(sums - mean * sizes).sum()) * n_clusters / (n_clusters - 1)
    half = student_t(confidence, n_clusters - 1) * math.sqrt(spread) / total
    return Interval(mean, mean - half * math.sqrt(times[0]), mean + half * math.sqrt(times[1]))


class BoundedSection(JsonSection, frozen=True, kw_only=True):
    """A number with its interval in a file. None is a number that is missing or infinite, or a
    bound that does not exist."""

    value: float | None
    low: float | None = None
    high: float | None = None


class EstimateSection(BoundedSection, frozen=True, kw_only=True):
    """A number over `n` runs with its interval."""

    n: int


def estimate(interval: Interval) -> EstimateSection:
    """The number of a single run with its own interval."""
    value, low, high = (_finite(end) for end in (interval.value, interval.low, interval.high))
    return EstimateSection(value=value, low=low, high=high, n=1)


def over_runs(values: Sequence[BoundedSection], confidence: float) -> EstimateSection:
    """The mean of the runs' values with its two-sided interval; a single run keeps its own
    interval.

    If the value of any run is missing, the mean is missing too: the missing value may be infinite.
    """
    if len(values) == 1:
        only = values[0]
        return EstimateSection(value=only.value, low=only.low, high=only.high, n=1)
    numbers = [number.value for number in values if number.value is not None]
    if len(numbers) < len(values):
        return EstimateSection(value=None, n=len(values))
    return mean_over(numbers, confidence)


def mean_over(values: Sequence[float], confidence: float) -> EstimateSection:
    """The mean and its two-sided interval, by Student's t over the values."""
    if not values:
        return EstimateSection(value=None, n=0)
    mean = mean_bounds(np.array(values), np.ones(len(values)), (1 + confidence) / 2)
    return EstimateSection(value=mean.value, low=mean.low, high=mean.high, n=len(values))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
