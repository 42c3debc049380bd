"""The figures of a sweep: latency against throughput with the Pareto front, and goodput along the
load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import parse_measure
from reports.charts import GREY, WIDE_RANGE, Spec, standalone, time_unit
from reports.run.frames import Record
from reports.series import color, dash, lines

_NUMBER: Spec = {"type": "quantitative", "format": ".4~g"}


def figures(facts: Mapping[str, Any]) -> dict[str, Spec]:
    """All figures by name; one without values is left out."""
    drawn: dict[str, Spec] = {}
    if any(_is_drawn(row) for row in facts["rows"]):
        drawn["tradeoff"] = tradeoff(facts)
    if facts["along"]:
        drawn["goodput"] = goodput(facts)
    return drawn


def tradeoff(facts: Mapping[str, Any]) -> Spec:
    """A dot per cell with its intervals, lines along the load; filled and joined by the dotted line
    is what no other cell surely beats."""
    rows = [row for row in facts["rows"] if _is_drawn(row)]
    unit, per_s = _unit(facts, rows)
    records = [_record(row, facts, per_s) for row in rows]
    names = series_of(facts)
    x: Spec = {
        "type": "quantitative",
        "title": f"{METRICS[parse_measure(facts['benefit'])[0].name].title} per GPU, per s",
        "scale": {"zero": False},
    }
    y = _cost_axis(facts, records, unit)
    tinted = color(names, "series")
    tooltip: list[Spec] = [
        {"field": "cell"},
        {"field": "benefit", "title": "per GPU and s", **_NUMBER},
        {"field": "benefit_words", "title": "interval"},
        {"field": "cost", "title": f"{facts['cost']}, {unit}".rstrip(", "), **_NUMBER},
        {"field": "cost_words", "title": "interval"},
        {"field": "n", "title": "runs"},
        {"field": "standing"},
    ]
    along: Spec = {
        "transform": [{"filter": "isValid(datum.along)"}],
        "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.7},
        "encoding": {
            "x": {**x, "field": "benefit"},
            "y": {**y, "field": "cost"},
            "order": {"field": "along", "type": "quantitative"},
            "color": tinted,
            "strokeDash": dash(names, "series"),
        },
    }
    layers: list[Spec] = [
        *([_front_line(records, x, y)] if sum(r["is_front"] for r in records) > 1 else []),
        *([along] if any(r["along"] is not None for r in records) else []),
    ]
    if any(_has_ends(record, "benefit") for record in records):
        layers.append(_interval(x, y, tinted, "benefit", "cost"))
    if any(_has_ends(record, "cost") for record in records):
        layers.append(_interval(y, x, tinted, "cost", "benefit", is_upright=True))
    standings = [s for s in (False, True) if any(r["is_front"] is s for r in records)]
    # An empty layer would be a group that nobody can name.
    layers += [_dots(is_front, x, y, tinted, tooltip) for is_front in standings]
    spec = {
        "width": "container",
        "height": 320,
        "data": {"values": records},
        "layer": layers,
    }
    return standalone(spec, f"{facts['cost']} over throughput per GPU, by cell")


def goodput(facts: Mapping[str, Any]) -> Spec:
    """Requests per second that kept their promises, along the load; the thin diagonal is what was
    offered, where the load is a rate."""
    records = [
        {
            "series": row["series"],
            "cell": row["cell"],
            "along": row["along"],
            **row["measures"]["goodput"],
        }
        for row in facts["rows"]
        if row["n"]
    ]
    key = facts["along"]
    is_rate = key == "arrivals.rate"
    title = "offered, requests per s" if is_rate else key
    x = {"field": "along", "type": "quantitative", "title": title, "scale": {"zero": is_rate}}
    y = {
        "type": "quantitative",
        "title": "goodput, requests per s",
        "scale": {"domainMin": 0, "clamp": True},  # an interval near zero would go below it
    }
    tooltip: list[Spec] = [
        {"field": "cell"},
        {"field": "along", "title": key, **_NUMBER},
        {"field": "value", "title": "goodput", **_NUMBER},
        {"field": "low", "title": "from", **_NUMBER},
        {"field": "high", "title": "to", **_NUMBER},
        {"field": "n", "title": "runs"},
    ]
    layers = lines(series_of(facts), "series", x, y, tooltip)
    if is_rate and records:
        top = max(record["along"] for record in records)
        layers.insert(
            0,
            {
                "data": {"values": [{"along": 0, "value": 0}, {"along": top, "value": top}]},
                "mark": {"type": "line", "strokeWidth": 1, "color": GREY, "strokeDash": [1, 3]},
                "encoding": {"x": x, "y": {**y, "field": "value"}},
            },
        )
    spec = {"width": "container", "height": 260, "data": {"values": records}, "layer": layers}
    return standalone(spec, f"Goodput along {key}")


def series_of(facts: Mapping[str, Any]) -> list[str]:
    """What lines are drawn for, in the order of the sweep."""
    return list(dict.fromkeys(row["series"] for row in facts["rows"]))


def _is_drawn(row: Mapping[str, Any]) -> bool:
    return row["benefit"]["value"] is not None and row["cost"]["value"] is not None


def _unit(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """The unit of the cost as shown, and its factor."""
    if facts["cost_unit"] == "s":
        return time_unit(max(row["cost"]["value"] for row in rows))
    return ("%", 100.0) if facts["cost_unit"] == "share" else ("per s", 1.0)


def _cost_axis(facts: Mapping[str, Any], records: Sequence[Record], unit: str) -> Spec:
    values = [record["cost"] for record in records]
    is_wide = min(values) > 0 and max(values) > WIDE_RANGE * min(values)
    return {
        "type": "quantitative",
        "title": f"{facts['cost']}, {unit}{' (log scale)' if is_wide else ''}",
        "scale": {"type": "log"} if is_wide else {"zero": True},
        "axis": {"minExtent": 46},
    }


def _record(row: Mapping[str, Any], facts: Mapping[str, Any], per_s: float) -> Record:
    record: Record = {
        "cell": row["cell"],
        "series": row["series"],
        "along": row["along"],
        "n": row["n"],
        "is_front": row["is_front"],
        "standing": "on the front" if row["is_front"] else f"beaten by {row['beaten_by']}",
    }
    for name, factor in (("benefit", 1.0), ("cost", per_s)):
        value, low, high = (row[name][end] for end in ("value", "low", "high"))
        record[name] = value * factor
        # An interval of two runs may go below zero, where no latency is.
        record[f"{name}_low"] = None if low is None else max(0.0, low * factor)
        record[f"{name}_high"] = None if high is None else high * factor
        record[f"{name}_words"] = (
            "–" if low is None or high is None else f"{low * factor:.4g} to {high * factor:.4g}"
        )
    return record


def _has_ends(record: Record, name: str) -> bool:
    return record[f"{name}_low"] is not None and record[f"{name}_high"] is not None


def _interval(
    along: Spec, across: Spec, tinted: Spec, name: str, other: str, is_upright: bool = False
) -> Spec:
    one, two = ("y", "x") if is_upright else ("x", "y")
    low = f"datum.{name}_low"
    is_log = along["scale"].get("type") == "log"
    return {
        "transform": [
            {"filter": f"isValid({low}) && isValid(datum.{name}_high)"},
            *([{"filter": f"{low} > 0"}] if is_log else []),
        ],
        "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7},
        "encoding": {
            one: {**along, "field": f"{name}_low"},
            f"{one}2": {"field": f"{name}_high"},
            two: {**across, "field": other},
            "color": tinted,
        },
    }


def _dots(is_front: bool, x: Spec, y: Spec, tinted: Spec, tooltip: Sequence[Spec]) -> Spec:
    return {
        "transform": [{"filter": f"datum.is_front == {str(is_front).lower()}"}],
        "mark": {"type": "point", "filled": is_front, "size": 90, "opacity": 1},
        "encoding": {
            "x": {**x, "field": "benefit"},
            "y": {**y, "field": "cost"},
            "color": tinted,
            "tooltip": list(tooltip),
        },
    }


def _front_line(records: Sequence[Record], x: Spec, y: Spec) -> Spec:
    on_front = sorted((r for r in records if r["is_front"]), key=lambda r: float(r["benefit"]))
    return {
        "data": {"values": on_front},
        "mark": {"type": "line", "color": GREY, "strokeDash": [2, 3], "strokeWidth": 3},
        "encoding": {
            "x": {**x, "field": "benefit"},
            "y": {**y, "field": "cost"},
            "order": {"field": "benefit", "type": "quantitative"},
        },
    }
