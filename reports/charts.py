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
from reports.frames import ANSWERED, WITH_FAILURES, Frames, Record

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never fetched
BLUE, ORANGE, RED, GREEN, GREY = "#3a86c8", "#d08020", "#d1495b", "#2a9d78", "#85878c"
PANEL_HEIGHT = 110
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


def figures(frames: Frames) -> dict[str, Spec]:
    """All figures of a run by name; a metric without samples has none."""
    spectra = {
        f"spectrum-{name.removesuffix('_s')}": spectrum(name, records, frames.limits[name])
        for name, records in frames.spectra.items()
        if records
    }
    return {**spectra, "timeline": timeline(frames)}


def spectrum(metric: str, records: Sequence[Record], limits: Sequence[Record]) -> Spec:
    """A latency at every percentile on a tail axis, with its band and its SLO."""
    largest_s = max(r["value"] for r in records)
    (unit, per_s), reach_s = time_unit(largest_s), FAR * largest_s
    rows = [_scaled(r, per_s, "value", "low", "high") for r in records]
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
    y = _latency_axis([r["value"] for r in rows], unit)
    legend = {"title": None, "orient": "top", "labelLimit": 400, "symbolOpacity": 1}
    color = {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": [ANSWERED, WITH_FAILURES], "range": [BLUE, RED]},
        "legend": legend if has_failures else None,
    }
    has_clocks = len({r["clock"] for r in records}) > 1
    of_clock = [{"filter": "datum.clock === clock"}] if has_clocks else []
    layers: list[Spec] = [
        {
            "transform": [*of_clock, {"filter": "isValid(datum.high)"}],
            "mark": {"type": "area", "opacity": 0.2, "interpolate": "step-before"},
            "encoding": {
                "x": x,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
                "color": color,
            },
        },
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
        data = {"values": [{**_scaled(limit, per_s, "limit"), "start": 0}]}
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


def timeline(frames: Frames) -> Spec:
    """Arrivals, requests in flight, TTFT, gaps, tokens, goodput and, where the server tells them,
    its queue and KV use over one time axis; the top strip zooms all."""
    has_server = bool(frames.server)
    tokens = _step("output_tokens", "tokens/s", GREEN)
    kept = "kept their promises" if frames.has_promises else "ended well"
    panels = [
        _panel(frames, "arrivals per s", _arrivals(), is_overview=True),
        _panel(frames, "in flight", _step("in_flight", "requests in flight", BLUE)),
        _ttft_panel(frames),
        *([_gap_panel(frames)] if frames.gaps else []),
        _panel(frames, "output tokens per s", tokens),
        _panel(frames, f"goodput: {kept} per s", _goodput(kept), not has_server),
        *(_server_panels(frames) if has_server else []),
    ]
    spec: Spec = {
        "datasets": {
            "seconds": _closed(frames.seconds),
            **({"server": _closed(frames.server)} if has_server else {}),
            "window": [{"from_s": frames.window_s[0], "to_s": frames.window_s[1]}],
            "warmup": [{"from_s": 0.0, "to_s": frames.window_s[0]}],
        },
        "spacing": 14,
        "vconcat": panels,
    }
    return standalone(spec, "Load, latency and throughput over the run, aligned in time")


def _closed(bins: Sequence[Record]) -> list[Record]:
    """The bins and the end of the last, so that its step is drawn to there."""
    return [*bins, *({**last, "from_s": last["to_s"]} for last in bins[-1:])]


def _server_panels(frames: Frames) -> list[Spec]:
    """The server's own account: requests running and waiting, and the share of its KV in use."""
    told = {name for record in frames.server for name in record if record[name] is not None}
    kv = _step("kv_usage", "KV in use", ORANGE)
    kv[0]["encoding"]["y"] |= {"scale": {"domain": [0, 1]}}
    kv[0]["encoding"]["y"]["axis"] |= {"format": "%"}
    has_kv = "kv_usage" in told
    panels = []
    if told & {"running", "waiting"}:
        title = "in the server: running, waiting"
        panels.append(_panel(frames, title, _running_and_waiting(), not has_kv, data="server"))
    if has_kv:
        panels.append(_panel(frames, "in the server: KV cache in use", kv, True, data="server"))
    return panels


def _running_and_waiting() -> list[Spec]:
    """Running as a filled step, waiting as a line upon it."""
    y = {"type": "quantitative", "title": "running ▆  waiting —", "axis": {"minExtent": 46}}
    tooltip = [
        {"field": "from_s", "title": "from s"},
        {"field": "running", "type": "quantitative", "title": "running"},
        {"field": "waiting", "type": "quantitative", "title": "waiting"},
    ]
    mark = {"interpolate": "step-after", "clip": True}
    return [
        {
            "mark": {"type": "area", "color": BLUE, "opacity": 0.35, **mark},
            "encoding": {"y": {**y, "field": "running"}},
        },
        {
            "mark": {"type": "line", "color": RED, "strokeWidth": 1.5, **mark},
            "encoding": {"y": {**y, "field": "waiting"}, "tooltip": tooltip},
        },
    ]


def _panel(
    frames: Frames,
    title: str,
    layers: Sequence[Spec],
    has_axis: bool = False,
    is_overview: bool = False,
    data: str = "seconds",
) -> Spec:
    drawn: list[Spec] = [{"data": {"name": data}, **layer} for layer in layers]
    if is_overview:
        drawn[-1]["params"] = [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}}]
    x = _time_axis(frames, has_axis or is_overview, not is_overview)
    return {
        "height": PANEL_HEIGHT,
        "width": "fit",
        "title": {"text": title, "anchor": "start", "fontSize": 12, "offset": 4},
        "layer": [
            *({**layer, "encoding": {"x": x, **layer["encoding"]}} for layer in drawn),
            *_phases(x),
        ],
    }


