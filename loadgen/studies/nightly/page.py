"""Page of a night, with the trends over the nights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from loadgen.measure.measures import measure
from loadgen.studies.nightly import view
from loadgen.studies.nightly.charts import trend_chart
from loadgen.studies.nightly.result import CellResult, NightResult, NightRun
from loadgen.studies.nightly.statistics import NightNoise
from reports.charts import Spec
from reports.page import render_page
from reports.redaction import redacted_command

_TONES = {"better": "met", "same": "met", "worse": "missed", "invalid": "invalid"}


def render(night: NightResult, cache_dir: Path | None = None) -> str:
    """The page. `cache_dir` caches the plotting bundle, which takes seconds to make."""
    drawn: dict[str, Spec] = {}
    shown = [_cell(k, cell, drawn) for k, cell in enumerate(night.cells, start=1)]
    not_added = view.NOT_ADDED.format(file=night.file)
    return render_page(
        "nightly.html.j2",
        drawn,
        cache_dir,
        night=night,
        tone=_TONES.get(night.verdict, "unknown"),
        sentence=view.SENTENCES[night.verdict],
        waits=not_added if night.verdict in ("worse", "better") else "",
        lines=view.lines(night.cells, night.verdict),
        began=night.started_utc[:16].replace("T", " "),
        command=redacted_command(night.command),
        head=view.HEAD,
        has_control=any(cell.controls for cell in night.cells),
        cells=shown,
    )


def _cell(k: int, cell: CellResult, drawn: dict[str, Spec]) -> dict[str, Any]:
    charts = []
    for n, (text, points) in enumerate(cell.trends.items()):
        if points:
            name = f"trend-{k}-{n}"
            drawn[name] = trend_chart(text, measure(text).metric, points)
            charts.append((name, text))
    return {
        "name": cell.cell,
        "line": view.cell_line(cell),
        "verdict": cell.verdict,
        "n_nights": cell.n_nights,
        "notes": cell.notes,
        "rows": [(view.row(row), row.how) for row in cell.measures],
        "charts": charts,
        "noise": [_noise(text, noise) for text, noise in cell.noise.items()],
        "control": view.control_lines(cell),
        "changes": view.changed_lines(cell),
        "runs": [_linked(run) for run in cell.runs],
    }


def _linked(run: NightRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "reasons": run.reasons,
        "directory": quote(run.directory),
        "control_directory": quote(run.control_directory or ""),
    }


def _noise(text: str, noise: NightNoise) -> tuple[str, str, str, str]:
    unit = "points" if measure(text).is_share else "%"
    of_runs, of_nights = (f"{100 * sd:.2g} {unit}" for sd in (noise.run_sd, noise.night_sd))
    return text, of_runs, of_nights, "yes" if noise.assumed_df else "no"
