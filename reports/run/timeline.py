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
from reports.run.frames import Frames, Record

PANEL_HEIGHT = 110
TIME = "seconds since the start of the run"


def timeline(frames: Frames) -> Spec:
    """Arrivals, requests in flight, TTFT, ITL, tokens, goodput and, where the server tells them,
    its queue, KV use and GPUs. A stretch brushed in one strip is shown by all but the first, which
    keeps the whole run and says where in it they are."""
    kept = "kept their promises" if frames.has_promises else "ended well"
    panels = [
        _panel(frames, "arrivals per s", _arrivals(), is_overview=True),
        _panel(frames, "in flight", _step("in_flight", "requests in flight", BLUE)),
        _ttft_panel(frames),
        *([_itl_panel(frames)] if frames.itl else []),
        _panel(frames, "output tokens per s", _step("output_tokens", "tokens/s", GREEN)),
        _panel(frames, f"goodput: {kept} per s", _goodput(kept)),
        *_server_panels(frames),
    ]
    for layer in panels[-1]["layer"]:
        if "x" in layer["encoding"]:
            layer["encoding"]["x"] = {**layer["encoding"]["x"], "title": TIME}
    spec: Spec = {
        "params": zoom_params([name_strip(panel, k) for k, panel in enumerate(panels)]),
        "datasets": {
            "seconds": _closed(frames.seconds),
            **({"server": _closed(frames.server)} if frames.server else {}),
            "window": [{"from_s": frames.window_s[0], "to_s": frames.window_s[1]}],
            "warmup": [{"from_s": 0.0, "to_s": frames.window_s[0]}],
        },
        "spacing": 14,
        "vconcat": panels,
        "resolve": {"scale": {"shape": "independent"}},
    }
    return standalone(spec, "Load, latency and throughput over the run, aligned in time")


def zoom_params(strips: Sequence[str]) -> list[Spec]:
    """`shown`: the stretch all strips show, set by the page where somebody brushed one of them."""
    select = {"type": "interval", "encodings": ["x"], "translate": False, "zoom": False}
    return [
        {"name": "shown", "value": None},
        {"name": "brush", "select": select, "views": list(strips)},
    ]


def shown_scale(end_s: float) -> Spec:
    """The stretch that is shown, at first the whole run."""
    return {
        "domainMin": {"expr": "shown ? shown[0] : 0"},
        "domainMax": {"expr": f"shown ? shown[1] : {end_s}"},
        "nice": False,
        "zero": False,
    }


def name_strip(panel: Spec, k: int) -> str:
    """The name of the view in a strip that is brushed."""
    view: Spec = panel["layer"][0] if "layer" in panel else panel
    view["name"] = f"strip_{k}"
    return f"strip_{k}"


def _closed(bins: Sequence[Record]) -> list[Record]:
    """The bins and the end of the last, so that its step is drawn to there."""
    return [*bins, *({**last, "from_s": last["to_s"]} for last in bins[-1:])]


def _server_panels(frames: Frames) -> list[Spec]:
    """The server's own account, as far as it tells it: requests running and waiting, the share of
    its KV in use, and what its GPUs do."""
    told = {name for record in frames.server for name in record if record[name] is not None}
    shares = {"scale": {"domain": [0, 1]}}
    strips = {
        "kv_usage": ("in the server: KV cache in use", "KV in use", ORANGE, shares, "%"),
        "gpu_utilization": ("GPU: share of time a kernel ran", "busy", GREEN, shares, "%"),
        "gpu_memory_bytes": ("GPU: memory used, all GPUs", "bytes", BLUE, {}, ".3~s"),
        "gpu_power_w": ("GPU: power drawn, all GPUs", "W", RED, {}, "~g"),
    }
    panels = []
    if told & {"running", "waiting"}:
        title = "in the server: running, waiting"
        panels.append(_panel(frames, title, _running_and_waiting(), data="server"))
    for name, (title, axis, color, y, number) in strips.items():
        if name in told:
            (layer,) = _step(name, axis, color)
            layer["encoding"]["y"] |= y
            layer["encoding"]["y"]["axis"] |= {"format": number}
            panels.append(_panel(frames, title, [layer], data="server"))
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
    is_overview: bool = False,
    data: str = "seconds",
) -> Spec:
    x = _time_axis(frames, is_overview)
    return {
        "height": PANEL_HEIGHT,
        "width": "fit",
        "title": {"text": title, "anchor": "start", "fontSize": 12, "offset": 4},
        "layer": [
            *(
                {"data": {"name": data}, **one, "encoding": {"x": x, **one["encoding"]}}
                for one in layers
            ),
            *_phases(x),
            *([_where_zoomed(x)] if is_overview else []),
        ],
    }


def _where_zoomed(x: Spec) -> Spec:
    """The stretch the other strips show; without a width where that is all."""
    ends = {f: {"expr": f"shown ? shown[{k}] : 0"} for k, f in enumerate(("x", "x2"))}
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rect", "color": BLUE, "opacity": 0.25, "aria": False},
        "encoding": {
            "x": {"datum": ends["x"], "type": "quantitative", "scale": x["scale"]},
            "x2": {"datum": ends["x2"]},
        },
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


def _time_axis(frames: Frames, is_overview: bool = False) -> Spec:
    whole: Spec = {"domain": [0, frames.end_s], "nice": False}
    return {
        "field": "from_s",
        "type": "quantitative",
        "title": TIME if is_overview else None,
        "scale": whole if is_overview else shown_scale(frames.end_s),
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


def _itl_panel(frames: Frames) -> Spec:
    """A point per gap between tokens, at the instant it ended."""
    return _points_panel(frames, "time between tokens", frames.itl, "at_s", "itl_s", "ended at s")


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
    return _points_panel(
        frames, "time to first token", frames.points, "released_s", "ttft_s", "released at s"
    )


def _points_panel(
    frames: Frames, title: str, records: Sequence[Record], at: str, field: str, when: str
) -> Spec:
    """A latency per point, failures as crosses, and the promises that are near enough."""
    values = [record[field] for record in records]
    unit, per_s = time_unit(max(values, default=0.0))
    rows = [scaled(record, per_s, field) for record in records]
    statuses = ["ok", *sorted({record["status"] for record in records} - {"ok"})]
    is_ok = {"condition": {"test": "datum.status === 'ok'", "value": BLUE}, "value": RED}
    x = _time_axis(frames)
    points: Spec = {
        "data": {"values": rows},
        "mark": {"type": "point", "clip": True, "size": 22, "strokeWidth": 1.3},
        "encoding": {
            "x": {**x, "field": at},
            "y": {
                **latency_axis([row[field] for row in rows], unit),
                "field": field,
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
                {"field": at, "title": when, "type": "quantitative", "format": ".4~g"},
                {"field": field, "title": unit, "type": "quantitative", "format": ".4~g"},
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
        for limit in frames.limits[field]
        if limit["limit"] <= FAR * max(values, default=0.0)
    ]
    return {
        "height": PANEL_HEIGHT + 50,
        "width": "fit",
        "title": {"text": title, "anchor": "start", "fontSize": 12, "offset": 4},
        "layer": [points, *lines, *_phases(x)],
    }