def _phases(x: Spec) -> list[Spec]:
    """Warm-up shaded, the measured window between two rules; outside of a zoomed axis clipped."""
    ends = {"x": {**x, "field": "from_s"}, "x2": {"field": "to_s"}}
    rule = {"type": "rule", "strokeDash": [3, 3], "color": GREY, "clip": True}
    return [
        {
            "data": {"name": "warmup"},
            "mark": {"type": "rect", "color": GREY, "opacity": 0.16, "clip": True},
            "encoding": ends,
        },
        {
            "data": {"name": "window"},
            "mark": rule,
            "encoding": {"x": {**x, "field": "from_s"}},
        },
        {"data": {"name": "window"}, "mark": rule, "encoding": {"x": {**x, "field": "to_s"}}},
    ]


def _time_axis(frames: Frames, has_title: bool, follows_zoom: bool) -> Spec:
    """The whole run, or the stretch brushed in the overview (its signal is empty without one)."""
    scale: Spec = {"domain": [0, frames.end_s], "nice": False}
    if follows_zoom:
        scale = {
            "domainMin": {"expr": "zoom.from_s ? zoom.from_s[0] : 0"},
            "domainMax": {"expr": f"zoom.from_s ? zoom.from_s[1] : {frames.end_s}"},
            "nice": False,
            "zero": False,
        }
    return {
        "field": "from_s",
        "type": "quantitative",
        "title": "seconds since the start of the run" if has_title else None,
        "scale": scale,
        "axis": {"grid": False, "tickCount": 10},
    }


def _arrivals() -> list[Spec]:
    """Asked as a filled step, sent as a line upon it: a gap between them is the client's."""
    tooltip = [
        {"field": "from_s", "title": "from s"},
        {"field": "asked", "type": "quantitative", "title": "asked per s", "format": ".4~g"},
        {"field": "sent", "type": "quantitative", "title": "sent per s", "format": ".4~g"},
    ]
    y = {"type": "quantitative", "title": "asked ▆  sent —", "axis": {"minExtent": 46}}
    return [
        {
            "mark": {
                "type": "area",
                "interpolate": "step-after",
                "opacity": 0.35,
                "color": GREY,
                "clip": True,
            },
            "encoding": {"y": {**y, "field": "asked"}},
        },
        {
            "mark": {
                "type": "line",
                "interpolate": "step-after",
                "color": BLUE,
                "strokeWidth": 1.5,
                "clip": True,
            },
            "encoding": {"y": {**y, "field": "sent"}, "tooltip": tooltip},
        },
    ]


def _goodput(word: str) -> list[Spec]:
    """Asked as a filled step, kept as a line upon it: a gap between them are misses."""
    asked, line = _arrivals()
    for layer in (asked, line):
        layer["encoding"]["y"] |= {"title": "asked ▆  kept —"}
    line["mark"] |= {"color": GREEN}
    line["encoding"]["y"] |= {"field": "kept"}
    line["encoding"]["tooltip"][2] = {
        "field": "kept", "type": "quantitative", "title": f"{word} per s", "format": ".4~g",
    }  # fmt: skip
    return [asked, line]


