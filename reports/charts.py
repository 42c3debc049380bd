"""One function per figure: frames in, a Vega-Lite specification (a plain dict) out.

Marks have mid-tone colours of the Okabe-Ito family, at least 3:1 against white and against near
black, so one specification serves light, dark and paper; text and grid lines take theirs from the
page's style sheet. Shape or dash repeats what a colour says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.measure.catalog import METRICS
from reports.run.frames import ANSWERED, WITH_FAILURES, Frames, Record

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never fetched
BLUE, ORANGE, RED, GREEN, GREY = "#3a86c8", "#d08020", "#d1495b", "#2a9d78", "#85878c"
LABEL_PX = 130
TAIL_TICKS = (math.log10(2), 1.0, 2.0, 3.0, 4.0, 5.0)
WIDE_RANGE = 30.0  # largest over median above which latencies get a logarithmic axis
FAR = 3.0  # an SLO this many times above the largest value is named, not drawn
_TEXT = {"type": "text", "align": "left", "dx": 4, "dy": -7, "fontWeight": 600}
TAIL_LABEL = (
    "datum.value < 0.5 ? '50 %' : datum.value < 1.5 ? '90 %' :"
    " datum.value < 2.5 ? '99 %' : datum.value < 3.5 ? '99.9 %' : datum.value < 4.5 ? '99.99 %'"
    " : '99.999 %'"
)


def spectra(frames: Frames) -> dict[str, Spec]:
    """The latencies of a run at every percentile, by name; a metric without samples has none."""
    return {
        f"spectrum-{name.removesuffix('_s')}": spectrum(name, records, frames.limits[name])
        for name, records in frames.spectra.items()
        if records
    }


def spectrum(metric: str, records: Sequence[Record], limits: Sequence[Record]) -> Spec:
    """A latency at every percentile on a tail axis, with its band and its SLO."""
    largest_s = max(r["value"] for r in records)
    (unit, per_s), reach_s = time_unit(largest_s), FAR * largest_s
    rows = [scaled(r, per_s, "value", "low", "high") for r in records]
    has_failures = any(r["series"] == WITH_FAILURES for r in records)
    last = max(r["tail"] for r in records)
    x = {
        "field": "tail",
        "type": "quantitative",
        "title": "percentile",
        "scale": {"domain": [0, max(last, 1.0)], "nice": False},
        "axis": {
            "values": [tick for tick in TAIL_TICKS if tick <= last + 1e-9],
            "labelExpr": TAIL_LABEL,
            "labelOverlap": False,
        },
    }
    y = latency_axis([r["value"] for r in rows], unit)
    legend = {"title": None, "orient": "top", "labelLimit": 400, "symbolOpacity": 1}
    color = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": [ANSWERED, WITH_FAILURES], "range": [BLUE, RED]},
        "legend": legend if has_failures else None,
    }
    has_clocks = len({r["clock"] for r in records}) > 1
    of_clock = [{"filter": "datum.clock === clock"}] if has_clocks else []
    band: Spec = {
        "transform": [*of_clock, {"filter": "isValid(datum.high)"}],
        "mark": {"type": "area", "opacity": 0.2, "interpolate": "step-before"},
        "encoding": {
            "x": x,
            "y": {**y, "field": "low"},
            "y2": {"field": "high"},
            "color": color,
        },
    }
    layers: list[Spec] = [
        *([band] if any(row["high"] is not None for row in rows) else []),
        {
            "transform": of_clock,
            "mark": {"type": "line", "interpolate": "step-before", "strokeWidth": 2},
            "encoding": {
                "x": x,
                "y": {**y, "field": "value"},
                "color": color,
                "strokeDash": {
                    **color,
                    "scale": {"domain": [ANSWERED, WITH_FAILURES], "range": [[1, 0], [5, 3]]},
                },
            },
        },
        {"transform": of_clock, **_spectrum_tooltips(x, y, unit)},
        *_limit_layers([s for s in limits if s["limit"] <= reach_s], per_s, x, y),
        *_far_limit_layers([s for s in limits if s["limit"] > reach_s]),
    ]
    spec = {"height": 230, "width": "container", "data": {"values": rows}, "layer": layers}
    if has_clocks:
        spec["params"] = [{"name": "clock", "value": "released"}]
    return standalone(spec, f"{METRICS[metric].title} at every percentile, in {unit}")


def _spectrum_tooltips(x: Spec, y: Spec, unit: str) -> Spec:
    number = {"type": "quantitative", "format": ".4~g"}
    return {
        "mark": {"type": "point", "opacity": 0, "size": 120, "filled": True},
        "encoding": {
            "x": x,
            "y": {**y, "field": "value"},
            "tooltip": [
                {"field": "quantile", "type": "quantitative", "format": ".4~%", "title": "at"},
                {"field": "value", "title": unit, **number},
                {"field": "low", "title": "from", **number},
                {"field": "high", "title": "to", **number},
                {"field": "series", "type": "nominal", "title": "of"},
            ],
        },
    }


def _limit_layers(limits: Sequence[Record], per_s: float, x: Spec, y: Spec) -> list[Spec]:
    """A line per SLO with its text, and a ring at the percentile it is about."""
    layers: list[Spec] = []
    for place, limit in enumerate(sorted(limits, key=lambda limit: -limit["limit"])):
        data = {"values": [{**scaled(limit, per_s, "limit"), "start": 0}]}
        at = {**y, "field": "limit"}
        rule = {"type": "rule", "color": ORANGE, "strokeDash": [6, 3], "strokeWidth": 1.5}
        encoding = {"y": at, "x": {**x, "field": "start"}, "text": {"field": "text"}}
        layers.append({"data": data, "mark": rule, "encoding": {"y": at}})
        text = {
            **_TEXT,
            "dx": 4 + LABEL_PX * place,
        }  # beside each other, however near the lines are
        layers.append({"data": data, "mark": text, "encoding": encoding})
        if limit["tail"] is not None and limit["tail"] <= x["scale"]["domain"][1]:
            ring = {"type": "point", "shape": "circle", "size": 90, "color": ORANGE}
            encoding = {"y": at, "x": {**x, "field": "tail"}}
            layers.append({"data": data, "mark": ring, "encoding": encoding})
    return layers


def _far_limit_layers(limits: Sequence[Record]) -> list[Spec]:
    """SLOs so far above everything measured that drawing them would flatten it: words only."""
    if not limits:
        return []
    texts = [f"{limit['text']} is far above ↑" for limit in limits]
    mark = {**_TEXT, "baseline": "top", "dy": 2}
    encoding = {"x": {"value": 0}, "y": {"value": 0}, "text": {"field": "text"}}
    return [{"data": {"values": [{"text": texts}]}, "mark": mark, "encoding": encoding}]


def latency_axis(values: Sequence[float], unit: str) -> Spec:
    """Linear from zero, or logarithmic where the tail would flatten everything else."""
    positive = sorted(v for v in values if v > 0)
    is_wide = bool(positive) and positive[-1] > WIDE_RANGE * positive[len(positive) // 2]
    scale = {"type": "log"} if is_wide and len(positive) == len(values) else {"zero": True}
    return {
        "type": "quantitative",
        "title": f"{unit} (log scale)" if "type" in scale else unit,
        "scale": scale,
        "axis": {"minExtent": 46},
    }


def time_unit(largest_s: float) -> tuple[str, float]:
    """The unit a figure shows and how many of it make a second."""
    return ("s", 1.0) if largest_s >= 10 else ("ms", 1e3)


def scaled(record: Mapping[str, Any], per_s: float, *fields: str) -> Record:
    scaled = {f: None if record[f] is None else record[f] * per_s for f in fields}
    return {**record, **scaled}


def standalone(spec: Spec, description: str) -> Spec:
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
