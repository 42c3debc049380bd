"""Where promises are kept and where not: by prompt and answer length and class, and which class
slows which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.per_request import Mask
from loadgen.measure.wording import format_count
from loadgen.records import Run
from reports.charts import Spec, standalone
from reports.run.frames import Record

MOST_BUCKETS = 5
_CELL = 44
_LIGHT, _DARK = "#ffffff", "#101418"


def attainment_cells(run: Run, due: Mask, kept: Mask) -> list[Record]:
    """class, input and output (buckets in words, with their `input_order` and `output_order`), n
    due and the share that kept its promises. Buckets hold about as many requests each, of lengths
    as planned."""
    if not due.any():
        return []
    schedule = run.schedule_rows[due]
    met, class_id = kept[due], schedule["class_id"]
    axes = {word: _buckets(schedule[f"{word}_tokens"]) for word in ("input", "output")}
    (input_of, input_words), (output_of, output_words) = axes.values()
    key = (class_id.astype(np.int64) * MOST_BUCKETS + input_of) * MOST_BUCKETS + output_of
    cells, which, counts = np.unique(key, return_inverse=True, return_counts=True)
    kept_of = np.bincount(which, weights=met, minlength=len(cells))
    found = []
    for cell, n, n_met in zip(cells.tolist(), counts.tolist(), kept_of.tolist(), strict=True):
        rest, output = divmod(cell, MOST_BUCKETS)
        number, asked = divmod(rest, MOST_BUCKETS)
        found.append(
            {
                "class": run.names.classes[number],
                "input": input_words[asked],
                "input_order": asked,
                "output": output_words[output],
                "output_order": output,
                "n": n,
                "share": n_met / n,
            }
        )
    return found


def _buckets(tokens: NDArray[np.uint32]) -> tuple[NDArray[np.int64], list[str]]:
    """The bucket of each value, and the buckets' ranges in words."""
    cuts = np.unique(np.quantile(tokens, np.linspace(0, 1, MOST_BUCKETS + 1), method="lower")[1:-1])
    raw = np.searchsorted(cuts, tokens, side="left")
    used, bucket = np.unique(raw, return_inverse=True)
    words = []
    for number in range(len(used)):
        of = tokens[bucket == number]
        low, high = int(of.min()), int(of.max())
        words.append(
            format_count(low) if low == high else f"{format_count(low)}–{format_count(high)}"
        )
    return bucket.astype(np.int64), words


def heat_figures(
    cells: Sequence[Record], pairs: Mapping[tuple[str, str], float | None]
) -> dict[str, Spec]:
    """Figures by name; attainment needs more than one cell, interference more than one class."""
    drawn = {}
    if len(cells) > 1:
        drawn["heat-attainment"] = _attainment(cells)
    if any(value is not None for value in pairs.values()):
        drawn["heat-interference"] = _interference(pairs)
    return drawn


def _attainment(cells: Sequence[Record]) -> Spec:
    classes = list(dict.fromkeys(cell["class"] for cell in cells))
    tooltip = [
        {"field": "class"},
        {"field": "input", "title": "prompt tokens"},
        {"field": "output", "title": "output tokens"},
    ]
    encoding = {
        "x": _bucket_axis("output", "output tokens"),
        "y": {
            **_bucket_axis("input", "prompt tokens"),
            "sort": {"field": "input_order", "order": "descending"},
        },
    }
    spec: Spec = {
        "data": {"values": list(cells)},
        "facet": {"field": "class", "type": "nominal", "title": None, "sort": classes},
        "columns": 2,
        "spec": {
            "width": {"step": _CELL},
            "height": {"step": _CELL * 0.6},
            "layer": _kept_tiles(encoding, tooltip),
        },
    }
    if len(classes) == 1:
        spec = {"data": spec["data"], **spec["spec"]}
    return standalone(spec, "Share of requests that kept their promises, by lengths and class")


