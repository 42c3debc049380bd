"""Confidence intervals, and the mean with its interval by Student's t: of clustered samples, and
over several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


Estimate = dict[str, Any]
"""{value, low, high, n}: the JSON form of a number over `n` runs. None stands for a missing or
infinite number."""


def estimate(interval: Interval) -> Estimate:
    """The number of a single run with its own interval."""
    numbers = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {name: _finite(number) for name, number in numbers.items()} | {"n": 1}


def over_runs(values: Sequence[Mapping[str, Any]], confidence: float) -> Estimate:
    """The mean of the runs' values with its two-sided interval; a single run keeps its own
    interval.

    If the value of any run is missing, the mean is missing too: the missing value may be infinite.
    """
    if len(values) == 1:
        only = values[0]
        return {"value": only["value"], "low": only.get("low"), "high": only.get("high"), "n": 1}
    numbers = [value["value"] for value in values]
    if None in numbers:
        return {"value": None, "low": None, "high": None, "n": len(values)}
    return mean_over(numbers, confidence)


def mean_over(values: Sequence[float], confidence: float) -> Estimate:
    """The mean and its two-sided interval, by Student's t over the values."""
    if not values:
        return {"value": None, "low": None, "high": None, "n": 0}
    mean = mean_bounds(np.array(values), np.ones(len(values)), (1 + confidence) / 2)
    return {"value": mean.value, "low": mean.low, "high": mean.high, "n": len(values)}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
