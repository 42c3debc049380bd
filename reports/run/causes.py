"""Section on causes: the drivers of latency, and where the seconds of a request went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.drivers import Drivers, Split, tpot_points, ttft_points
from loadgen.measure.per_request import PerRequest
from loadgen.measure.statistics.robust_line import FittedLine
from loadgen.measure.summary import Summary
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run
from reports.charts import (
    BLUE,
    GREEN,
    GREY,
    LEGEND,
    ORANGE,
    RED,
    Record,
    Spec,
    axis,
    figure,
    hues,
    layer,
    number,
    time_unit,
)

MAX_POINTS = 2000
MAX_STREAMS = 2000  # requests whose gaps are read, evenly taken
LEAST_GAPS = 20
_HEIGHT = 210
PARTS = {
    "client_queue_s": ("waiting in the client", RED),
    "connect_s": ("connecting", GREY),
    "server_queue_s": ("waiting in the server", ORANGE),
    "prefill_s": ("until the first token", BLUE),
    "decode_s": ("decoding after the first token", GREEN),
}
"""Parts of a request, by their keys in summary.json: title and colour."""


@dataclass(frozen=True, slots=True)
class CauseFigure:
    """A figure: the name under which it is drawn, its caption, and the sentence below it."""

    name: str
    caption: str
    sentence: str
    spec: Spec


def cause_figures(run: Run, summary: Summary, columns: PerRequest) -> list[CauseFigure]:
    """All figures of the section; none where no request succeeded."""
    drivers = summary.drivers
    ok = due_rows(run) & columns.is_ok & columns.has_token
    ttft = _points(*ttft_points(run, columns, ok))
    if drivers is None or not ttft:
        return []
    level = f"{100 * summary.confidence:g} %"
    return [
        *_split(drivers),
        *_by_input(drivers, ttft, level),
        *_by_in_flight(drivers, _points(*tpot_points(run, columns, ok)), level),
        *_along_answer(gaps_by_position(columns, np.flatnonzero(ok))),
    ]


def _split(drivers: Drivers) -> list[CauseFigure]:
    if not drivers.split:
        return []
    groups = list(drivers.split.items())
    (_, whole), (slowest, worst) = groups[0], groups[-1]
    growth_s = {
        title: (getattr(worst, part) or 0.0) - (getattr(whole, part) or 0.0)
        for part, (title, _) in PARTS.items()
    }
    most = max(growth_s, key=lambda title: growth_s[title])
    sentence = "Means per request, from the scheduled send time to the last token."
    if len(groups) > 1 and growth_s[most] > 0:
        sentence += (
            f" The {slowest} took {format_value(sum(growth_s.values()), 's')} more than the mean"
            f" request; most of it ({format_value(growth_s[most], 's')}) is {most}."
        )
    if whole.server_queue_s is None:
        sentence += (
            " This server does not report how long requests waited in its queue: that time is part"
            f" of “{PARTS['prefill_s'][0]}”."
        )
    return [CauseFigure("why-split", "Where the time went", sentence, split_bars(drivers.split))]


def _by_input(drivers: Drivers, points: Sequence[Record], level: str) -> list[CauseFigure]:
    if not _varies(points):
        return []
    line, title = drivers.ttft_by_input, "TTFT from send by prompt length"
    sentence = _growth("TTFT", line, 1000, "1 000 prompt tokens", "prompt length", level)
    spec = scatter(points, line, "prompt tokens", "TTFT by prompt length")
    return [CauseFigure("why-ttft", title, sentence, spec)]


def _varies(points: Sequence[Record]) -> bool:
    """Whether the points have more than one place on the x axis; else a scatter shows nothing."""
    return len({point["x"] for point in points}) > 1


def _by_in_flight(drivers: Drivers, points: Sequence[Record], level: str) -> list[CauseFigure]:
    if not _varies(points):
        return []
    line, title = drivers.tpot_by_in_flight, "TPOT by requests in flight"
    sentence = _growth("TPOT", line, 1, "request in flight", "requests in flight", level)
    spec = scatter(points, line, "requests in flight while decoding", title)
    return [CauseFigure("why-tpot", title, sentence, spec)]


def _along_answer(gaps: Sequence[Record]) -> list[CauseFigure]:
    if not gaps:
        return []
    first_s, last_s = gaps[0]["p50"], gaps[-1]["p50"]
    sentence = "Token gaps do not grow over the length of an answer."
    if last_s > 1.1 * first_s:
        sentence = (
            f"The median gap grows from {format_value(first_s, 's')} before the second chunk to"
            f" {format_value(last_s, 's')} late in long answers: each token attends to a longer"
            " context."
        )
    return [
        CauseFigure("why-itl", "Gaps over the length of an answer", sentence, by_position(gaps))
    ]


def _growth(
    metric: str, line: FittedLine | None, times: int, per: str, cause: str, level: str
) -> str:
    if line is None:
        return "No line: too few requests."
    slope, low, high = (value * times for value in (line.slope, line.low, line.high))
    if not _is_clear(line):
        relation = f"No clear relation between {metric} and {cause}: "
    else:
        relation = f"{metric} {'grows' if slope > 0 else 'falls'} by "
    return (
        f"{relation}{format_value(abs(slope), 's')} per {per} ({level} confidence interval"
        f" {_signed(low)} to {_signed(high)}, rank correlation {line.rank_correlation:.2f},"
        f" n = {format_count(line.n)})."
    )


def _is_clear(line: FittedLine) -> bool:
    """Whether the confidence interval of the slope excludes 0."""
    return not line.low <= 0 <= line.high


def _signed(seconds: float) -> str:
    return ("−" if seconds < 0 else "") + format_value(abs(seconds), "s")


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> list[Record]:
    """{x, y (s)}: at most `MAX_POINTS`, a twentieth of them the largest y, the others evenly
    taken."""
    taken = np.arange(len(x))
    if len(x) > MAX_POINTS:
        largest = np.argsort(y, kind="stable")[-MAX_POINTS // 20 :]
        even = np.linspace(0, len(x) - 1, MAX_POINTS - len(largest)).astype(np.intp)
        taken = np.unique(np.r_[largest, even])
    return [
        {"x": float(at), "y": float(value)} for at, value in zip(x[taken], y[taken], strict=True)
    ]


def gaps_by_position(columns: PerRequest, rows: NDArray[np.intp]) -> list[Record]:
    """Percentiles of the gap before each chunk, by its place in the answer: 1, 2, 3–4, 5–8, … The
    records have first and last (1 is the first gap of an answer), p50 and p99 (s), n."""
    gaps = columns.gaps
    if len(rows) > MAX_STREAMS:
        rows = rows[np.linspace(0, len(rows) - 1, MAX_STREAMS).astype(np.intp)]
    chosen = np.zeros(len(columns.is_ok), bool)
    chosen[rows] = True
    gap_s = gaps.icl_s[gaps.of(chosen)]
    if not len(gap_s):
        return []
    lengths = gaps.sizes[chosen[gaps.rows]]
    position = np.arange(len(gap_s)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    bucket = np.ceil(np.log2(position)).astype(np.int64)
    records = []
    for bucket_number in range(int(bucket.max()) + 1):
        values = np.sort(gap_s[bucket == bucket_number])
        if len(values) >= LEAST_GAPS:
            records.append(
                {
                    "first": 1 if bucket_number == 0 else 2 ** (bucket_number - 1) + 1,
                    "last": 2**bucket_number,
                    "p50": float(np.quantile(values, 0.5, method="inverted_cdf")),
                    "p99": float(np.quantile(values, 0.99, method="inverted_cdf")),
                    "n": len(values),
                }
            )
    return records


def scatter(
    points: Sequence[Record], line: FittedLine | None, x_title: str, description: str
) -> Spec:
    """A point per request, and the fitted line through them if its slope is clear."""
    unit, per_s = time_unit(max(p["y"] for p in points))
    rows = [{"x": p["x"], "y": p["y"] * per_s} for p in points]
    x, y = axis("x", x_title, scale={"zero": False}), axis("y", unit, axis={"minExtent": 46})
    tooltip = [number("x", x_title), number("y", unit)]
    dots = {"type": "point", "color": BLUE, "size": 16, "opacity": 0.5}
    layers = [layer(dots, {"x": x, "y": y, "tooltip": tooltip}, rows)]
    if line is not None and _is_clear(line):
        ends = (min(p["x"] for p in points), max(p["x"] for p in points))
        drawn = [{"x": at, "y": (line.intercept + line.slope * at) * per_s} for at in ends]
        stroke = {"type": "line", "color": ORANGE, "strokeWidth": 2.5, "clip": True}
        layers.append(layer(stroke, {"x": x, "y": y}, drawn))
    return figure(description, height=_HEIGHT, layer=layers)


def by_position(records: Sequence[Record]) -> Spec:
    """Median and 99th percentile of the gap before a chunk, by its place in the answer."""
    unit, per_s = time_unit(max(r["p99"] for r in records))
    rows = [
        {"place": str(r["first"]), "of": name, "y": r[name] * per_s, "n": r["n"]}
        for r in records
        for name in ("p50", "p99")
    ]
    color = hues("of", ["p50", "p99"], [BLUE, ORANGE])
    place = {
        "field": "place",
        "type": "ordinal",
        "sort": [str(r["first"]) for r in records],
        "title": "gap number (a mark: up to the next)",
        "axis": {"labelAngle": 0},
    }
    tooltip = [
        {"field": "place", "title": "gap"},
        {"field": "of", "title": "percentile"},
        number("y", unit),
        {"field": "n", "title": "gaps"},
    ]
    return figure(
        "Gaps between chunks by their place in the answer",
        rows,
        height=_HEIGHT,
        mark={"type": "line", "point": {"size": 40}},
        encoding={
            "x": place,
            "y": axis("y", unit, axis={"minExtent": 46}),
            "color": color,
            "shape": {**color, "scale": {"domain": ["p50", "p99"], "range": ["circle", "diamond"]}},
            "tooltip": tooltip,
        },
    )


def split_bars(split: Mapping[str, Split]) -> Spec:
    """Mean seconds of each part of a request, stacked, for all requests and for the slowest."""
    totals_s = [sum(getattr(group, part) or 0.0 for part in PARTS) for group in split.values()]
    unit, per_s = time_unit(max(totals_s))
    rows = [
        {"group": f"{name} (n = {group.n})", "part": title, "order": place, "y": value * per_s}
        for name, group in split.items()
        for place, (part, (title, _)) in enumerate(PARTS.items())
        if (value := getattr(group, part)) is not None
    ]
    return figure(
        "Where the time of a request went, on average",
        rows,
        height=40 * len(split),
        mark={"type": "bar", "height": 22},
        encoding={
            "y": {
                "field": "group",
                "type": "nominal",
                "sort": None,
                "title": None,
                "axis": {"labelLimit": 200},
            },
            "x": axis("y", f"mean {unit} per request"),
            "color": part_colors({row["part"] for row in rows}, columns=1),
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "group", "title": "requests"},
                {"field": "part"},
                number("y", unit),
            ],
        },
    )


def part_colors(titles: set[str], **legend: int) -> Spec:
    """The colour channel of `PARTS`, of the `titles` that a figure shows."""
    shown = [part for part in PARTS.values() if part[0] in titles]
    names, tints = [title for title, _ in shown], [tint for _, tint in shown]
    return hues("part", names, tints, {**LEGEND, **legend, "labelLimit": 200})
