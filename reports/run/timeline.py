"""The load, the latencies and the server of a run over a common time axis."""

from __future__ import annotations

from collections.abc import Sequence

from reports.charts import (
    BLUE,
    DASHED,
    FAR,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Record,
    Spec,
    axis,
    hues,
    latency_axis,
    layer,
    number,
    scaled,
    standalone,
    time_unit,
)
from reports.run.frames import Frames

PANEL_HEIGHT = 110
TIME = "seconds since the start of the run"
_LEAST_SHOWN = {"kv_usage": 0.02, "gpu_utilization": 0.02}  # of an axis that ends at 1
_STEP: Spec = {"interpolate": "step-after", "clip": True}


def timeline(frames: Frames) -> Spec:
    """Arrivals, requests in flight, TTFT, ITL, tokens, goodput and, where the server reports them,
    its queue, KV use and GPUs. All strips show the stretch that was brushed in any of them, except
    the first, which keeps the whole run and marks the stretch."""
    good = "met the SLO" if frames.has_slos else "successful"
    latency = "time to first token" if frames.is_streamed else "end-to-end time"
    panels = [
        _panel(frames, "arrivals per s: scheduled ▆, sent —", _arrivals(), is_overview=True),
        _panel(frames, "in flight", _step("in_flight", "requests in flight", BLUE)),
        _points_panel(
            frames,
            f"{latency}: ○ ok, × failed",
            frames.points,
            "released_s",
            "ttft_s",
            "released at s",
        ),
        *([_gaps_panel(frames)] if frames.itl else []),
        _throughput_panel(frames),
        _panel(frames, f"goodput per s: scheduled ▆, {good} —", _arrivals("kept", good, GREEN)),
        *_server_panels(frames),
    ]
    for mark in panels[-1]["layer"]:
        if "x" in mark["encoding"]:
            mark["encoding"]["x"] = {**mark["encoding"]["x"], "title": TIME}
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


def _throughput_panel(frames: Frames) -> Spec:
    if frames.results:
        step = _step("results", f"{frames.results}/s", GREEN)
        return _panel(frames, f"{frames.results} per s", step)
    return _panel(frames, "output tokens per s", _step("output_tokens", "tokens/s", GREEN))


def zoom_params(strips: Sequence[str]) -> list[Spec]:
    """`shown`: the stretch that all strips show; the page sets it when a strip is brushed."""
    select = {"type": "interval", "encodings": ["x"], "translate": False, "zoom": False}
    return [
        {"name": "shown", "value": None},
        {"name": "brush", "select": select, "views": list(strips)},
    ]


def shown_scale(end_s: float) -> Spec:
    """The scale of the shown stretch, at first the whole run."""
    return {
        "domainMin": {"expr": "shown ? shown[0] : 0"},
        "domainMax": {"expr": f"shown ? shown[1] : {end_s}"},
        "nice": False,
        "zero": False,
    }


def name_strip(panel: Spec, k: int) -> str:
    """Name the view of a strip that can be brushed; the name."""
    view: Spec = panel["layer"][0] if "layer" in panel else panel
    view["name"] = f"strip_{k}"
    return f"strip_{k}"


def _closed(bins: Sequence[Record]) -> list[Record]:
    """The bins and the end of the last bin, so that its step is drawn up to there."""
    return [*bins, *({**last, "from_s": last["to_s"]} for last in bins[-1:])]


def _server_panels(frames: Frames) -> list[Spec]:
    """The server's own metrics, as far as it reports them and they leave zero: running and waiting
    requests, KV use, and the load of its GPUs."""
    largest: dict[str, float] = {}
    for record in frames.server:
        for name, value in record.items():
            if value is not None:
                largest[name] = max(largest.get(name, 0.0), value)
    reported = {name for name, value in largest.items() if value > _LEAST_SHOWN.get(name, 0.0)}
    shares = {"scale": {"domain": [0, 1]}}
    strips = {
        "kv_usage": ("in the server: KV cache in use", "KV in use", ORANGE, shares, "%"),
        "gpu_utilization": ("GPU: share of time a kernel ran", "busy", GREEN, shares, "%"),
        "gpu_memory_bytes": ("GPU: memory used, all GPUs", "bytes", BLUE, {}, ".3~s"),
        "gpu_power_w": ("GPU: power drawn, all GPUs", "W", RED, {}, "~g"),
    }
    panels = []
    if reported & {"running", "waiting"}:
        title = "in the server: running ▆, waiting —"
        panels.append(_panel(frames, title, _running_and_waiting(), data="server"))
    for name, (title, label, color, y, digits) in strips.items():
        if name in reported:
            (area,) = _step(name, label, color)
            area["encoding"]["y"] |= y
            area["encoding"]["y"]["axis"] |= {"format": digits}
            panels.append(_panel(frames, title, [area], data="server"))
    return panels


def _running_and_waiting() -> list[Spec]:
    """Running requests as a filled step, waiting requests as a line over it."""
    tooltip = [
        {"field": "from_s", "title": "from s"},
        {"field": "running", "type": "quantitative", "title": "running"},
        {"field": "waiting", "type": "quantitative", "title": "waiting"},
    ]
    y = axis("running", "requests", axis={"minExtent": 46})
    return [
        layer({"type": "area", "color": BLUE, "opacity": 0.35, **_STEP}, {"y": y}),
        layer(
            {"type": "line", "color": RED, "strokeWidth": 1.5, **_STEP},
            {"y": {**y, "field": "waiting"}, "tooltip": tooltip},
        ),
    ]


