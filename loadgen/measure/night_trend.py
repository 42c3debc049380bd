"""A measure over the nights, for a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.measure.judgement import off_scale, scaled
from loadgen.measure.measures import measure
from loadgen.measure.night_record import CellNight

CONFIDENCE = 0.95


def trend(nights: Sequence[CellNight], text: str) -> list[dict[str, Any]]:
    """One point per night with trusted runs: their mean (geometric where changes are relative) and
    where the mean of that night lies, by Student's t over its runs; open with a single run."""
    asked = measure(text)
    points = []
    for night in nights:
        values = np.array([run.values.get(asked.text, np.nan) for run in night.trusted])
        on_scale = scaled(asked, values)
        on_scale = on_scale[np.isfinite(on_scale)]
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
            }
        )
    return points


def _half_width(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return float("nan")
    t = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    return t * float(values.std(ddof=1)) / float(np.sqrt(n))
