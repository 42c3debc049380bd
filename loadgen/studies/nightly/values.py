"""The numbers of a night's runs on the scale they are compared on (absolute, or relative to the
control of each run), and their trend over the nights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.manifest.json_section import JsonSection, NumberOrNull
from loadgen.measure.measures import Measure, measure
from loadgen.measure.per_request import Mask
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.student_t import student_t
from loadgen.studies.compare.judgement import POINTS, Scale, scale_of
from loadgen.studies.nightly.record import CellNight, RunNumbers


def scale_of_nights(nights: Sequence[Sequence[RunNumbers]], measure: Measure) -> Scale:
    """The scale of a measure over these nights: points for shares, else logarithms; multiples of
    the mean where a run has a value of 0 and no logarithm."""
    if measure.is_share:
        return POINTS
    runs = [run for night in nights for run in night]
    numbers = relative_values(runs, measure)
    if not (numbers == 0).any():
        return Scale()
    positive = numbers[np.isfinite(numbers) & (numbers > 0)]
    return Scale(float(positive.mean())) if len(positive) else Scale(1.0)


def relative_values(runs: Sequence[RunNumbers], measure: Measure) -> Values:
    """A number per run; with controls its ratio to that of its control run (of shares the
    difference), so that the condition of the machine cancels out. NaN where there is none."""
    own = values_of(runs, measure)
    if not has_controls(runs):
        return own
    of_controls = values_of(controls_of(runs), measure)
    if measure.is_share:
        return own - of_controls
    ratios: Values = np.full(len(own), math.nan)
    np.divide(own, of_controls, out=ratios, where=of_controls > 0)
    return ratios


def values_of(runs: Sequence[RunNumbers], measure: Measure) -> Values:
    return np.array([run.values.get(measure.text, math.nan) for run in runs], dtype=np.float64)


def controls_of(runs: Sequence[RunNumbers]) -> list[RunNumbers]:
    """The control runs made next to these runs."""
    return [run.control for run in runs if run.control is not None]


def has_controls(runs: Sequence[RunNumbers]) -> bool:
    """Whether these are runs of a cell with a control. Then each run has its own control run."""
    controls = controls_of(runs)
    assert len(controls) in (0, len(runs)), f"{len(controls)} of {len(runs)} runs have a control"
    return bool(controls)


CONFIDENCE = 0.95


class TrendPoint(JsonSection, frozen=True, kw_only=True, omit_defaults=True):
    """A measure in a night: the mean of the runs (geometric where changes are relative) and its
    interval by Student's t; NaN as bounds with a single run.

    With controls the mean is relative to them (a ratio; of shares, a difference), and `absolute`
    and `control` are the means of the cell and of its control.
    """

    night: str
    started_utc: str
    value: NumberOrNull
    low: NumberOrNull
    high: NumberOrNull
    n_runs: int
    verdict: str
    link: str
    absolute: NumberOrNull | None = None
    control: NumberOrNull | None = None


def trend(nights: Sequence[CellNight], text: str) -> list[TrendPoint]:
    """A point per night with trusted runs."""
    compared = measure(text)
    points = []
    for night in nights:
        scale = scale_of_nights([night.trusted], compared)
        on_scale = scale.of(relative_values(night.trusted, compared))
        is_known = np.isfinite(on_scale)
        on_scale = on_scale[is_known]
        if not len(on_scale):
            continue
        mean, half = float(on_scale.mean()), _half_width(on_scale)
        ends = (mean, mean - half, mean + half)
        value, low, high = (_absolute(scale, end) for end in ends)
        points.append(
            TrendPoint(
                night=night.night,
                started_utc=night.started_utc,
                value=value,
                low=low,
                high=high,
                n_runs=len(on_scale),
                verdict=night.verdicts.get(text, night.verdict),
                link=night.link,
                **_both(night.trusted, compared, is_known),
            )
        )
    return points


def _both(runs: Sequence[RunNumbers], measure: Measure, is_known: Mask) -> dict[str, float]:
    """The means of a cell's runs and of their controls; empty without a control."""
    if not has_controls(runs):
        return {}
    own, of_control = values_of(runs, measure), values_of(controls_of(runs), measure)
    return {
        "absolute": typical(measure, own[is_known]),
        "control": typical(measure, of_control[is_known]),
    }


def typical(measure: Measure, values: Values) -> float:
    """The mean of these values on their scale."""
    return scale_of(measure, values, values).typical(values)


def _absolute(scale: Scale, on_scale: float) -> float:
    if math.isnan(on_scale):
        return on_scale
    return math.exp(min(on_scale, 700.0)) if scale.unit is None else on_scale * scale.unit


def _half_width(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    n = len(values)
    if n < 2:
        return float("nan")
    t = student_t((1 + CONFIDENCE) / 2, n - 1)
    return t * float(values.std(ddof=1)) / float(np.sqrt(n))
