"""The figures of a comparison of batching modes: facts in, Vega-Lite specifications out.

Colours are mid-tones of the Okabe-Ito family, at least 3:1 against white and against near black;
dash and shape repeat what a colour says, for print and for those who see colours alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.charts import Spec, standalone
from reports.run.heat_maps import kept_by_mode
from reports.series import COLORS, colors, lines

Record = dict[str, Any]

LATENCIES = (
    ("ttft_p50", "TTFT p50"),
    ("ttft_p99", "TTFT p99"),
    ("itl_p99", "ITL p99"),
    ("max_stall_p99", "longest stall p99"),
)
EXPORT_WIDTH = 460  # of a figure in a file, points


def figures(facts: Mapping[str, Any]) -> dict[str, Spec]:
    """All figures by name: goodput over the rate and its difference, or latencies by mode."""
    if facts["rates_per_s"] is None:
        return {"latencies": latencies(facts), **_kept(facts)}
    return {**_over_rates(facts), **_kept(facts)}


def _over_rates(facts: Mapping[str, Any]) -> dict[str, Spec]:
    drawn = {"goodput": goodput(facts)}
    if len(facts["modes"]) > 1 and len(facts["seeds"]) > 1:
        drawn["difference"] = difference(facts)
    return drawn


def _kept(facts: Mapping[str, Any]) -> dict[str, Spec]:
    """A heat map of the share that kept its promises per mode: rate × class, or mode × class where
    the rate is one. None where there is only one number."""
    names = list(dict.fromkeys(row["class"] for row in facts["rows"]))
    records = [
        {
            "mode": row["mode"],
            "rate": None if row["rate_per_s"] is None else f"{row['rate_per_s']:g}/s",
            "class": row["class"] or "all",
            "share": row["attainment"]["value"],
            "n": row["n_due"],
        }
        for row in facts["rows"]
        if row["attainment"]["value"] is not None
    ]
    rates = [f"{rate:g}/s" for rate in facts["rates_per_s"] or ()]
    if len(records) < 2 or not (rates or len(names) > 1):
        return {}
    return {"kept": kept_by_mode(records, list(facts["modes"]), rates, [n or "all" for n in names])}


def paper(facts: Mapping[str, Any]) -> Spec:
    """Goodput over the rate, and below it the paired difference, as one figure of fixed size."""
    panels = [{**_bare(spec), "width": EXPORT_WIDTH} for spec in _over_rates(facts).values()]
    return standalone({"vconcat": panels}, f"{facts['scenario']}: batching modes compared")


def goodput(facts: Mapping[str, Any]) -> Spec:
    """Requests per second that kept their promises over those offered, a line per mode; the band
    is the interval over the seeds, the thin diagonal what was offered."""
    rows = [
        _record(row, row["goodput"], offered=row["rate_per_s"])
        for row in facts["rows"]
        if not row["class"]
    ]
    x = _rate_axis(facts)
    top = max(facts["rates_per_s"])
    diagonal = [{"rate": 0, "goodput": 0}, {"rate": top, "goodput": top}]
    # Student's interval of a rate near zero would go below it.
    axis = {"domainMin": 0, "clamp": True}
    y = {"type": "quantitative", "title": "goodput, requests per s", "scale": axis}
    layers: list[Spec] = [
        {
            "data": {"values": diagonal},
            "mark": {"type": "line", "strokeWidth": 1, "color": COLORS[5], "strokeDash": [1, 3]},
            "encoding": {
                "x": {**x, "field": "rate"},
                "y": {**y, "field": "goodput"},
            },
        },
        *_lines(facts, x, y),
    ]
    return standalone(
        {"width": "container", "height": 260, "data": {"values": rows}, "layer": layers},
        "Goodput over the offered rate, by batching mode",
    )


def difference(facts: Mapping[str, Any]) -> Spec:
    """How much more goodput than the first mode, with the interval of the paired differences."""
    rows = [
        _record(row, row["difference"]["goodput"], offered=row["rate_per_s"])
        for row in facts["rows"]
        if not row["class"] and row["mode"] != facts["baseline"]
    ]
    x = _rate_axis(facts)
    y = {"type": "quantitative", "title": f"goodput beyond {facts['baseline']}, per s"}
    zero: Spec = {
        "data": {"values": [{"zero": 0}]},
        "mark": {"type": "rule", "color": COLORS[5]},
        "encoding": {"y": {"field": "zero", "type": "quantitative"}},
    }
    return standalone(
        {
            "width": "container",
            "height": 180,
            "data": {"values": rows},
            "layer": [zero, *_lines(facts, x, y)],
        },
        f"Goodput beyond {facts['baseline']} over the offered rate, with paired intervals",
    )


def latencies(facts: Mapping[str, Any]) -> Spec:
    """Each latency as a panel: a dot per mode and class with its interval, on a logarithmic axis,
    because what a policy changes are orders of magnitude."""
    panels = [_latency_panel(facts, key, title) for key, title in LATENCIES]
    return standalone({"vconcat": panels}, "Latencies by batching mode and class")


def _latency_panel(facts: Mapping[str, Any], key: str, title: str) -> Spec:
    names = list(dict.fromkeys(row["class"] for row in facts["rows"]))
    shown = names[1:] if len(names) > 1 else names
    rows = [
        {**_record(row, row[key]), "name": row["class"] or "all"}
        for row in facts["rows"]
        if row["class"] in shown and (row[key]["value"] or 0) > 0
    ]
    labels = [name or "all" for name in shown]
    missing = {row["mode"] for row in facts["rows"] if row["class"] in shown} - {
        row["mode"] for row in rows
    }
    color = {
        "field": "name",
        "type": "nominal",
        "scale": {"domain": labels, "range": colors(len(labels))},
        "legend": {"title": None, "orient": "top"} if len(labels) > 1 else None,
    }
    x = {
        "type": "quantitative",
        "title": f"{title}, seconds (log scale)",
        "scale": {"type": "log"},
        "axis": {"format": "~g"},
    }
    y = {
        "field": "mode",
        "type": "nominal",
        "title": None,
        "sort": list(facts["modes"]),
        "axis": {"labelLimit": 260},
    }
    never: Spec = {
        "data": {"values": [{"mode": mode} for mode in sorted(missing)]},
        "mark": {"type": "text", "align": "right", "dx": -6, "text": "∞", "fontSize": 14},
        "encoding": {"x": {"value": "width"}, "y": y},
    }
    intervals: Spec = {
        "transform": [{"filter": "datum.low > 0 && isValid(datum.high)"}],
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": {
            "x": {**x, "field": "low"},
            "x2": {"field": "high"},
            "y": y,
            "color": color,
        },
    }
    return {
        "width": "fit",
        "height": {"step": 22},
        "data": {"values": rows},
        "layer": [
            *([intervals] if any(r["high"] and (r["low"] or 0) > 0 for r in rows) else []),
            {
                "mark": {"type": "point", "filled": True, "size": 70},
                "encoding": {
                    "x": {**x, "field": "value"},
                    "y": y,
                    "color": color,
                    "shape": {**color, "scale": {"domain": labels}},
                    "tooltip": _tooltip(title),
                },
            },
            *([never] if missing else []),
        ],
    }


def _lines(facts: Mapping[str, Any], x: Spec, y: Spec) -> list[Spec]:
    return lines(facts["modes"], "mode", {**x, "field": "rate"}, y, _tooltip(str(y["title"])))


def _rate_axis(facts: Mapping[str, Any]) -> Spec:
    return {
        "type": "quantitative",
        "title": "offered, requests per s",
        "scale": {"domain": [0, max(facts["rates_per_s"])], "nice": False},
    }


def _record(row: Mapping[str, Any], estimate: Mapping[str, Any], **more: Any) -> Record:
    return {
        "mode": row["mode"],
        "rate": row["rate_per_s"],
        "value": estimate["value"],
        "low": estimate["low"],
        "high": estimate["high"],
        "n": estimate["n"],
        **more,
    }


def _tooltip(title: str) -> list[Spec]:
    number = {"type": "quantitative", "format": ".4~g"}
    return [
        {"field": "mode"},
        {"field": "rate", "title": "offered per s", **number},
        {"field": "value", "title": title, **number},
        {"field": "low", "title": "from", **number},
        {"field": "high", "title": "to", **number},
        {"field": "n", "title": "seeds"},
    ]


def _bare(spec: Spec) -> Spec:
    """A figure as a panel of another one."""
    outer = ("$schema", "background", "config")
    return {key: value for key, value in spec.items() if key not in outer}
