"""TODO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its ends; an end is None where it does not exist (open)."""

    value: float
    low: float | None = None
    high: float | None = None


def mean_bounds(sums: Values, sizes: Values, confidence: float) -> Interval:
    """The mean Σ sums / Σ sizes with two one-sided bounds, by clusters (requests); Student's t.

    `sums` and `sizes` are per cluster; with one sample each this is the ordinary mean. Fewer than
    two clusters leave both ends open.
    """
    n_clusters, total = len(sums), float(sizes.sum())
    if total == 0:
        return Interval(math.nan)
    mean = float(sums.sum()) / total
    if n_clusters < 2:
        return Interval(mean)
    from scipy.special import stdtrit

    spread = float(np.square(sums - mean * sizes).sum()) * n_clusters / (n_clusters - 1)
    half = float(stdtrit(n_clusters - 1, confidence)) * math.sqrt(spread) / total
    return Interval(mean, mean - half, mean + half)


Estimate = dict[str, Any]
"""{value, low, high, n}: `n` runs; None where there is no such number, or it is infinite."""


def estimate(found: Interval) -> Estimate:
    """What one run says, with its own interval."""
    ends = {"value": found.value, "low": found.low, "high": found.high}
    return {name: _finite(end) for name, end in ends.items()} | {"n": 1}


def over_runs(values: Sequence[Mapping[str, Any]], confidence: float) -> Estimate:
    """Over several runs the mean of their values and its two-sided interval; of a single run its
    own. A value that is missing in one run is missing in the mean: it may be infinitely bad there.
    """
    if len(values) == 1:
        only = values[0]
        return {"value": only["value"], "low": only.get("low"), "high": only.get("high"), "n": 1}
    known = [value["value"] for value in values]
    if any(value is None for value in known):
        return {"value": None, "low": None, "high": None, "n": len(values)}
    return mean_over([value for value in known if value is not None], confidence)


def mean_over(values: Sequence[float], confidence: float) -> Estimate:
    """The mean and its two-sided interval (Student's t over the values)."""
    if not values:
        return {"value": None, "low": None, "high": None, "n": 0}
    found = mean_bounds(np.array(values), np.ones(len(values)), (1 + confidence) / 2)
    return {"value": found.value, "low": found.low, "high": found.high, "n": len(values)}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
