"""Heat maps: SLO attainment by prompt length, answer length and class, and the interference
between classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.per_request import Mask
from loadgen.measure.wording import format_count
from loadgen.records import Run
from reports.charts import Record, Spec, layer, number, standalone

MOST_BUCKETS = 5
_CELL = 44
_LIGHT, _DARK = "#ffffff", "#101418"


def attainment_cells(run: Run, due: Mask, met: Mask) -> list[Record]:
    """Records: class, input and output (buckets of planned lengths in words, with `input_order` and
    `output_order`), n (due) and the share that met its SLOs. Buckets hold roughly equal numbers of
    requests. `met`: the due requests that met their SLOs."""
    if not due.any():
        return []
    schedule = run.schedule_rows[due]
    class_id = schedule["class_id"].astype(np.int64)
    input_of, input_words = _buckets(schedule["input_tokens"])
    output_of, output_words = _buckets(schedule["output_tokens"])
    key = (class_id * MOST_BUCKETS + input_of) * MOST_BUCKETS + output_of
    cells, which, counts = np.unique(key, return_inverse=True, return_counts=True)
    n_met = np.bincount(which, weights=met[due], minlength=len(cells))
    records = []
    for cell, n, n_ok in zip(cells.tolist(), counts.tolist(), n_met.tolist(), strict=True):
        rest, output = divmod(cell, MOST_BUCKETS)
        number_of_class, input_ = divmod(rest, MOST_BUCKETS)
        records.append(
            {
                "class": run.names.classes[number_of_class],
                "input": input_words[input_],
                "input_order": input_,
                "output": output_words[output],
                "output_order": output,
                "n": n,
                "share": n_ok / n,
            }
        )
    return records


def _buckets(tokens: NDArray[np.uint32]) -> tuple[NDArray[np.int64], list[str]]:
    """The bucket of each value, and the range of each bucket in words."""
    cuts = np.unique(np.quantile(tokens, np.linspace(0, 1, MOST_BUCKETS + 1), method="lower")[1:-1])
    raw = np.searchsorted(cuts, tokens, side="left")
    used, bucket = np.unique(raw, return_inverse=True)
    words = []
    for position in range(len(used)):
        inside = tokens[bucket == position]
        low, high = int(inside.min()), int(inside.max())
        words.append(
            format_count(low) if low == high else f"{format_count(low)}–{format_count(high)}"
        )
    return bucket.astype(np.int64), words


def heat_figures(
    cells: Sequence[Record], pairs: Mapping[tuple[str, str], float | None]
) -> dict[str, Spec]:
    """Figures by name; attainment needs cells with different shares, interference at least two
    classes."""
    drawn = {}
    if len({cell["share"] for cell in cells}) > 1:
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
    falling = {"field": "input_order", "order": "descending"}
    encoding = {
        "x": _bucket_axis("output", "output tokens"),
        "y": {**_bucket_axis("input", "prompt tokens"), "sort": falling},
    }
    map_ = {
        "width": {"step": _CELL},
        "height": {"step": _CELL * 0.6},
        "layer": _share_tiles(encoding, tooltip),
    }
    spec = _faceted(cells, "class", classes, map_) if len(classes) > 1 else _single(cells, map_)
    return standalone(spec, "SLO attainment by prompt length, output length and class")


def attainment_by_mode(
    records: Sequence[Record], modes: Sequence[str], rates: Sequence[str], classes: Sequence[str]
) -> Spec:
    """SLO attainment: a map of rate × class for each mode, or a single map of mode × class without
    rates. Records: mode, rate, class, share, n."""
    tooltip = [
        {"field": "mode"},
        *([{"field": "rate", "title": "offered"}] if rates else []),
        {"field": "class"},
    ]
    labels = {"labelAngle": 0, "labelLimit": 160}
    across = ("rate", "offered", rates) if rates else ("class", None, classes)
    down = ("class", None, classes) if rates else ("mode", None, modes)
    encoding = {
        channel: {
            "field": field,
            "type": "nominal",
            "title": title,
            "sort": list(sort),
            "axis": labels,
        }
        for channel, (field, title, sort) in (("x", across), ("y", down))
    }
    map_ = {
        "width": {"step": _CELL * (1.2 if rates else 2.2)},
        "height": {"step": _CELL * 0.6},
        "layer": _share_tiles(encoding, tooltip),
    }
    spec = _faceted(records, "mode", modes, map_) if rates else _single(records, map_)
    return standalone(spec, "SLO attainment by mode")


def _single(records: Sequence[Record], map_: Spec) -> Spec:
    return {"data": {"values": list(records)}, **map_}


def _faceted(records: Sequence[Record], field: str, order: Sequence[str], map_: Spec) -> Spec:
    """A map for each value of `field`, two in a row."""
    facet = {"field": field, "type": "nominal", "title": None, "sort": list(order)}
    return {"data": {"values": list(records)}, "facet": facet, "columns": 2, "spec": map_}


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
        {"field": "other", "title": "against requests in flight of"},
        number("value", "rank correlation", ".2f"),
    ]
    axis = {"type": "nominal", "sort": names, "axis": {"labelLimit": 80, "labelAngle": 0}}
    encoding = {
        "x": {**axis, "field": "other", "title": "requests in flight of"},
        "y": {**axis, "field": "class", "title": "TTFT of"},
    }
    text = "format(datum.value, '.2f')"
    map_ = {
        "width": {"step": 2 * _CELL},
        "height": {"step": _CELL * 0.8},
        "layer": _tiles(encoding, color, tooltip, text, "abs(datum.value) < 0.6"),
    }
    title = "Rank correlation of each class's TTFT with each class's requests in flight"
    return standalone(_single(rows, map_), title)


def _bucket_axis(word: str, title: str) -> Spec:
    return {
        "field": word,
        "type": "ordinal",
        "title": title,
        "sort": {"field": f"{word}_order"},
        "axis": {"labelAngle": -35 if word == "output" else 0, "labelLimit": 120},
    }


def _share_tiles(encoding: Spec, tooltip: Sequence[Spec]) -> list[Spec]:
    """Tiles coloured by SLO attainment."""
    color = {
        "field": "share",
        "type": "quantitative",
        "scale": {"domain": [0, 1], "scheme": "viridis"},
        "legend": {"title": "SLO met", "format": ".0%", "orient": "top", "gradientLength": 160},
    }
    shares = [number("share", "SLO met", ".3~%"), {"field": "n", "title": "requests due"}]
    # 100 % only where every request met the SLO
    text = "format(datum.share < 1 ? min(datum.share, 0.99) : 1, '.0%')"
    return _tiles(encoding, color, [*tooltip, *shares], text, "datum.share > 0.6")


def _tiles(
    encoding: Spec, color: Spec, tooltip: Sequence[Spec], text: str, is_light: str
) -> list[Spec]:
    """Coloured tiles with their numbers on them, dark on light tiles and light on dark tiles."""
    shade = {"condition": {"test": is_light, "value": _DARK}, "value": _LIGHT}
    words = {**encoding, "text": {"field": "text", "type": "nominal"}, "color": shade}
    mark = {"type": "text", "fontSize": 10, "fontWeight": 600, "style": "tile"}
    return [
        layer({"type": "rect"}, {**encoding, "color": color, "tooltip": tooltip}),
        {"transform": [{"calculate": text, "as": "text"}], **layer(mark, words)},
    ]
