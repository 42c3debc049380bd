"""Page of the capacities of batching modes, with the capacity for each seed."""

from __future__ import annotations

from pathlib import Path

from loadgen.studies.modes.capacity_view import HEAD, how, lead, notes, rows
from loadgen.studies.modes.result import ModeCapacitiesFile
from loadgen.studies.modes.view import heading
from reports.charts import BLUE, GREY, Spec, bounds, figure, layer, number
from reports.page import render_page
from reports.redaction import redacted_command

_ROW = 34  # pixels of a mode


def render(result: ModeCapacitiesFile, cache_dir: Path | None = None) -> str:
    """The page of the modes.json of `slobench modes --capacity`."""
    drawn = {"capacities": capacities(result)} if result.capacity.modes else {}
    return render_page(
        "mode_capacity.html.j2",
        drawn,
        cache_dir,
        result=result,
        heading=heading(result),
        lead=lead(result),
        notes=notes(result),
        head=HEAD,
        rows=rows(result),
        how=how(result),
        command=redacted_command(result.command),
    )


def capacities(result: ModeCapacitiesFile) -> Spec:
    """A line per mode: the capacity for each seed as a small dot, the mean with its interval."""
    modes = [row.to_json() for row in result.capacity.modes]
    order = [row.mode for row in result.capacity.modes]
    x = {"type": "quantitative", "title": "capacity, requests per s", "scale": {"zero": False}}
    y = {
        "field": "mode",
        "type": "nominal",
        "title": None,
        "sort": order,
        "axis": {"labelLimit": 260},
    }
    seeds = [
        {"mode": row.mode, "value": row.rate_per_s, "seed": row.seed}
        for row in result.searches
        if row.outcome == "found"
    ]
    hints = [{"field": "mode"}, number("value", "capacity per s")]
    dots = {"x": {**x, "field": "value"}, "y": y, "tooltip": [*hints, {"field": "seed"}]}
    mean = {"x": {**x, "field": "value"}, "y": y, "tooltip": [*hints, *bounds()]}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}
    layers = [
        layer({"type": "point", "size": 24, "color": GREY}, dots, seeds),
        layer(
            {"type": "rule", "strokeWidth": 3, "color": BLUE},
            interval,
            modes,
            where="isValid(datum.low) && isValid(datum.high)",
        ),
        layer({"type": "point", "filled": True, "size": 90, "color": BLUE}, mean, modes),
    ]
    height = _ROW * len(modes)  # a height by step does not fit a width of 100 %
    return figure("Capacity by batching mode, with each seed", height=height, layer=layers)
