"""The figures of a capacity search: attainment and goodput over the load, with the probes, the
fitted band and the interval of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.measure.capacity.capacity_result import Capacity
from loadgen.measure.capacity.curve import Posterior
from reports.capacity.view import attainment_interval
from reports.charts import BLUE, GREY, ORANGE, RED, Spec, standalone
from reports.run.frames import Record

_N_POINTS = 80
_SHAPES = {
    "measured": "circle",
    "fine": "triangle-up",
    "saturated": "triangle-down",
    "untrusted": "cross",
    "broken": "square",
}


def figures(answer: Capacity, posterior: Posterior | None) -> dict[str, Spec]:
    """Both figures; without probes there is none."""
    probes = _probes(answer)
    if not probes:
        return {}
    band = _band(answer, posterior)
    return {
        "attainment": _attainment(answer, probes, band),
        "goodput": _goodput(answer, probes, band),
    }


def _probes(answer: Capacity) -> list[Record]:
    records: list[Record] = []
    for probe in answer.probes:
        if not probe.n_due:
            continue
        found = attainment_interval(probe, answer)
        per_s = probe.n_due / probe.measured_s
        records.append(
            {
                "probe": probe.name,
                "level": probe.level,
                "grade": probe.grade,
                "due": probe.n_due,
                "attainment": found.value,
                "low": found.low,
                "high": found.high,
                "goodput": probe.goodput_per_s,
                "goodput_low": (found.low or 0.0) * per_s,
                "goodput_high": (found.high or 0.0) * per_s,
            }
        )
    return records


def _band(answer: Capacity, posterior: Posterior | None) -> list[Record]:
    """The fitted curve where it holds: as far as three interval widths around the answer."""
    if posterior is None or answer.value is None or not answer.low or answer.high is None:
        return []
    reach = max((answer.high - answer.low) * 1.5, 0.15 * answer.value)
    levels = np.linspace(
        max(answer.value - reach, answer.value / 4), answer.value + reach, _N_POINTS
    )
    low, middle, high = posterior.band(levels, answer.attainment, answer.confidence)
    near = min(
        (p for p in answer.probes if p.n_due), key=lambda p: abs(p.level - float(answer.value or 0))
    )
    per_level = near.n_due / near.measured_s / near.level
    return [
        {
            "level": level,
            "low": one,
            "middle": two,
            "high": three,
            "goodput_low": one * level * per_level,
            "goodput": two * level * per_level,
            "goodput_high": three * level * per_level,
        }
        for level, one, two, three in zip(
            levels.tolist(), low.tolist(), middle.tolist(), high.tolist(), strict=True
        )
    ]


def _layers(
    answer: Capacity, probes: Sequence[Record], band: Sequence[Record], names: dict[str, str]
) -> list[Spec]:
    x: dict[str, Any] = {
        "field": "level",
        "type": "quantitative",
        "title": f"load, {answer.unit}",
        "scale": {"type": "log", "nice": False},
        "axis": {"labelOverlap": "greedy", "format": "~g"},
    }
    y: dict[str, Any] = {"type": "quantitative", "title": names["title"]}
    if names["format"]:
        y["axis"] = {"format": names["format"]}
    tooltip = [
        {"field": "probe", "type": "nominal"},
        {"field": "level", "type": "quantitative", "format": ".4~g", "title": answer.unit},
        {"field": "due", "type": "quantitative", "title": "requests due"},
        {"field": "attainment", "type": "quantitative", "format": ".1%"},
        {"field": "low", "type": "quantitative", "format": ".1%", "title": "from"},
        {"field": "high", "type": "quantitative", "format": ".1%", "title": "to"},
        {"field": "grade", "type": "nominal", "title": "how it ended"},
    ]
    layers: list[Spec] = []
    if answer.low and answer.high is not None:
        layers.append(
            {
                "data": {"values": [{"from": answer.low, "to": answer.high}]},
                "mark": {"type": "rect", "color": GREY, "opacity": 0.25},
                "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}},
            }
        )
    if band:
        layers += [
            {
                "data": {"values": list(band)},
                "mark": {"type": "area", "color": ORANGE, "opacity": 0.2},
                "encoding": {
                    "x": x,
                    "y": {**y, "field": names["low"]},
                    "y2": {"field": names["high"]},
                },
            },
            {
                "data": {"values": list(band)},
                "mark": {"type": "line", "color": ORANGE},
                "encoding": {"x": x, "y": {**y, "field": names["middle"]}},
            },
        ]
    seen = [grade for grade in _SHAPES if any(probe["grade"] == grade for probe in probes)]
    symbol = {
        "field": "grade",
        "type": "nominal",
        "scale": {"domain": seen, "range": [_SHAPES[grade] for grade in seen]},
        "legend": {"title": None, "orient": "top"},
    }
    layers += [
        {
            "data": {"values": list(probes)},
            "mark": {"type": "rule", "color": BLUE, "opacity": 0.6},
            "encoding": {"x": x, "y": {**y, "field": names["low"]}, "y2": {"field": names["high"]}},
        },
        {
            "data": {"values": list(probes)},
            "mark": {"type": "point", "filled": True, "size": 45, "color": BLUE},
            "encoding": {
                "x": x,
                "y": {**y, "field": names["value"]},
                "shape": symbol,
                "tooltip": tooltip,
            },
        },
    ]
    return layers


def _attainment(answer: Capacity, probes: Sequence[Record], band: Sequence[Record]) -> Spec:
    names = {
        "title": "requests that kept their promises",
        "format": ".0%",
        "low": "low",
        "middle": "middle",
        "high": "high",
        "value": "attainment",
    }
    goal = {
        "data": {"values": [{"goal": answer.attainment}]},
        "mark": {"type": "rule", "color": RED, "strokeDash": [6, 3]},
        "encoding": {"y": {"field": "goal", "type": "quantitative"}},
    }
    layers = [*_layers(answer, probes, band, names), goal]
    spec = {"height": 260, "width": "container", "layer": layers}
    return standalone(spec, f"attainment over the load; capacity {answer.sentence()}")


def _goodput(answer: Capacity, probes: Sequence[Record], band: Sequence[Record]) -> Spec:
    names = {
        "title": "goodput, requests per s",
        "format": "",
        "low": "goodput_low",
        "middle": "goodput",
        "high": "goodput_high",
        "value": "goodput",
    }
    spec = {"height": 260, "width": "container", "layer": _layers(answer, probes, band, names)}
    return standalone(spec, f"goodput over the load; capacity {answer.sentence()}")
