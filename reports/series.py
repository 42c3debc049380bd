"""Several lines in one figure, told apart by colour and, for print and for those who see colours
alike, by dash. Colours are mid-tones of the Okabe-Ito family, at least 3:1 against white and near
black.
"""

from __future__ import annotations

from collections.abc import Sequence

from reports.charts import Spec

COLORS = ("#3a86c8", "#d08020", "#2a9d78", "#d1495b", "#8a63b0", "#85878c", "#b0a020", "#50b0c8")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2], [1, 3], [10, 4], [3, 1])


def colors(n: int) -> list[str]:
    return [COLORS[k % len(COLORS)] for k in range(n)]


def color(names: Sequence[str], field: str) -> Spec:
    """The colour of each series, with the legend; a single one without a name needs none."""
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(names), "range": colors(len(names))},
        "legend": {
            "title": None,
            "orient": "top",
            "labelLimit": 300,
            "columns": 3,
            "symbolOpacity": 1,
        }
        if any(names)
        else None,
    }


def dash(names: Sequence[str], field: str) -> Spec:
    """The dash of each series, in the legend of its colour."""
    dashes = [DASHES[k % len(DASHES)] for k in range(len(names))]
    return {**color(names, field), "scale": {"domain": list(names), "range": dashes}}


def lines(
    names: Sequence[str], field: str, x: Spec, y: Spec, tooltip: Sequence[Spec]
) -> list[Spec]:
    """A line per series through `value`, with dots and the band from `low` to `high`."""
    tinted = color(names, field)
    return [
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "area", "opacity": 0.2},
            "encoding": {
                "x": x,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
                "color": tinted,
            },
        },
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {
                "x": x,
                "y": {**y, "field": "value"},
                "color": tinted,
                "strokeDash": dash(names, field),
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 36},
            "encoding": {
                "x": x,
                "y": {**y, "field": "value"},
                "color": tinted,
                "tooltip": list(tooltip),
            },
        },
    ]