def _panel(
    frames: Frames,
    title: str,
    layers: Sequence[Spec],
    is_overview: bool = False,
    data: str = "seconds",
) -> Spec:
    x = _time_axis(frames, is_overview)
    steps = [
        {"data": {"name": data}, **step, "encoding": {"x": x, **step["encoding"]}}
        for step in layers
    ]
    zoomed = [_zoomed_stretch(x)] if is_overview else []
    return {**strip(title, PANEL_HEIGHT), "layer": [*steps, *_phases(x), *zoomed]}


def strip(title: str, height: int) -> Spec:
    """The outer part of a strip: its title and its size."""
    heading = {"text": title, "anchor": "start", "fontSize": 12, "offset": 4}
    return {"height": height, "width": "fit", "title": heading}


def _zoomed_stretch(x: Spec) -> Spec:
    """The stretch that the other strips show; of no width where they show the whole run."""
    start, end = ({"expr": f"shown ? shown[{k}] : 0"} for k in (0, 1))
    mark = {"type": "rect", "color": BLUE, "opacity": 0.25, "aria": False}
    place = {"datum": start, "type": "quantitative", "scale": x["scale"]}
    return layer(mark, {"x": place, "x2": {"datum": end}}, [{}])


def _phases(x: Spec) -> list[Spec]:
    """Warm-up shaded, the measured window between two rules; clipped where the axis is zoomed."""
    shade = {"type": "rect", "color": GREY, "opacity": 0.16, "clip": True}
    rule = {"type": "rule", "strokeDash": [3, 3], "color": GREY, "clip": True}
    start, end = {**x, "field": "from_s"}, {**x, "field": "to_s"}
    return [
        {"data": {"name": "warmup"}, **layer(shade, {"x": start, "x2": {"field": "to_s"}})},
        {"data": {"name": "window"}, **layer(rule, {"x": start})},
        {"data": {"name": "window"}, **layer(rule, {"x": end})},
    ]


def _time_axis(frames: Frames, is_overview: bool = False) -> Spec:
    whole: Spec = {"domain": [0, frames.end_s], "nice": False}
    scale = whole if is_overview else shown_scale(frames.end_s)
    ticks = {"grid": False, "tickCount": 10}
    return axis("from_s", TIME if is_overview else None, scale=scale, axis=ticks)


def _arrivals(field: str = "sent", word: str = "sent", color: str = BLUE) -> list[Spec]:
    """Scheduled requests as a filled step, and `field` as a line over it. A gap between scheduled
    and sent is the load generator's delay."""
    tooltip = [
        {"field": "from_s", "title": "from s"},
        number("asked", "scheduled per s"),
        number(field, f"{word} per s"),
    ]
    y = axis("asked", "requests/s", axis={"minExtent": 46})
    return [
        layer({"type": "area", "opacity": 0.35, "color": GREY, **_STEP}, {"y": y}),
        layer(
            {"type": "line", "color": color, "strokeWidth": 1.5, **_STEP},
            {"y": {**y, "field": field}, "tooltip": tooltip},
        ),
    ]


def _step(field: str, title: str, color: str) -> list[Spec]:
    line = {"color": color, "strokeWidth": 1.5}
    mark = {"type": "area", "color": color, "fillOpacity": 0.3, "line": line, **_STEP}
    tooltip = [{"field": "from_s", "title": "from s"}, number(field, title)]
    y = axis(field, title, axis={"minExtent": 46})
    return [layer(mark, {"y": y, "tooltip": tooltip})]


def _gaps_panel(frames: Frames) -> Spec:
    title = "time between tokens: ○ ok, × failed"
    return _points_panel(frames, title, frames.itl, "at_s", "itl_s", "ended at s")


def _points_panel(
    frames: Frames, title: str, records: Sequence[Record], at: str, field: str, when: str
) -> Spec:
    """A latency per point, failed requests as crosses, and the SLOs that are near enough."""
    values = [record[field] for record in records]
    largest = max(values, default=0.0)
    unit, per_s = time_unit(largest)
    rows = [scaled(record, per_s, field) for record in records]
    statuses = ["ok", *sorted({record["status"] for record in records} - {"ok"})]
    shapes = ["circle"] + ["cross"] * (len(statuses) - 1)
    is_ok = "datum.status === 'ok'"
    x = _time_axis(frames)
    y = {**latency_axis([row[field] for row in rows], unit), "field": field}
    encoding = {
        "x": {**x, "field": at},
        "y": {**y, "title": unit},
        "color": {"condition": {"test": is_ok, "value": BLUE}, "value": RED},
        "shape": hues("status", statuses, shapes, None),
        "angle": {"condition": {"test": is_ok, "value": 0}, "value": 45},
        "tooltip": [
            {"field": "request_id", "title": "request"},
            number(at, when),
            number(field, unit),
            {"field": "status"},
        ],
    }
    mark = {"type": "point", "clip": True, "size": 22, "strokeWidth": 1.3}
    limits = [
        layer(
            DASHED,
            {"y": {"field": "limit", "type": "quantitative"}},
            [scaled(limit, per_s, "limit")],
        )
        for limit in frames.limits[field]
        if limit["limit"] <= FAR * largest
    ]
    layers = [layer(mark, encoding, rows), *limits, *_phases(x)]
    return {**strip(title, PANEL_HEIGHT + 50), "layer": layers}
