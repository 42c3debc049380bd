"""One number over several runs: the mean and Student's interval, as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.measure.statistics.stats import Interval, mean_bounds

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
