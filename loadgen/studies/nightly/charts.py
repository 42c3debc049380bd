"""Figure of a measure over the nights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loadgen.measure.catalog import Metric
from loadgen.measure.wording import format_value
from loadgen.studies.nightly.values import TrendPoint
from reports.charts import (
    BLUE,
    GREEN,
    GREY,
    LEGEND,
    ORANGE,
    RED,
    Spec,
    bounds,
    figure,
    layer,
    number,
    time_unit,
)

VERDICTS = ("baseline", "same", "better", "worse", "inconclusive", "invalid")
COLORS = (BLUE, GREEN, GREEN, RED, ORANGE, GREY)
SHAPES = ("circle", "circle", "triangle-up", "triangle-down", "diamond", "cross")
ABSOLUTE = {"absolute": "measured in the cell", "control": "measured in the control"}
"""The two measurements behind a relative number, by their keys in nightly.json."""
PADDING = {"left": 5, "top": 5, "right": 30, "bottom": 5}  # half of the last label
_LABEL = (
    "slice(datum.label, 4, 6) + '-' + slice(datum.label, 6, 8) + ' ' + slice(datum.label, 9, 11)"
    " + ':' + slice(datum.label, 11, 13)"
)


def trend_chart(text: str, metric: Metric, points: Sequence[TrendPoint]) -> Spec:
    """A dot with its confidence interval per night, coloured and shaped by that night's verdict on
    this measure; a dot links to its CI job where the night recorded a link."""
    unit, factor = _scale(metric, points)
    has_control = any(point.control is not None for point in points)
    rows = [_row(point, metric, factor) for point in points]
    ticks = {"labelExpr": _LABEL, "labelOverlap": "greedy", "labelAngle": 0}
    x = {"field": "night", "type": "ordinal", "title": "night", "axis": ticks}
    y = {"type": "quantitative", "title": unit, "scale": {"zero": False}}
    shown = [k for k, name in enumerate(VERDICTS) if any(row["verdict"] == name for row in rows)]
    domain, tints, shapes = ([of[k] for k in shown] for of in (VERDICTS, COLORS, SHAPES))
    tone = {"field": "verdict", "type": "nominal", "legend": {**LEGEND, "columns": 3}}
    at = {"x": x, "y": {**y, "field": "value"}}
    tooltip = [
        {"field": "at", "type": "nominal", "title": "started (UTC)"},
        number("value", f"{text}, {unit}"),
        *bounds(),
        *(
            {"field": key, "type": "nominal", "title": title}
            for key, title in ABSOLUTE.items()
            if has_control
        ),
        {"field": "runs", "type": "quantitative", "title": "runs"},
        {"field": "verdict", "type": "nominal", "title": "verdict"},
    ]
    dot = {
        **at,
        "color": {**tone, "scale": {"domain": domain, "range": tints}},
        "shape": {**tone, "scale": {"domain": domain, "range": shapes}},
        "href": {"field": "link"},
        "tooltip": tooltip,
    }
    bar = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = [
        layer({"type": "line", "color": GREY, "strokeWidth": 1, "opacity": 0.6}, at),
        layer({"type": "rule", "strokeWidth": 2, "color": GREY}, bar, where="isValid(datum.high)"),
        layer({"type": "point", "filled": True, "size": 70, "opacity": 1}, dot),
    ]
    return figure(
        f"{text} over the nights, {unit}", rows, height=200, layer=layers, padding=PADDING
    )


def _row(point: TrendPoint, metric: Metric, factor: float) -> dict[str, Any]:
    bounded = {"value": point.value, "low": point.low, "high": point.high}
    measured = {"absolute": point.absolute, "control": point.control}
    return {
        "night": point.night,
        "at": point.started_utc,
        "verdict": point.verdict,
        "link": point.link if point.link.startswith(("https://", "http://")) else None,
        "runs": point.n_runs,
        **{key: value * factor if math.isfinite(value) else None for key, value in bounded.items()},
        **{
            key: format_value(value, metric.unit)
            for key, value in measured.items()
            if value is not None
        },
    }


def _scale(metric: Metric, points: Sequence[TrendPoint]) -> tuple[str, float]:
    """The unit of the axis, and the factor that converts the measure's own unit to it."""
    if any(point.control is not None for point in points):
        return "points above the control" if metric.unit == "share" else "% of the control", 100.0
    if metric.unit == "share":
        return "%", 100.0
    if metric.unit == "s":
        return time_unit(max(p.high if math.isfinite(p.high) else p.value for p in points))
    return "per s", 1.0
