"""Building blocks of the figures: axes, tooltips, layers and line series as Vega-Lite dicts.

Marks have mid-tone colours of the Okabe-Ito family, at least 3:1 against white and against near
black, so the same specification serves light pages, dark pages and paper; text and grid lines take
theirs from the page's style sheet. Shape or dash repeats the meaning of a colour, for print and for
colour-blind readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Spec = dict[str, Any]
Record = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never fetched
COLORS = ("#3a86c8", "#d08020", "#2a9d78", "#d1495b", "#8a63b0", "#85878c", "#b0a020", "#50b0c8")
BLUE, ORANGE, GREEN, RED, _PURPLE, GREY = COLORS[:6]
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2], [1, 3], [10, 4], [3, 1])
LEGEND: Spec = {"title": None, "orient": "top"}
DASHED: Spec = {"type": "rule", "color": ORANGE, "strokeDash": [6, 3], "strokeWidth": 1.5}
WIDE_RANGE = 30.0  # largest over median above which latencies get a logarithmic axis
FAR = 3.0  # an SLO this many times above the largest value is named, not drawn
_TAIL_TICKS = (math.log10(2), 1.0, 2.0, 3.0, 4.0, 5.0)
_TAIL_LABEL = (
    "datum.value < 0.5 ? '50 %' : datum.value < 1.5 ? '90 %' :"
    " datum.value < 2.5 ? '99 %' : datum.value < 3.5 ? '99.9 %' : datum.value < 4.5 ? '99.99 %'"
    " : '99.999 %'"
)


def axis(field: str, title: str | None, **more: Any) -> Spec:
    """A quantitative channel; `more` holds its scale, axis or sort."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def latency_axis(values: Sequence[float], unit: str) -> Spec:
    """Linear from zero, or logarithmic where the tail would flatten all other values."""
    positive = sorted(v for v in values if v > 0)
    is_wide = bool(positive) and positive[-1] > WIDE_RANGE * positive[len(positive) // 2]
    scale = {"type": "log"} if is_wide and len(positive) == len(values) else {"zero": True}
    return {
        "type": "quantitative",
        "title": f"{unit} (log scale)" if "type" in scale else unit,
        "scale": scale,
        "axis": {"minExtent": 46},
    }


def tail_axis(last: float) -> Spec:
    """The percentile axis from the minimum to tail position `last` (see `tail_position`)."""
    ticks = [tick for tick in _TAIL_TICKS if tick <= last + 1e-9]
    labels = {"values": ticks, "labelExpr": _TAIL_LABEL, "labelOverlap": False}
    return axis("tail", "percentile", scale={"domain": [0, last], "nice": False}, axis=labels)


def number(field: str, title: str, digits: str = ".4~g") -> Spec:
    """A numeric line of a tooltip."""
    return {"field": field, "title": title, "type": "quantitative", "format": digits}


def bounds(digits: str = ".4~g") -> list[Spec]:
    """The tooltip lines of a confidence interval: `low` and `high`."""
    return [number("low", "lower bound", digits), number("high", "upper bound", digits)]


def hues(
    field: str, domain: Sequence[str], colors: Sequence[str], legend: Spec | None = LEGEND
) -> Spec:
    """A colour channel with a colour for each value of `field`."""
    scale = {"domain": list(domain), "range": list(colors)}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def layer(
    mark: Mapping[str, Any] | str,
    encoding: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] | None = None,
    where: str = "",
) -> Spec:
    """A layer with data of its own (`rows`) and a filter (`where`), where given."""
    return {
        **({} if rows is None else {"data": {"values": list(rows)}}),
        **({"transform": [{"filter": where}]} if where else {}),
        "mark": mark,
        "encoding": dict(encoding),
    }


def figure(description: str, rows: Sequence[Mapping[str, Any]] | None = None, **spec: Any) -> Spec:
    """A figure as wide as its place on the page; `description` is its accessible name."""
    data = {} if rows is None else {"data": {"values": list(rows)}}
    return standalone({"width": "container", **data, **spec}, description)


def standalone(spec: Spec, description: str) -> Spec:
    """The specification with everything that a figure needs outside of other figures."""
    return {
        "$schema": SCHEMA,
        "description": description,
        "background": "transparent",
        "config": {
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": {"gridOpacity": 1, "domain": True, "labelFontSize": 11, "titleFontSize": 11},
        },
        **spec,
    }


def time_unit(largest_s: float) -> tuple[str, float]:
    """The unit that a figure shows, and how many of it make a second."""
    return ("s", 1.0) if largest_s >= 10 else ("ms", 1e3)


def scaled(record: Mapping[str, Any], per_s: float, *fields: str) -> Record:
    """The record with `fields`, in seconds, in another unit; None stays None."""
    numbers = {f: None if record[f] is None else record[f] * per_s for f in fields}
    return {**record, **numbers}


def tail_position(quantile: float) -> float:
    """Place of a quantile on the tail axis: log10(1 / (1 − q)); 90, 99, 99.9 % are 1, 2, 3."""
    return -math.log10(1 - quantile)


def colors(n: int) -> list[str]:
    """n colours; they repeat after eight."""
    return [COLORS[k % len(COLORS)] for k in range(n)]


def series_color(names: Sequence[str], field: str) -> Spec:
    """The colour of each series, with the legend; a single series without a name needs none."""
    legend = {**LEGEND, "labelLimit": 300, "columns": 3, "symbolOpacity": 1}
    return hues(field, names, colors(len(names)), legend if any(names) else None)


def series_dash(names: Sequence[str], field: str) -> Spec:
    """The dash of each series, in the legend of its colour."""
    dashes = [DASHES[k % len(DASHES)] for k in range(len(names))]
    return {**series_color(names, field), "scale": {"domain": list(names), "range": dashes}}


def lines(
    names: Sequence[str], field: str, x: Spec, y: Spec, tooltip: Sequence[Spec]
) -> list[Spec]:
    """A line per series through `value`, with dots and the band from `low` to `high`."""
    tinted, at = series_color(names, field), {"x": x, "y": {**y, "field": "value"}}
    band = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": tinted}
    dashed = {**at, "color": tinted, "strokeDash": series_dash(names, field)}
    dots = {"type": "point", "filled": True, "size": 36}
    return [
        layer(
            {"type": "area", "opacity": 0.2},
            band,
            where="isValid(datum.low) && isValid(datum.high)",
        ),
        layer({"type": "line", "strokeWidth": 2}, dashed),
        layer(dots, {**at, "color": tinted, "tooltip": list(tooltip)}),
    ]
