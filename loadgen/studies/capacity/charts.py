"""Figures of a capacity search: SLO attainment and goodput over the load, with the probes, the
fitted curve with its band, and the confidence interval of the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loadgen.studies.capacity.curve import Posterior
from loadgen.studies.capacity.result import Capacity
from loadgen.studies.capacity.view import attainment_interval
from reports.charts import (
    BLUE,
    GREY,
    LEGEND,
    ORANGE,
    RED,
    Record,
    Spec,
    axis,
    figure,
    layer,
    number,
)

_N_POINTS = 80
_SHAPES = {
    "measured": "circle",
    "fine": "triangle-up",
    "saturated": "triangle-down",
    "untrusted": "cross",
    "broken": "square",
    "limited": "diamond",
}


class _Quantity(NamedTuple):
    """A quantity over the load: its axis title and format, and the names of its fields."""

    title: str
    format: str
    value: str  # of a probe
    low: str
    middle: str  # of the fitted curve
    high: str


_ATTAINMENT = _Quantity("SLO attainment", ".0%", "attainment", "low", "middle", "high")
_GOODPUT = _Quantity(
    *("goodput, requests per s", "", "goodput", "goodput_low", "goodput", "goodput_high")
)


def figures(answer: Capacity, posterior: Posterior | None) -> dict[str, Spec]:
    """Both figures; none without probes."""
    probes = _probes(answer)
    if not probes:
        return {}
    band = _band(answer, posterior)
    target = {"y": {"field": "goal", "type": "quantitative"}}
    dashed = {"type": "rule", "color": RED, "strokeDash": [6, 3]}
    goal = layer(dashed, target, [{"goal": answer.attainment}])
    return {
        "attainment": figure(
            f"SLO attainment over the load; capacity {answer.sentence()}",
            height=260,
            layer=[*_layers(answer, probes, band, _ATTAINMENT), goal],
        ),
        "goodput": figure(
            f"Goodput over the load; capacity {answer.sentence()}",
            height=260,
            layer=_layers(answer, probes, band, _GOODPUT),
        ),
    }


def _probes(answer: Capacity) -> list[Record]:
    records: list[Record] = []
    for probe in answer.probes:
        if not probe.n_due:
            continue
        share, per_s = attainment_interval(probe), probe.n_due / probe.measured_s
        records.append(
            {
                "probe": probe.name,
                "level": probe.level,
                "grade": probe.grade,
                "due": probe.n_due,
                "attainment": share.value,
                "low": share.low,
                "high": share.high,
                "goodput": probe.goodput_per_s,
                "goodput_low": None if share.low is None else share.low * per_s,
                "goodput_high": None if share.high is None else share.high * per_s,
            }
        )
    return records


def _band(answer: Capacity, posterior: Posterior | None) -> list[Record]:
    """The fitted curve, up to 1.5 interval widths on either side of the answer: it holds only near
    the answer."""
    if posterior is None or answer.value is None or not answer.low or answer.high is None:
        return []
    value = answer.value
    reach = max((answer.high - answer.low) * 1.5, 0.15 * value)
    levels = np.linspace(max(value - reach, value / 4), value + reach, _N_POINTS)
    curves = posterior.band(levels, answer.attainment, answer.confidence)
    near = min((p for p in answer.probes if p.n_due), key=lambda p: abs(p.level - value))
    per_level = near.n_due / near.measured_s / near.level
    return [
        {
            "level": level,
            "low": low,
            "middle": middle,
            "high": high,
            "goodput_low": low * level * per_level,
            "goodput": middle * level * per_level,
            "goodput_high": high * level * per_level,
        }
        for level, low, middle, high in np.column_stack([levels, *curves]).tolist()
    ]


def _layers(
    answer: Capacity, probes: Sequence[Record], band: Sequence[Record], of: _Quantity
) -> list[Spec]:
    x = axis(
        "level",
        f"load, {answer.unit}",
        scale={"type": "log", "nice": False},
        axis={"labelOverlap": "greedy", "format": "~g"},
    )
    y: Spec = {"type": "quantitative", "title": of.title}
    if of.format:
        y["axis"] = {"format": of.format}
    span = {"x": x, "y": {**y, "field": of.low}, "y2": {"field": of.high}}
    layers: list[Spec] = []
    if answer.low and answer.high is not None:
        stripe = {"x": {**x, "field": "from"}, "x2": {"field": "to"}}
        rows = [{"from": answer.low, "to": answer.high}]
        layers.append(layer({"type": "rect", "color": GREY, "opacity": 0.25}, stripe, rows))
    if band:
        middle = {"x": x, "y": {**y, "field": of.middle}}
        layers += [
            layer({"type": "area", "color": ORANGE, "opacity": 0.2}, span, band),
            layer({"type": "line", "color": ORANGE}, middle, band),
        ]
    bounded = [probe for probe in probes if probe["low"] is not None]
    grades = [grade for grade in _SHAPES if any(probe["grade"] == grade for probe in probes)]
    dot = {
        "x": x,
        "y": {**y, "field": of.value},
        "shape": {
            "field": "grade",
            "type": "nominal",
            "scale": {"domain": grades, "range": [_SHAPES[grade] for grade in grades]},
            "legend": LEGEND,
        },
        "tooltip": [
            {"field": "probe", "type": "nominal"},
            number("level", answer.unit),
            {"field": "due", "type": "quantitative", "title": "requests due"},
            number("attainment", "SLO attainment", ".1%"),
            number("low", "lower bound", ".1%"),
            number("high", "upper bound", ".1%"),
            {"field": "grade", "type": "nominal", "title": "result"},
        ],
    }
    return [
        *layers,
        layer({"type": "rule", "color": BLUE, "opacity": 0.6}, span, bounded),
        layer({"type": "point", "filled": True, "size": 45, "color": BLUE}, dot, probes),
    ]
