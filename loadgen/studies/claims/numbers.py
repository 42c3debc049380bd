"""From the values of seeds to the interval of a repeat, and whether a statement holds. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.measure.statistics.student_t import student_t
from loadgen.studies.claims.claim import Claim, Drawn, Exact, Recorded, Untested
from loadgen.studies.claims.result import ClaimRow

Values = Sequence[float | None]
_RATIOS = ("times", "change")
_ROUNDING = 1e-9  # relative, of exact values


def judged(claim: Claim, sets: Sequence[Values], confidence: float) -> ClaimRow:
    """The row of a claim from the values by set of seeds."""
    is_ratio = claim.unit in _RATIOS
    estimates = [repeat_interval(values, confidence, is_ratio) for values in sets]
    value = estimates[0] if estimates else EstimateSection(value=None, n=0)
    repeats = [estimate.value for estimate in estimates[1:]]
    low, high = claim.bounds
    known = [estimate.value for estimate in estimates if estimate.value is not None]
    method = method_of(claim)
    if method == "simulated" and len(known) < len(sets):
        method = "unfinished"
    return ClaimRow(
        key=claim.key,
        topic=claim.topic,
        system=claim.system,
        source=claim.source,
        claimed=claim.claimed,
        workload=claim.workload,
        unit=claim.unit,
        value=value,
        repeats=repeats,
        n_inside=sum(is_inside(value, repeat) for repeat in repeats),
        low_bound=low,
        high_bound=high,
        holds=all(_is_between(v, low, high) for v in known) if known else None,
        statement=claim.statement,
        method=method,
    )


def method_of(claim: Claim) -> str:
    match claim.measurement:
        case Untested():
            return "not tested"
        case Recorded():
            return "recorded"
        case Exact() | Drawn():
            return "computed"
    return "simulated"


def repeat_interval(values: Values, confidence: float, is_ratio: bool) -> EstimateSection:
    """The mean of n values (of a ratio the geometric mean), and the interval that contains the mean
    of n further values with this confidence: m ± t · s · √(1/n + 1/n), t with n − 1 degrees.

    None if a value is missing. A single value has no interval.
    Source: Hahn & Meeker, Statistical Intervals, 1991, section 4.8.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    n = len(known)
    if not n or n < len(values) or (is_ratio and min(known) <= 0):
        return EstimateSection(value=None, n=len(values))
    numbers = np.log(known) if is_ratio else np.array(known)
    mean = float(numbers.mean())
    ends = [mean]
    if n > 1:
        half = student_t((1 + confidence) / 2, n - 1) * float(numbers.std(ddof=1)) * (2 / n) ** 0.5
        ends += [mean - half, mean + half]
    value, *bounds = (math.exp(end) if is_ratio else end for end in ends)
    low, high = bounds or (None, None)
    return EstimateSection(value=value, low=low, high=high, n=n)


def is_inside(interval: EstimateSection, value: float | None) -> bool:
    """Whether a value is inside an interval, up to rounding."""
    if value is None or interval.low is None or interval.high is None:
        return False
    room = _ROUNDING * max(abs(interval.low), abs(interval.high))
    return interval.low - room <= value <= interval.high + room


def _is_between(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)
