"""The figures of a planned schedule: arrays in, Vega-Lite specifications (plain dicts) out.

Colours are mid-tones of the Okabe-Ito family, at least 3:1 against white and against near black;
text and grid lines take theirs from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Schedule

Spec = dict[str, Any]
Record = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never fetched
COLORS = ("#3a86c8", "#d08020", "#2a9d78", "#d1495b", "#8a63b0", "#85878c")
MAX_TICKS = 4000
RASTER_ROWS = 20
MAX_BINS = 240
LENGTH_BINS = 40
_STRIP_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)


def figures(
    schedule: Schedule, classes: Sequence[str], warmup_s: float, horizon_s: float
) -> dict[str, Spec]:
    """All figures by name. Rows that wait for others have no instant of their own and are in the
    histograms only."""
    starts = schedule[schedule["n_parents"] == 0]
    starts = starts[np.argsort(starts["scheduled_s"], kind="stable")]
    return {
        "raster": raster(starts, classes, horizon_s),
        "rate": rate_curve(starts["scheduled_s"], warmup_s, horizon_s),
        **{
            f"length-{word}": length_histogram(schedule[f"{word}_tokens"], word)
            for word in ("input", "output")
        },
    }


def strip_s(horizon_s: float, n_rows: int = RASTER_ROWS) -> float:
    """How much time a row of the raster shows: the shortest round span that needs at most `n_rows`
    rows."""
    return next((span for span in _STRIP_S if horizon_s <= span * n_rows), horizon_s / n_rows)


def raster(starts: Schedule, classes: Sequence[str], horizon_s: float) -> Spec:
    """One tick per arrival, time running along rows like lines of text; at most the first 4000."""
    shown = starts[:MAX_TICKS]
    until_s = horizon_s
    if len(starts) > MAX_TICKS:
        until_s = float(shown["scheduled_s"][-1])
    width_s = strip_s(until_s)
    row = np.floor(shown["scheduled_s"] / width_s)
    within = shown["scheduled_s"] - row * width_s
    ticks = [
        {"row": r, "within": w, "class": classes[c]}
        for r, w, c in zip(
            (row * width_s).tolist(),
            np.round(within, 6).tolist(),
            shown["class_id"].tolist(),
            strict=True,
        )
    ]
    n_rows = max(1, int(np.ceil(until_s / width_s)))
    legend = {"title": None, "orient": "top"} if len(classes) > 1 else None
    return _standalone(
        {
            "width": "container",
            "height": max(60, 14 * n_rows),
            "data": {"values": ticks},
            "mark": {"type": "tick", "thickness": 1, "bandSize": 11},
            "encoding": {
                "x": {
                    "field": "within",
                    "type": "quantitative",
                    "title": f"seconds within a row of {width_s:g} s",
                    "scale": {"domain": [0, width_s], "nice": False},
                    "axis": {"grid": False},
                },
                "y": {
                    "field": "row",
                    "type": "ordinal",
                    "title": "row begins at s",
                    "scale": {"domain": [k * width_s for k in range(n_rows)]},
                },
                "color": {
                    "field": "class",
                    "type": "nominal",
                    "scale": {"domain": list(classes), "range": _colors(len(classes))},
                    "legend": legend,
                },
                "tooltip": [
                    {"field": "row", "title": "row begins at s"},
                    {"field": "within", "title": "and s"},
                    {"field": "class"},
                ],
            },
        },
        "Every arrival as a tick, time running along the rows",
    )


def rate_curve(times_s: NDArray[np.float64], warmup_s: float, horizon_s: float) -> Spec:
    """Arrivals per second over time, in bins of about ten arrivals and at most 240 of them."""
    n_bins = int(np.clip(len(times_s) // 10, 1, MAX_BINS))
    counts, edges = np.histogram(times_s, n_bins, (0.0, horizon_s))
    width_s = horizon_s / n_bins
    bins = [
        {"from_s": start, "rate": count / width_s}
        for start, count in zip(edges.tolist(), [*counts.tolist(), int(counts[-1])], strict=True)
    ]
    x = {
        "field": "from_s",
        "type": "quantitative",
        "title": "seconds since the start of the run",
        "scale": {"domain": [0, horizon_s], "nice": False},
        "axis": {"grid": False},
    }
    area = {
        "type": "area",
        "interpolate": "step-after",
        "color": COLORS[0],
        "fillOpacity": 0.3,
        "line": {"color": COLORS[0], "strokeWidth": 1.5},
    }
    shade = {"type": "rect", "color": COLORS[-1], "opacity": 0.16}
    mean = {"type": "rule", "color": COLORS[1], "strokeDash": [6, 3], "strokeWidth": 1.5}
    warmup = {"values": [{"from_s": 0.0, "to_s": warmup_s}] if warmup_s else []}
    rate = {"type": "quantitative", "title": f"per s, in bins of {width_s:.3g} s"}
    tooltip = [
        {"field": "from_s", "title": "from s", "format": ".4~g"},
        {"field": "rate", "type": "quantitative", "title": "per s", "format": ".4~g"},
    ]
    return _standalone(
        {
            "width": "container",
            "height": 180,
            "layer": [
                {
                    "data": {"values": bins},
                    "mark": area,
                    "encoding": {"x": x, "y": {**rate, "field": "rate"}, "tooltip": tooltip},
                },
                {
                    "data": warmup,
                    "mark": shade,
                    "encoding": {"x": x, "x2": {"field": "to_s"}},
                },
                {
                    "data": {"values": [{"mean": len(times_s) / horizon_s}]},
                    "mark": mean,
                    "encoding": {"y": {"field": "mean", "type": "quantitative"}},
                },
            ],
        },
        "Arrivals per second over the run; dashed: their mean",
    )


def length_histogram(tokens: NDArray[np.uint32], word: str) -> Spec:
    """How many requests have how many tokens, in bins of equal ratio; dashed: the mean."""
    bins = length_bins(tokens)
    x = {"type": "quantitative", "title": f"{word} tokens (log scale)", "scale": {"type": "log"}}
    tooltip = [
        {"field": "low", "title": "from"},
        {"field": "high", "title": "to below"},
        {"field": "n", "title": "requests"},
    ]
    return _standalone(
        {
            "width": "container",
            "height": 180,
            "layer": [
                {
                    "data": {"values": bins},
                    "mark": {"type": "rect", "color": COLORS[0], "opacity": 0.75},
                    "encoding": {
                        "x": {**x, "field": "low"},
                        "x2": {"field": "high"},
                        "y": {"field": "zero", "type": "quantitative", "title": "requests"},
                        "y2": {"field": "n"},
                        "tooltip": tooltip,
                    },
                },
                {
                    "data": {"values": [{"mean": float(tokens.mean())}]},
                    "mark": {"type": "rule", "color": COLORS[1], "strokeDash": [6, 3]},
                    "encoding": {"x": {**x, "field": "mean"}},
                },
            ],
        },
        f"Requests by {word} tokens; dashed: the mean",
    )


def length_bins(tokens: NDArray[np.uint32]) -> list[Record]:
    """{low, high, n, zero}: whole-number bins low … high − 1, each about as many times wider than
    the last as any other, that hold every token count once."""
    least, most = int(tokens.min()), int(tokens.max())
    edges = np.unique(np.rint(np.geomspace(least, most + 1, LENGTH_BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(tokens, edges)
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return [{"low": low, "high": high, "n": n, "zero": 0} for low, high, n in pairs]


def shown_note(facts: Mapping[str, Any]) -> str:
    """What the raster leaves out, if anything."""
    if facts["n"] <= MAX_TICKS:
        return "Every arrival is a tick."
    return f"The first {MAX_TICKS} arrivals."


def _colors(n: int) -> list[str]:
    return [COLORS[k % len(COLORS)] for k in range(n)]


def _standalone(spec: Spec, description: str) -> Spec:
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
