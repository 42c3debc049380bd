"""Figures of a comparison of batching modes: goodput, gains, latencies, SLO attainment."""

from __future__ import annotations

from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.modes.result import ModeRow, ModesFile
from reports.charts import (
    GREY,
    LEGEND,
    Record,
    Spec,
    bounds,
    colors,
    figure,
    hues,
    layer,
    lines,
    number,
    standalone,
)
from reports.run.heat_maps import attainment_by_mode

LATENCIES = (
    ("ttft_p50", "TTFT p50"),
    ("ttft_p99", "TTFT p99"),
    ("itl_p99", "ITL p99"),
    ("max_stall_p99", "longest stall p99"),
)
EXPORT_WIDTH = 460  # of a figure in a file, points


def figures(result: ModesFile) -> dict[str, Spec]:
    """All figures by name: goodput over the rate and gains in goodput, or latencies by mode; then
    attainment."""
    if result.rates_per_s is None:
        return {"latencies": latencies(result), **_attainment(result)}
    return {**_over_rates(result), **_attainment(result)}


def _over_rates(result: ModesFile) -> dict[str, Spec]:
    drawn = {"goodput": goodput(result)}
    if len(result.modes) > 1 and len(result.seeds) > 1:
        drawn["difference"] = difference(result)
    return drawn


def _attainment(result: ModesFile) -> dict[str, Spec]:
    """A heat map of SLO attainment: rate × class for each mode, or mode × class where all runs have
    the same rate. Empty where there is only a single number."""
    names = list(dict.fromkeys(row.class_name for row in result.rows))
    records = [
        {
            "mode": row.mode,
            "rate": None if row.rate_per_s is None else f"{row.rate_per_s:g}/s",
            "class": row.class_name or "all",
            "share": row.attainment.value,
            "n": row.n_due,
        }
        for row in result.rows
        if row.attainment.value is not None
    ]
    rates = [f"{rate:g}/s" for rate in result.rates_per_s or ()]
    if len(records) < 2 or not (rates or len(names) > 1):
        return {}
    classes = [name or "all" for name in names]
    return {"kept": attainment_by_mode(records, list(result.modes), rates, classes)}


def paper(result: ModesFile) -> Spec:
    """Goodput over the rate, and below it the paired difference, as a figure of fixed size."""
    outer = ("$schema", "background", "config")
    panels = [
        {**{key: spec[key] for key in spec if key not in outer}, "width": EXPORT_WIDTH}
        for spec in _over_rates(result).values()
    ]
    return standalone({"vconcat": panels}, f"{result.scenario}: batching modes compared")


def goodput(result: ModesFile) -> Spec:
    """Goodput over the offered rate, a line per mode; the band is the confidence interval over the
    seeds, the thin diagonal the offered rate."""
    rows = [_record(row, row.goodput) for row in result.rows if not row.class_name]
    x, top = _rate_axis(result), max(result.rates_per_s or ())
    # Student's interval of a rate near zero would go below it.
    scale = {"domainMin": 0, "clamp": True}
    y = {"type": "quantitative", "title": "goodput, requests per s", "scale": scale}
    dotted = {"type": "line", "strokeWidth": 1, "color": GREY, "strokeDash": [1, 3]}
    diagonal = layer(
        dotted,
        {"x": {**x, "field": "rate"}, "y": {**y, "field": "goodput"}},
        [{"rate": 0, "goodput": 0}, {"rate": top, "goodput": top}],
    )
    title = "Goodput over the offered rate, by batching mode"
    return figure(title, rows, height=260, layer=[diagonal, *_lines(result, x, y)])


def difference(result: ModesFile) -> Spec:
    """Goodput minus that of the first mode, with the confidence interval of the paired
    differences."""
    rows = [
        _record(row, row.difference["goodput"])
        for row in result.rows
        if not row.class_name and row.mode != result.baseline
    ]
    y = {"type": "quantitative", "title": f"goodput beyond {result.baseline}, per s"}
    at = {"y": {"field": "zero", "type": "quantitative"}}
    zero = layer({"type": "rule", "color": GREY}, at, [{"zero": 0}])
    return figure(
        f"Goodput beyond {result.baseline} over the offered rate, with paired intervals",
        rows,
        height=180,
        layer=[zero, *_lines(result, _rate_axis(result), y)],
    )


def latencies(result: ModesFile) -> Spec:
    """A panel per latency: a dot per mode and class with its confidence interval, on a logarithmic
    axis, because a policy changes latencies by orders of magnitude."""
    panels = [_latency_panel(result, key, title) for key, title in LATENCIES]
    return standalone({"vconcat": panels}, "Latencies by batching mode and class")


def _latency_panel(result: ModesFile, key: str, title: str) -> Spec:
    names = list(dict.fromkeys(row.class_name for row in result.rows))
    shown = names[1:] if len(names) > 1 else names
    chosen = [row for row in result.rows if row.class_name in shown]
    rows = [
        {**_record(row, getattr(row, key)), "name": row.class_name or "all"}
        for row in chosen
        if (getattr(row, key).value or 0) > 0
    ]
    labels = [name or "all" for name in shown]
    missing = {row.mode for row in chosen} - {record["mode"] for record in rows}
    color = hues("name", labels, colors(len(labels)), LEGEND if len(labels) > 1 else None)
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
        "sort": list(result.modes),
        "axis": {"labelLimit": 260},
    }
    interval = layer(
        {"type": "rule", "strokeWidth": 2},
        {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": color},
        where="datum.low > 0 && isValid(datum.high)",
    )
    dot = {
        "x": {**x, "field": "value"},
        "y": y,
        "color": color,
        "shape": {**color, "scale": {"domain": labels}},
        "tooltip": _tooltip(title),
    }
    infinite = {"type": "text", "align": "right", "dx": -6, "text": "∞", "fontSize": 14}
    without = [{"mode": mode} for mode in sorted(missing)]
    layers = [
        *([interval] if any(r["high"] and (r["low"] or 0) > 0 for r in rows) else []),
        layer({"type": "point", "filled": True, "size": 70}, dot),
        *([layer(infinite, {"x": {"value": "width"}, "y": y}, without)] if missing else []),
    ]
    return {"width": "fit", "height": {"step": 22}, "data": {"values": rows}, "layer": layers}


def _lines(result: ModesFile, x: Spec, y: Spec) -> list[Spec]:
    return lines(result.modes, "mode", {**x, "field": "rate"}, y, _tooltip(str(y["title"])))


def _rate_axis(result: ModesFile) -> Spec:
    scale = {"domain": [0, max(result.rates_per_s or ())], "nice": False}
    return {"type": "quantitative", "title": "offered, requests per s", "scale": scale}


def _record(row: ModeRow, estimate: EstimateSection) -> Record:
    return {"mode": row.mode, "rate": row.rate_per_s, **estimate.to_json()}


def _tooltip(title: str) -> list[Spec]:
    return [
        {"field": "mode"},
        number("rate", "offered per s"),
        number("value", title),
        *bounds(),
        {"field": "n", "title": "seeds"},
    ]
