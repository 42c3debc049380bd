"""The figures of a comparison: the change along the percentiles, and both distributions."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.measure.catalog import METRICS
from reports.charts import BLUE, GREY, ORANGE, TAIL_LABEL, TAIL_TICKS, Spec, standalone, time_unit
from reports.run.frames import Record


def shift_chart(metric: str, records: Sequence[Record], margin: float) -> Spec:
    """B against A in per cent at every percentile, with its band and the margin."""
    last = max(max(r["tail"] for r in records), 1.0)
    x = {
        "field": "tail",
        "type": "quantitative",
        "title": "percentile",
        "scale": {"domain": [0, last], "nice": False},
        "axis": {"values": [t for t in TAIL_TICKS if t <= last + 1e-9], "labelExpr": TAIL_LABEL},
    }
    y = {"type": "quantitative", "title": "B against A", "axis": {"format": "+.0%"}}
    number = {"type": "quantitative", "format": "+.2%"}
    tooltip = [
        {"field": "quantile", "type": "quantitative", "format": ".4~%", "title": "at"},
        {"field": "change", "title": "change", **number},
        {"field": "low", "title": "from", **number},
        {"field": "high", "title": "to", **number},
    ]
    zero = [{"y": 0.0}]
    band = [{"low": -margin, "high": margin, "from": 0, "to": last}]
    layers = [
        {
            "data": {"values": band},
            "mark": {"type": "rect", "color": GREY, "opacity": 0.18},
            "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "data": {"values": zero},
            "mark": {"type": "rule", "color": GREY},
            "encoding": {"y": {**y, "field": "y"}},
        },
        {
            "transform": [{"filter": "isValid(datum.high)"}],
            "mark": {"type": "area", "opacity": 0.2, "color": ORANGE},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "mark": {"type": "line", "color": ORANGE, "point": {"size": 18}},
            "encoding": {"x": x, "y": {**y, "field": "change"}, "tooltip": tooltip},
        },
    ]
    title = f"{METRICS[metric].title}: how far B is from A at every percentile"
    spec = {"height": 210, "width": "container", "data": {"values": list(records)}, "layer": layers}
    return standalone(spec, title)


def ecdf_chart(metric: str, records: Sequence[Record]) -> Spec:
    """Both sides' distributions on one axis."""
    unit, per_s = time_unit(max(r["value"] for r in records))
    rows = [{**r, "value": r["value"] * per_s} for r in records]
    color = {
        "field": "side",
        "type": "nominal",
        "scale": {"domain": ["A", "B"], "range": [BLUE, ORANGE]},
        "legend": {"title": None, "orient": "top"},
    }
    spec = {
        "height": 210,
        "width": "container",
        "data": {"values": rows},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        "encoding": {
            "x": {
                "field": "value",
                "type": "quantitative",
                "title": unit,
                "scale": {"zero": False},
            },
            "y": {
                "field": "share",
                "type": "quantitative",
                "title": "answers at or below",
                "axis": {"format": ".0%"},
            },
            "color": color,
            "strokeDash": {**color, "scale": {"domain": ["A", "B"], "range": [[1, 0], [6, 2]]}},
        },
    }
    return standalone(spec, f"{METRICS[metric].title}: both distributions, in {unit}")