def _gap_panel(frames: Frames) -> Spec:
    """The worst freeze of each answer, at its planned instant."""
    unit, per_s = time_unit(max(gap["gap_s"] for gap in frames.gaps))
    rows = [_scaled(gap, per_s, "gap_s") for gap in frames.gaps]
    points: Spec = {
        "data": {"values": rows},
        "mark": {"type": "point", "clip": True, "size": 16, "color": GREEN, "shape": "diamond"},
        "encoding": {
            "x": {**_time_axis(frames, False, True), "field": "released_s"},
            "y": {**_latency_axis([r["gap_s"] for r in rows], unit), "field": "gap_s"},
            "tooltip": [
                {"field": "released_s", "title": "released at s", "format": ".4~g"},
                {"field": "gap_s", "title": f"longest gap, {unit}", "format": ".4~g"},
            ],
        },
    }
    return {
        "height": PANEL_HEIGHT,
        "width": "fit",
        "title": {
            "text": "longest gap between tokens of each answer",
            "anchor": "start",
            "fontSize": 12,
            "offset": 4,
        },
        "layer": [points, *_phases(_time_axis(frames, False, True))],
    }


def _step(field: str, title: str, color: str) -> list[Spec]:
    return [
        {
            "mark": {
                "type": "area",
                "interpolate": "step-after",
                "color": color,
                "fillOpacity": 0.3,
                "line": {"color": color, "strokeWidth": 1.5},
                "clip": True,
            },
            "encoding": {
                "y": {
                    "field": field,
                    "type": "quantitative",
                    "title": title,
                    "axis": {"minExtent": 46},
                },
                "tooltip": [
                    {"field": "from_s", "title": "from s"},
                    {"field": field, "type": "quantitative", "title": title, "format": ".4~g"},
                ],
            },
        }
    ]


def _ttft_panel(frames: Frames) -> Spec:
    values = [p["ttft_s"] for p in frames.points]
    unit, per_s = time_unit(max(values, default=0.0))
    rows = [_scaled(p, per_s, "ttft_s") for p in frames.points]
    statuses = ["ok", *sorted({p["status"] for p in frames.points} - {"ok"})]
    is_ok = {"condition": {"test": "datum.status === 'ok'", "value": BLUE}, "value": RED}
    points: Spec = {
        "data": {"values": rows},
        "mark": {"type": "point", "clip": True, "size": 22, "strokeWidth": 1.3},
        "encoding": {
            "x": {**_time_axis(frames, False, True), "field": "released_s"},
            "y": {
                **_latency_axis([r["ttft_s"] for r in rows], unit),
                "field": "ttft_s",
                "title": f"{unit}   ○ ok  × failed",
            },
            "color": is_ok,
            "shape": {
                "field": "status",
                "type": "nominal",
                "scale": {
                    "domain": statuses,
                    "range": ["circle"] + ["cross"] * (len(statuses) - 1),
                },
                "legend": None,
            },
            "angle": {"condition": {"test": "datum.status === 'ok'", "value": 0}, "value": 45},
            "tooltip": [
                {"field": "request_id", "title": "request"},
                {"field": "released_s", "title": "released at s", "format": ".4~g"},
                {"field": "ttft_s", "title": f"after {unit}", "format": ".4~g"},
                {"field": "status"},
            ],
        },
    }
    lines = [
        {
            "data": {"values": [_scaled(limit, per_s, "limit")]},
            "mark": {"type": "rule", "color": ORANGE, "strokeDash": [6, 3], "strokeWidth": 1.5},
            "encoding": {"y": {"field": "limit", "type": "quantitative"}},
        }
        for limit in frames.limits["ttft_s"]
        if limit["limit"] <= FAR * max(values, default=0.0)
    ]
    return {
        "height": PANEL_HEIGHT + 50,
        "width": "fit",
        "title": {"text": "time to first token", "anchor": "start", "fontSize": 12, "offset": 4},
        "layer": [points, *lines, *_phases(_time_axis(frames, False, True))],
    }


def _latency_axis(values: Sequence[float], unit: str) -> Spec:
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


def _scaled(record: Mapping[str, Any], per_s: float, *fields: str) -> Record:
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
