"""The numbers of a night's runs on the scale they are compared on: as they are, or relative to the
control that ran beside each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.measure.comparison.judgement import off_scale, scaled, typical
from loadgen.measure.comparison.measures import Measure, measure
from loadgen.measure.nights.night_record import CellNight, RunNumbers
from loadgen.measure.per_request import Mask
from loadgen.measure.statistics.intervals import Values


def on_scale_of_nights(runs: Sequence[RunNumbers], asked: Measure) -> Values:
    """One number per run: its logarithm (shares as they are), less that of its control where it
    has one, so that what both ran on is in neither. Not finite where one of the two has none."""
    own = scaled(asked, values_of(runs, asked))
    if not has_controls(runs):
        return own
    with np.errstate(invalid="ignore"):  # both 0: no ratio
        return np.asarray(own - scaled(asked, values_of(controls_of(runs), asked)))


def values_of(runs: Sequence[RunNumbers], asked: Measure) -> Values:
    return np.array([run.values.get(asked.text, math.nan) for run in runs], dtype=np.float64)


def controls_of(runs: Sequence[RunNumbers]) -> list[RunNumbers]:
    """The runs that were made beside these."""
    return [run.control for run in runs if run.control is not None]


def has_controls(runs: Sequence[RunNumbers]) -> bool:
    """Whether these are runs of a cell with a control: then each has one."""
    found = controls_of(runs)
    assert len(found) in (0, len(runs)), f"{len(found)} of {len(runs)} runs have a control"
    return bool(found)


CONFIDENCE = 0.95


def trend(nights: Sequence[CellNight], text: str) -> list[dict[str, Any]]:
    """One point per night with trusted runs: their mean (geometric where changes are relative) and
    where the mean of that night lies, by Student's t over its runs; open with a single run. With
    controls the mean is that relative to them (a ratio; of shares, a difference), and `absolute`
    and `control` are what the cell and its control did."""
    asked = measure(text)
    points = []
    for night in nights:
        on_scale = on_scale_of_nights(night.trusted, asked)
        is_known = np.isfinite(on_scale)
        on_scale = on_scale[is_known]
        if not len(on_scale):
            continue
        mean, half = float(on_scale.mean()), _half_width(on_scale)
        ends = (mean, mean - half, mean + half)
        value, low, high = ends if asked.is_share else (1 + off_scale(asked, end) for end in ends)
        points.append(
            {
                "night": night.night,
                "started_utc": night.started_utc,
                "value": value,
                "low": low,
                "high": high,
                "n_runs": len(on_scale),
                "verdict": night.verdict,
                "link": night.link,
                **_both(night.trusted, asked, is_known),
            }
        )
    return points


def _both(runs: Sequence[RunNumbers], asked: Measure, is_known: Mask) -> dict[str, float]:
    """What a cell and its control did, where it has one: means of the runs."""
    if not has_controls(runs):
        return {}
    own, of_control = values_of(runs, asked), values_of(controls_of(runs), asked)
    return {
        "absolute": typical(asked, own[is_known]),
        "control": typical(asked, of_control[is_known]),
    }


def _half_width(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return float("nan")
    t = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    return t * float(values.std(ddof=1)) / float(np.sqrt(n))
