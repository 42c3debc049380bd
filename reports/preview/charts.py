"""Figures of a planned schedule: arrivals, their rate over time, and token lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Schedule
from reports.charts import (
    BLUE,
    DASHED,
    GREY,
    LEGEND,
    ORANGE,
    Record,
    Spec,
    axis,
    colors,
    figure,
    hues,
    layer,
    number,
)

MAX_TICKS = 4000
RASTER_ROWS = 20
MAX_BINS = 240
LENGTH_BINS = 40
_STRIP_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)


def figures(
    schedule: Schedule, classes: Sequence[str], warmup_s: float, horizon_s: float
) -> dict[str, Spec]:
    """All figures by name. Requests that wait for another request have no scheduled send time and
    are in the histograms only."""
    starts = schedule[schedule["n_parents"] == 0]
    starts = starts[np.argsort(starts["scheduled_s"], kind="stable")]
    return {
        "raster": raster(starts, classes, horizon_s),
        "rate": rate_curve(starts["scheduled_s"], warmup_s, horizon_s),
        "length-input": length_histogram(schedule["input_tokens"], "input"),
        "length-output": length_histogram(schedule["output_tokens"], "output"),
    }


def strip_s(horizon_s: float, n_rows: int = RASTER_ROWS) -> float:
    """Seconds shown by a row of the raster: the shortest round span that needs at most `n_rows`
    rows."""
    return next((span for span in _STRIP_S if horizon_s <= span * n_rows), horizon_s / n_rows)


def raster(starts: Schedule, classes: Sequence[str], horizon_s: float) -> Spec:
    """A tick per arrival, time running along rows like lines of text; at most the first 4000."""
    shown = starts[:MAX_TICKS]
    until_s = horizon_s if len(starts) <= MAX_TICKS else float(shown["scheduled_s"][-1])
    width_s = strip_s(until_s)
    row = np.floor(shown["scheduled_s"] / width_s)
    within_s = np.round(shown["scheduled_s"] - row * width_s, 6)
    columns = (row * width_s).tolist(), within_s.tolist(), shown["class_id"].tolist()
    ticks = [
        {"row": begin, "within": within, "class": classes[number]}
        for begin, within, number in zip(*columns, strict=True)
    ]
    n_rows = max(1, int(np.ceil(until_s / width_s)))
    legend = LEGEND if len(classes) > 1 else None
    scale = {"domain": [0, width_s], "nice": False}
    return figure(
        "Every arrival as a tick, time running along the rows",
        ticks,
        height=max(60, 14 * n_rows),
        mark={"type": "tick", "thickness": 1, "bandSize": 11},
        encoding={
            "x": axis(
                "within",
                f"seconds within a row of {width_s:g} s",
                scale=scale,
                axis={"grid": False},
            ),
            "y": {
                "field": "row",
                "type": "ordinal",
                "title": "row begins at s",
                "scale": {"domain": [k * width_s for k in range(n_rows)]},
            },
            "color": hues("class", classes, colors(len(classes)), legend),
            "tooltip": [
                {"field": "row", "title": "row begins at s"},
                {"field": "within", "title": "seconds within the row"},
                {"field": "class"},
            ],
        },
    )


def rate_curve(times_s: NDArray[np.float64], warmup_s: float, horizon_s: float) -> Spec:
    """Arrivals per second over time, in at most 240 bins of about ten arrivals each."""
    n_bins = int(np.clip(len(times_s) // 10, 1, MAX_BINS))
    counts, edges = np.histogram(times_s, n_bins, (0.0, horizon_s))
    width_s = horizon_s / n_bins
    bins = [
        {"from_s": start, "rate": count / width_s}
        for start, count in zip(edges.tolist(), [*counts.tolist(), int(counts[-1])], strict=True)
    ]
    scale = {"domain": [0, horizon_s], "nice": False}
    x = axis("from_s", "seconds since the start of the run", scale=scale, axis={"grid": False})
    area = {
        "type": "area",
        "interpolate": "step-after",
        "color": BLUE,
        "fillOpacity": 0.3,
        "line": {"color": BLUE, "strokeWidth": 1.5},
    }
    shade = {"type": "rect", "color": GREY, "opacity": 0.16}
    tooltip = [number("from_s", "from s"), number("rate", "per s")]
    rate = axis("rate", f"per s, in bins of {width_s:.3g} s")
    warmup = [{"from_s": 0.0, "to_s": warmup_s}] if warmup_s else []
    mean = [{"mean": len(times_s) / horizon_s}]
    layers = [
        layer(area, {"x": x, "y": rate, "tooltip": tooltip}, bins),
        layer(shade, {"x": x, "x2": {"field": "to_s"}}, warmup),
        layer(DASHED, {"y": {"field": "mean", "type": "quantitative"}}, mean),
    ]
    return figure("Arrivals per second over the run; dashed: mean", height=180, layer=layers)


def length_histogram(tokens: NDArray[np.uint32], word: str) -> Spec:
    """Requests by number of tokens, in bins of equal ratio; dashed: the mean."""
    x = {"type": "quantitative", "title": f"{word} tokens (log scale)", "scale": {"type": "log"}}
    bars = {
        "x": {**x, "field": "low"},
        "x2": {"field": "high"},
        "y": axis("zero", "requests"),
        "y2": {"field": "n"},
        "tooltip": [
            {"field": "low", "title": "from"},
            {"field": "high", "title": "to below"},
            {"field": "n", "title": "requests"},
        ],
    }
    mean = [{"mean": float(tokens.mean())}]
    dashed = {"type": "rule", "color": ORANGE, "strokeDash": [6, 3]}
    layers = [
        layer({"type": "rect", "color": BLUE, "opacity": 0.75}, bars, length_bins(tokens)),
        layer(dashed, {"x": {**x, "field": "mean"}}, mean),
    ]
    return figure(f"Requests by {word} tokens; dashed: mean", height=180, layer=layers)


def length_bins(tokens: NDArray[np.uint32]) -> list[Record]:
    """{low, high, n, zero}: bins of the whole numbers low … high − 1 whose widths grow by a
    constant ratio (about); every token count is in exactly 1 bin."""
    least, most = int(tokens.min()), int(tokens.max())
    edges = np.unique(np.rint(np.geomspace(least, most + 1, LENGTH_BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(tokens, edges)
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return [{"low": low, "high": high, "n": n, "zero": 0} for low, high, n in pairs]


def shown_note(facts: Mapping[str, Any]) -> str:
    """A sentence on which arrivals the raster shows."""
    if facts["n"] <= MAX_TICKS:
        return "Every arrival is a tick."
    return f"The first {MAX_TICKS} arrivals."