def kept_by_mode(
    records: Sequence[Record], modes: Sequence[str], rates: Sequence[str], classes: Sequence[str]
) -> Spec:
    """The share that kept its promises: a small map of rate × class per mode, or one of mode ×
    class without rates. Records: mode, rate, class, share, n."""
    tooltip = [
        {"field": "mode"},
        *([{"field": "rate", "title": "offered"}] if rates else []),
        {"field": "class"},
    ]
    axis = {"labelAngle": 0, "labelLimit": 160}
    across = ("rate", "offered", rates) if rates else ("class", None, classes)
    down = ("class", None, classes) if rates else ("mode", None, modes)
    encoding = {
        channel: {"field": field, "type": "nominal", "title": title, "sort": list(sort),
                  "axis": axis}
        for channel, (field, title, sort) in (("x", across), ("y", down))
    }  # fmt: skip
    layer = _kept_tiles(encoding, tooltip)
    one = {
        "width": {"step": _CELL * (1.2 if rates else 2.2)},
        "height": {"step": _CELL * 0.6},
        "layer": layer,
    }
    spec: Spec = {"data": {"values": list(records)}, **one}
    if rates:
        spec = {
            "data": {"values": list(records)},
            "facet": {"field": "mode", "type": "nominal", "title": None, "sort": list(modes)},
            "columns": 2,
            "spec": one,
        }
    return standalone(spec, "Share of requests that kept their promises, mode by mode")


def _interference(pairs: Mapping[tuple[str, str], float | None]) -> Spec:
    rows = [
        {"class": name, "other": other, "value": value}
        for (name, other), value in pairs.items()
        if value is not None
    ]
    names = list(dict.fromkeys(name for name, _ in pairs))
    color = {
        "field": "value",
        "type": "quantitative",
        "scale": {"domain": [-1, 1], "scheme": "purpleorange", "reverse": True},
        "legend": {"title": "rank correlation", "orient": "top", "gradientLength": 160},
    }
    tooltip = [
        {"field": "class", "title": "TTFT of"},
        {"field": "other", "title": "with in flight of"},
        {"field": "value", "title": "rank correlation", "type": "quantitative", "format": ".2f"},
    ]
    axis = {"type": "nominal", "sort": names, "axis": {"labelLimit": 80, "labelAngle": 0}}
    encoding = {
        "x": {**axis, "field": "other", "title": "requests in flight of"},
        "y": {**axis, "field": "class", "title": "TTFT of"},
    }
    spec: Spec = {
        "data": {"values": rows},
        "width": {"step": 2 * _CELL},
        "height": {"step": _CELL * 0.8},
        "layer": _tiles(
            encoding, color, tooltip, "format(datum.value, '.2f')", "abs(datum.value) < 0.6"
        ),
    }
    return standalone(spec, "TTFT of each class against the requests in flight of each")


def _bucket_axis(word: str, title: str) -> Spec:
    return {
        "field": word,
        "type": "ordinal",
        "title": title,
        "sort": {"field": f"{word}_order"},
        "axis": {"labelAngle": -35 if word == "output" else 0, "labelLimit": 120},
    }


def _kept_tiles(encoding: Spec, tooltip: Sequence[Spec]) -> list[Spec]:
    """Tiles by the share that kept its promises."""
    color = {
        "field": "share",
        "type": "quantitative",
        "scale": {"domain": [0, 1], "scheme": "viridis"},
        "legend": {"title": "kept", "format": ".0%", "orient": "top", "gradientLength": 160},
    }
    kept = [
        {"field": "share", "title": "kept", "type": "quantitative", "format": ".3~%"},
        {"field": "n", "title": "requests due"},
    ]
    return _tiles(
        encoding, color, [*tooltip, *kept], "format(datum.share, '.0%')", "datum.share > 0.6"
    )


def _tiles(
    encoding: Spec, color: Spec, tooltip: Sequence[Spec], text: str, is_light: str
) -> list[Spec]:
    """Coloured tiles with their numbers upon them, dark on light ones and light on dark ones."""
    return [
        {"mark": {"type": "rect"}, "encoding": {**encoding, "color": color, "tooltip": tooltip}},
        {
            "transform": [{"calculate": text, "as": "text"}],
            "mark": {"type": "text", "fontSize": 10, "fontWeight": 600, "style": "tile"},
            "encoding": {
                **encoding,
                "text": {"field": "text", "type": "nominal"},
                "color": {"condition": {"test": is_light, "value": _DARK}, "value": _LIGHT},
            },
        },
    ]
