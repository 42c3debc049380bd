"""Figures of a sweep: latency against throughput with the Pareto front, and goodput along the
load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import parse_measure
from loadgen.studies.sweep.result import CellRow, SweepResult
from reports.charts import (
    GREY,
    WIDE_RANGE,
    Record,
    Spec,
    axis,
    bounds,
    figure,
    layer,
    lines,
    number,
    series_color,
    series_dash,
    time_unit,
)


def figures(result: SweepResult) -> dict[str, Spec]:
    """All figures by name; a figure without values is left out."""
    drawn: dict[str, Spec] = {}
    if any(_is_drawn(row) for row in result.rows):
        drawn["tradeoff"] = tradeoff(result)
    if result.along:
        drawn["goodput"] = goodput(result)
    return drawn


def tradeoff(result: SweepResult) -> Spec:
    """A dot per cell with its confidence intervals, lines along the load. The cells of the Pareto
    front are filled and joined by the dotted line."""
    rows = [row for row in result.rows if _is_drawn(row)]
    unit, per_s = _unit(result, rows)
    records = [_record(row, result, per_s) for row in rows]
    names = series_names(result)
    title = f"{METRICS[parse_measure(result.benefit)[0].name].title} per GPU, per s"
    x: Spec = {"type": "quantitative", "title": title, "scale": {"zero": False}}
    y = _cost_axis(result, records, unit)
    at = {"x": {**x, "field": "benefit"}, "y": {**y, "field": "cost"}}
    tinted = series_color(names, "series")
    tooltip: list[Spec] = [
        {"field": "cell"},
        number("benefit", "per GPU and s"),
        {"field": "benefit_words", "title": "confidence interval"},
        number("cost", f"{result.cost}, {unit}".rstrip(", ")),
        {"field": "cost_words", "title": "confidence interval"},
        {"field": "n", "title": "runs"},
        {"field": "standing", "title": "Pareto front"},
    ]
    along = {
        **at,
        "order": {"field": "along", "type": "quantitative"},
        "color": tinted,
        "strokeDash": series_dash(names, "series"),
    }
    layers: list[Spec] = []
    if sum(r["is_front"] for r in records) > 1:
        layers.append(_front_line(records, at))
    if any(r["along"] is not None for r in records):
        line = {"type": "line", "strokeWidth": 1.5, "opacity": 0.7}
        layers.append(layer(line, along, where="isValid(datum.along)"))
    if any(_has_bounds(record, "benefit") for record in records):
        layers.append(_interval(x, y, tinted, "benefit", "cost"))
    if any(_has_bounds(record, "cost") for record in records):
        layers.append(_interval(y, x, tinted, "cost", "benefit", is_upright=True))
    for is_front in (False, True):
        # An empty layer would be a group without an accessible name.
        if any(r["is_front"] is is_front for r in records):
            dots = {"type": "point", "filled": is_front, "size": 90, "opacity": 1}
            encoding = {**at, "color": tinted, "tooltip": tooltip}
            where = f"datum.is_front == {str(is_front).lower()}"
            layers.append(layer(dots, encoding, where=where))
    title = f"{result.cost} over throughput per GPU, by cell"
    return figure(title, records, height=320, layer=layers)


def goodput(result: SweepResult) -> Spec:
    """Goodput along the load; the thin diagonal is the offered rate, where the load is a rate."""
    records: list[Record] = [
        {"series": row.series, "cell": row.cell, "along": row.along}
        | row.measures["goodput"].to_json()
        for row in result.rows
        if row.n
    ]
    key = result.along
    is_rate = key == "arrivals.rate"
    x = axis("along", "offered, requests per s" if is_rate else key, scale={"zero": is_rate})
    scale = {"domainMin": 0, "clamp": True}  # an interval near zero would go below it
    y = {"type": "quantitative", "title": "goodput, requests per s", "scale": scale}
    tooltip: list[Spec] = [
        {"field": "cell"},
        number("along", key),
        number("value", "goodput"),
        *bounds(),
        {"field": "n", "title": "runs"},
    ]
    layers = lines(series_names(result), "series", x, y, tooltip)
    if is_rate and records:
        top = max(record["along"] for record in records)
        dotted = {"type": "line", "strokeWidth": 1, "color": GREY, "strokeDash": [1, 3]}
        diagonal = [{"along": 0, "value": 0}, {"along": top, "value": top}]
        layers.insert(0, layer(dotted, {"x": x, "y": {**y, "field": "value"}}, diagonal))
    return figure(f"Goodput along {key}", records, height=260, layer=layers)


def series_names(result: SweepResult) -> list[str]:
    """The line series, in the order of the sweep."""
    return list(dict.fromkeys(row.series for row in result.rows))


def _is_drawn(row: CellRow) -> bool:
    return row.benefit.value is not None and row.cost.value is not None


def _unit(result: SweepResult, rows: Sequence[CellRow]) -> tuple[str, float]:
    """The unit in which the cost is shown, and its factor."""
    if result.cost_unit == "s":
        return time_unit(max(row.cost.value or 0.0 for row in rows))
    return ("%", 100.0) if result.cost_unit == "share" else ("per s", 1.0)


def _cost_axis(result: SweepResult, records: Sequence[Record], unit: str) -> Spec:
    values = [record["cost"] for record in records]
    is_wide = min(values) > 0 and max(values) > WIDE_RANGE * min(values)
    return {
        "type": "quantitative",
        "title": f"{result.cost}, {unit}{' (log scale)' if is_wide else ''}",
        "scale": {"type": "log"} if is_wide else {"zero": True},
        "axis": {"minExtent": 46},
    }


def _record(row: CellRow, result: SweepResult, per_s: float) -> Record:
    record: Record = {
        "cell": row.cell,
        "series": row.series,
        "along": row.along,
        "n": row.n,
        "is_front": row.is_front,
        "standing": "on it" if row.is_front else f"beaten by {row.beaten_by}",
    }
    for name, shown, factor in (("benefit", row.benefit, 1.0), ("cost", row.cost, per_s)):
        value, low, high = shown.value, shown.low, shown.high
        record[name] = None if value is None else value * factor
        # An interval of two runs may go below zero, where no latency is.
        record[f"{name}_low"] = None if low is None else max(0.0, low * factor)
        record[f"{name}_high"] = None if high is None else high * factor
        record[f"{name}_words"] = (
            "–" if low is None or high is None else f"{low * factor:.4g} to {high * factor:.4g}"
        )
    return record


def _has_bounds(record: Record, name: str) -> bool:
    return record[f"{name}_low"] is not None and record[f"{name}_high"] is not None


def _interval(
    along: Spec, across: Spec, tinted: Spec, name: str, other: str, is_upright: bool = False
) -> Spec:
    """The confidence interval of `name` as a bar, where both bounds exist and can be drawn."""
    first, second = ("y", "x") if is_upright else ("x", "y")
    low = f"datum.{name}_low"
    encoding = {
        first: {**along, "field": f"{name}_low"},
        f"{first}2": {"field": f"{name}_high"},
        second: {**across, "field": other},
        "color": tinted,
    }
    bar = {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7}
    drawn = layer(bar, encoding, where=f"isValid({low}) && isValid(datum.{name}_high)")
    if along["scale"].get("type") == "log":
        drawn["transform"].append({"filter": f"{low} > 0"})
    return drawn


def _front_line(records: Sequence[Record], at: Mapping[str, Any]) -> Spec:
    on_front = sorted((r for r in records if r["is_front"]), key=lambda r: float(r["benefit"]))
    dotted = {"type": "line", "color": GREY, "strokeDash": [2, 3], "strokeWidth": 3}
    order = {"field": "benefit", "type": "quantitative"}
    return layer(dotted, {**at, "order": order}, on_front)
