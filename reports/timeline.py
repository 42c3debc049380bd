"""The load, the latencies and the server of a run over one time axis."""

from __future__ import annotations

from collections.abc import Sequence

from reports.charts import (
    BLUE,
    FAR,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Spec,
    latency_axis,
    scaled,
    standalone,
    time_unit,
)
from reports.frames import Frames, Record

PANEL_HEIGHT = 110


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
    rows = [scaled(gap, per_s, "gap_s") for gap in frames.gaps]
    points: Spec = {
        "data": {"values": rows},
        "mark": {"type": "point", "clip": True, "size": 16, "color": GREEN, "shape": "diamond"},
        "encoding": {
            "x": {**_time_axis(frames, False, True), "field": "released_s"},
            "y": {**latency_axis([r["gap_s"] for r in rows], unit), "field": "gap_s"},
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
    rows = [scaled(p, per_s, "ttft_s") for p in frames.points]
    statuses = ["ok", *sorted({p["status"] for p in frames.points} - {"ok"})]
    is_ok = {"condition": {"test": "datum.status === 'ok'", "value": BLUE}, "value": RED}
    points: Spec = {
        "data": {"values": rows},
        "mark": {"type": "point", "clip": True, "size": 22, "strokeWidth": 1.3},
        "encoding": {
            "x": {**_time_axis(frames, False, True), "field": "released_s"},
            "y": {
                **latency_axis([r["ttft_s"] for r in rows], unit),
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
            "data": {"values": [scaled(limit, per_s, "limit")]},
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
