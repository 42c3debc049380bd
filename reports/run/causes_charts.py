"""Figures about causes: what latency grows with, and where the seconds of a request went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.measure.drivers import Split
from loadgen.measure.statistics.robust_line import FittedLine
from reports.charts import BLUE, GREEN, GREY, ORANGE, RED, Spec, standalone, time_unit
from reports.run.frames import Record

_HEIGHT = 210
PARTS = {
    "client_queue_s": ("waiting in the client", RED),
    "connect_s": ("connecting", GREY),
    "server_queue_s": ("waiting in the server", ORANGE),
    "prefill_s": ("to the first token", BLUE),
    "decode_s": ("the other tokens", GREEN),
}


def scatter(points: Sequence[Record], line: FittedLine | None, x_title: str, what: str) -> Spec:
    """One point per request, and the line through them where there is one."""
    unit, per_s = time_unit(max(p["y"] for p in points))
    rows = [{"x": p["x"], "y": p["y"] * per_s} for p in points]
    x = {"field": "x", "type": "quantitative", "title": x_title, "scale": {"zero": False}}
    y = {"field": "y", "type": "quantitative", "title": unit, "axis": {"minExtent": 46}}
    number = {"type": "quantitative", "format": ".4~g"}
    tooltip = [{"field": "x", "title": x_title, **number}, {"field": "y", "title": unit, **number}]
    layers: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {"type": "point", "color": BLUE, "size": 16, "opacity": 0.5},
            "encoding": {"x": x, "y": y, "tooltip": tooltip},
        }
    ]
    if line is not None:
        ends = (min(p["x"] for p in points), max(p["x"] for p in points))
        drawn = [{"x": at, "y": (line.intercept + line.slope * at) * per_s} for at in ends]
        layers.append(
            {
                "data": {"values": drawn},
                "mark": {"type": "line", "color": ORANGE, "strokeWidth": 2.5, "clip": True},
                "encoding": {"x": x, "y": y},
            }
        )
    return standalone({"height": _HEIGHT, "width": "container", "layer": layers}, what)


def by_position(records: Sequence[Record]) -> Spec:
    """Median and 99th percentile of the gap before a chunk, by its place in the answer."""
    unit, per_s = time_unit(max(r["p99"] for r in records))
    rows = [
        {"place": _place(r), "of": name, "y": r[name] * per_s, "n": r["n"]}
        for r in records
        for name in ("p50", "p99")
    ]
    color = {
        "field": "of",
        "type": "nominal",
        "scale": {"domain": ["p50", "p99"], "range": [BLUE, ORANGE]},
        "legend": {"title": None, "orient": "top"},
    }
    shapes = {"domain": ["p50", "p99"], "range": ["circle", "diamond"]}
    shape = {**color, "scale": shapes}
    spec = {
        "height": _HEIGHT,
        "width": "container",
        "data": {"values": rows},
        "mark": {"type": "line", "point": {"size": 40}},
        "encoding": {
            "x": {
                "field": "place",
                "type": "ordinal",
                "sort": [_place(r) for r in records],
                "title": "gap number in the answer, from … to before the next",
                "axis": {"labelAngle": 0},
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "title": unit,
                "axis": {"minExtent": 46},
            },
            "color": color,
            "shape": shape,
            "tooltip": [
                {"field": "place", "title": "gap"},
                {"field": "of"},
                {"field": "y", "title": unit, "type": "quantitative", "format": ".4~g"},
                {"field": "n", "title": "gaps"},
            ],
        },
    }
    return standalone(spec, "Inter-chunk gaps by their place in the answer")


def split_bars(split: Mapping[str, Split]) -> Spec:
    """Mean seconds of each part of a request, stacked, for all and for the slowest."""
    whole = [sum(getattr(one, part) or 0.0 for part in PARTS) for one in split.values()]
    unit, per_s = time_unit(max(whole))
    rows = [
        {"group": f"{name} (n = {one.n})", "part": title, "order": place, "y": value * per_s}
        for name, one in split.items()
        for place, (part, (title, _)) in enumerate(PARTS.items())
        if (value := getattr(one, part)) is not None
    ]
    shown = [part for part in PARTS.values() if any(row["part"] == part[0] for row in rows)]
    spec = {
        "height": 40 * len(split),
        "width": "container",
        "data": {"values": rows},
        "mark": {"type": "bar", "height": 22},
        "encoding": {
            "y": {
                "field": "group",
                "type": "nominal",
                "sort": None,
                "title": None,
                "axis": {"labelLimit": 200},
            },
            "x": {"field": "y", "type": "quantitative", "title": f"mean {unit} per request"},
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": [t for t, _ in shown], "range": [c for _, c in shown]},
                "legend": {"title": None, "orient": "top", "columns": 3, "labelLimit": 200},
            },
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "group", "title": "requests"},
                {"field": "part"},
                {"field": "y", "title": unit, "type": "quantitative", "format": ".4~g"},
            ],
        },
    }
    return standalone(spec, "Where the time of a request went, on average")


def _place(record: Record) -> str:
    return str(record["first"])
