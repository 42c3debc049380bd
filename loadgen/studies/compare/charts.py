"""Figures of a comparison: the change at every percentile, and both distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loadgen.measure.catalog import METRICS
from loadgen.measure.measures import Measure, Measured
from loadgen.studies.compare.judgement import Options, judge
from reports.charts import (
    BLUE,
    GREY,
    ORANGE,
    Record,
    Spec,
    axis,
    bounds,
    figure,
    hues,
    layer,
    number,
    tail_axis,
    tail_position,
    time_unit,
)

COMPARED_METRICS = ("ttft_s", "ttfat_s", "tpot_s", "itl_s", "e2e_s")
"""The metrics of the figures; TTFAT only where answers have reasoning."""
N_QUANTILES, N_POINTS = 25, 300


def shifts(
    name: str, a: Sequence[Measured], b: Sequence[Measured], options: Options
) -> list[Record]:
    """B / A − 1 at each percentile with its confidence interval over the runs, up to the last
    percentile with ten samples beyond it in each run. Flat records: tail, quantile, change, low,
    high (None without an interval)."""
    metric = METRICS[name]
    n = min((len(m.ordered(metric)) for m in (*a, *b)), default=0)
    if n < 20:
        return []
    records = []
    for tail in np.linspace(0.0, tail_position(1 - 10 / n), N_QUANTILES).tolist():
        quantile = max(1 - 10**-tail, 0.01)
        percentile = Measure(f"p{100 * quantile:g}({metric.slo})", metric, "p", quantile)
        in_a, in_b = (np.array([m.value(percentile) for m in side]) for side in (a, b))
        _, row = judge(percentile, (in_a, in_b), None, replace(options, noise={}))
        if not math.isfinite(row.change):  # a value of 0 has no ratio
            continue
        numbers = {"change": row.change, "low": row.low, "high": row.high}
        records.append({"tail": tail, "quantile": quantile, **numbers})
    return records


def ecdf(name: str, a: Sequence[Measured], b: Sequence[Measured]) -> list[Record]:
    """Value and the share of samples at or below it, all runs of a side together."""
    records: list[Record] = []
    for side, runs in (("A", a), ("B", b)):
        pooled = np.sort(np.concatenate([m.ordered(METRICS[name]) for m in runs]))
        if not len(pooled):
            return []
        ranks = np.unique(np.linspace(1, len(pooled), N_POINTS).round().astype(int))
        records += [
            {"side": side, "value": float(pooled[k - 1]), "share": k / len(pooled)}
            for k in ranks.tolist()
        ]
    return records


def shift_chart(metric: str, records: Sequence[Record], margin: float) -> Spec:
    """Change from A to B in per cent at every percentile, with its band and the margin."""
    last = max(1.0, *(r["tail"] for r in records))
    x = tail_axis(last)
    y = {"type": "quantitative", "title": "B against A", "axis": {"format": "+.0%"}}
    low, high = {**y, "field": "low"}, {"field": "high"}
    tooltip = [
        number("quantile", "percentile", ".4~%"),
        number("change", "change", "+.2%"),
        *bounds("+.2%"),
    ]
    margins = [{"low": -margin, "high": margin, "from": 0, "to": last}]
    band = layer(
        {"type": "area", "opacity": 0.2, "color": ORANGE},
        {"x": x, "y": low, "y2": high},
        where="isValid(datum.high)",
    )
    bands = [] if all(r["high"] is None for r in records) else [band]
    layers = [
        layer({"type": "rect", "color": GREY, "opacity": 0.18}, {"y": low, "y2": high}, margins),
        layer({"type": "rule", "color": GREY}, {"y": {**y, "field": "y"}}, [{"y": 0.0}]),
        *bands,
        layer(
            {"type": "line", "color": ORANGE, "point": {"size": 18}},
            {"x": x, "y": {**y, "field": "change"}, "tooltip": tooltip},
        ),
    ]
    title = f"{METRICS[metric].title}: change from A to B at every percentile"
    return figure(title, records, height=210, layer=layers)


def ecdf_chart(metric: str, records: Sequence[Record]) -> Spec:
    """The distributions of both sides on a common axis."""
    unit, per_s = time_unit(max(r["value"] for r in records))
    color = hues("side", ["A", "B"], [BLUE, ORANGE])
    dash = {**color, "scale": {"domain": ["A", "B"], "range": [[1, 0], [6, 2]]}}
    return figure(
        f"{METRICS[metric].title}: both distributions, in {unit}",
        [{**r, "value": r["value"] * per_s} for r in records],
        height=210,
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        encoding={
            "x": axis("value", unit, scale={"zero": False}),
            "y": axis("share", "answers at or below", axis={"format": ".0%"}),
            "color": color,
            "strokeDash": dash,
        },
    )
