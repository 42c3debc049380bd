"""Figures of a run's latencies at every percentile, on an axis stretched towards the tail."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.measure.catalog import METRICS
from reports.charts import (
    BLUE,
    DASHED,
    FAR,
    LEGEND,
    ORANGE,
    RED,
    Record,
    Spec,
    bounds,
    figure,
    hues,
    latency_axis,
    layer,
    number,
    scaled,
    tail_axis,
    time_unit,
)
from reports.run.frames import ANSWERED, WITH_FAILURES, Frames

_LABEL_PX = 130
_TEXT = {"type": "text", "align": "left", "dx": 4, "dy": -7, "fontWeight": 600}


def spectra(frames: Frames) -> dict[str, Spec]:
    """A figure per latency, by name; a metric without samples has none."""
    return {
        f"spectrum-{name.removesuffix('_s')}": spectrum(name, records, frames.limits[name])
        for name, records in frames.spectra.items()
        if records
    }


def spectrum(metric: str, records: Sequence[Record], limits: Sequence[Record]) -> Spec:
    """A latency at every percentile with its confidence band and its SLOs."""
    largest_s = max(r["value"] for r in records)
    (unit, per_s), reach_s = time_unit(largest_s), FAR * largest_s
    rows = [scaled(r, per_s, "value", "low", "high") for r in records]
    has_failures = any(r["series"] == WITH_FAILURES for r in records)
    x = tail_axis(max(1.0, *(r["tail"] for r in records)))
    y = latency_axis([r["value"] for r in rows], unit)
    legend = (
        {**LEGEND, "labelLimit": 400, "columns": 1, "symbolOpacity": 1} if has_failures else None
    )
    series = [ANSWERED, WITH_FAILURES]
    color = hues("series", series, [BLUE, RED], legend)
    dash = {**color, "scale": {"domain": series, "range": [[1, 0], [5, 3]]}}
    at = {"x": x, "y": {**y, "field": "value"}}
    band = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color}
    line = {"type": "line", "interpolate": "step-before", "strokeWidth": 2}
    tooltip = [
        number("quantile", "percentile", ".4~%"),
        number("value", unit),
        *bounds(),
        {"field": "series", "type": "nominal", "title": "requests"},
    ]
    curves = [
        layer(
            {"type": "area", "opacity": 0.2, "interpolate": "step-before"},
            band,
            where="isValid(datum.high)",
        ),
        layer(line, {**at, "color": color, "strokeDash": dash}),
        layer(
            {"type": "point", "opacity": 0, "size": 120, "filled": True}, {**at, "tooltip": tooltip}
        ),
    ][0 if any(row["high"] is not None for row in rows) else 1 :]
    has_clocks = len({r["clock"] for r in records}) > 1
    if has_clocks:
        for curve in curves:
            filters = curve.get("transform", [])
            curve["transform"] = [{"filter": "datum.clock === clock"}, *filters]
    layers = [
        *curves,
        *_limit_layers([s for s in limits if s["limit"] <= reach_s], per_s, x, y),
        *_far_limit_layers([s for s in limits if s["limit"] > reach_s]),
    ]
    params = {"params": [{"name": "clock", "value": "released"}]} if has_clocks else {}
    title = f"{METRICS[metric].title} at every percentile, in {unit}"
    return figure(title, rows, height=230, layer=layers, **params)


def _limit_layers(limits: Sequence[Record], per_s: float, x: Spec, y: Spec) -> list[Spec]:
    """A line per SLO with its text, and a ring at its percentile."""
    layers: list[Spec] = []
    for place, limit in enumerate(sorted(limits, key=lambda limit: -limit["limit"])):
        rows = [{**scaled(limit, per_s, "limit"), "start": 0}]
        at = {**y, "field": "limit"}
        # Texts stand side by side, however near to each other the lines are.
        text = {**_TEXT, "dx": 4 + _LABEL_PX * place}
        label = {"y": at, "x": {**x, "field": "start"}, "text": {"field": "text"}}
        layers += [layer(DASHED, {"y": at}, rows), layer(text, label, rows)]
        if limit["tail"] is not None and limit["tail"] <= x["scale"]["domain"][1]:
            ring = {"type": "point", "shape": "circle", "size": 90, "color": ORANGE}
            layers.append(layer(ring, {"y": at, "x": {**x, "field": "tail"}}, rows))
    return layers


def _far_limit_layers(limits: Sequence[Record]) -> list[Spec]:
    """Text only, for SLOs so far above every measured value that a line would flatten the rest."""
    if not limits:
        return []
    rows = [{"text": [f"{limit['text']} is far above ↑" for limit in limits]}]
    place = {"x": {"value": 0}, "y": {"value": 0}, "text": {"field": "text"}}
    return [layer({**_TEXT, "baseline": "top", "dy": 2}, place, rows)]
