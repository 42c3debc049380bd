"""A measure over the nights: facts of nightly.json in, a Vega-Lite specification out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.measure.catalog import Metric
from loadgen.measure.wording import format_value
from reports.charts import BLUE, GREY, ORANGE, Spec, standalone, time_unit

_GREEN, _RED = "#2a9d78", "#d1495b"
VERDICTS = ("baseline", "same", "better", "worse", "inconclusive", "invalid")
COLORS = (BLUE, _GREEN, _GREEN, _RED, ORANGE, GREY)
LABEL = (
    "slice(datum.label, 4, 6) + '-' + slice(datum.label, 6, 8) + ' ' + slice(datum.label, 9, 11)"
    " + ':' + slice(datum.label, 11, 13)"
)
BOTH = {"absolute": "the cell itself", "control": "the control itself"}
"""What lies behind a relative number, by its key in nightly.json."""
SHAPES = ("circle", "circle", "triangle-up", "triangle-down", "diamond", "cross")


def trend_chart(text: str, metric: Metric, points: Sequence[Mapping[str, Any]]) -> Spec:
    """A dot with its interval per night, coloured and shaped by that night's verdict; a dot leads
    to its CI job where the night recorded one."""
    unit, factor = _scale(metric, points)
    controlled = any("control" in one for one in points)
    rows = [
        {
            "night": one["night"],
            "at": one["started_utc"],
            "verdict": one["verdict"],
            "link": one["link"] if str(one["link"]).startswith(("https://", "http://")) else None,
            "runs": one["n_runs"],
            **{key: None if one[key] is None else one[key] * factor
               for key in ("value", "low", "high")},
            **{key: format_value(one[key], metric.unit) for key in BOTH if key in one},
        }
        for one in points
    ]  # fmt: skip
    x = {"field": "night", "type": "ordinal", "title": "night",
         "axis": {"labelExpr": LABEL,
                  "labelOverlap": "greedy", "labelAngle": 0}}  # fmt: skip
    y = {"type": "quantitative", "title": unit, "scale": {"zero": False}}
    tone = {"field": "verdict", "type": "nominal", "legend": {"title": None, "orient": "top"}}
    number = {"type": "quantitative", "format": ".4~g"}
    tooltip = [
        {"field": "at", "type": "nominal", "title": "started (UTC)"},
        {"field": "value", "title": f"{text}, {unit}", **number},
        {"field": "low", "title": "from", **number},
        {"field": "high", "title": "to", **number},
        *(
            {"field": key, "type": "nominal", "title": title}
            for key, title in BOTH.items()
            if controlled
        ),
        {"field": "runs", "type": "quantitative", "title": "runs"},
        {"field": "verdict", "type": "nominal", "title": "verdict"},
    ]
    layers = [
        {
            "mark": {"type": "line", "color": GREY, "strokeWidth": 1, "opacity": 0.6},
            "encoding": {"x": x, "y": {**y, "field": "value"}},
        },
        {
            "transform": [{"filter": "isValid(datum.high)"}],
            "mark": {"type": "rule", "strokeWidth": 2, "color": GREY},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {
                "x": x,
                "y": {**y, "field": "value"},
                "color": {**tone, "scale": {"domain": VERDICTS, "range": COLORS}},
                "shape": {**tone, "scale": {"domain": VERDICTS, "range": SHAPES}},
                "href": {"field": "link"},
                "tooltip": tooltip,
            },
        },
    ]
    spec = {"height": 200, "width": "container", "data": {"values": rows}, "layer": layers}
    return standalone(spec, f"{text} over the nights, {unit}")


def _scale(metric: Metric, points: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    if any("control" in one for one in points):
        return "points above the control" if metric.unit == "share" else "% of the control", 100.0
    if metric.unit == "share":
        return "%", 100.0
    if metric.unit == "s":
        return time_unit(max(one["high"] or one["value"] for one in points))
    return "per s", 1.0
