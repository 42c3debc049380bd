"""Page of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.studies.sweep import view
from loadgen.studies.sweep.charts import figures
from loadgen.studies.sweep.result import CellRow, SweepResult
from reports.page import render_page
from reports.redaction import redact, redacted_command

_CAPTIONS = {
    "tradeoff": (
        "Latency against throughput",
        "Each dot is a cell, its bars are confidence intervals over the runs. Filled dots, joined "
        "by the dotted line, are the Pareto front: no other configuration is significantly better "
        "in one of the two without being significantly worse in the other. Runs are compared in "
        "pairs of the same seed, so differences are known better than the bars suggest. Failures "
        "count as infinitely slow.",
    ),
    "goodput": (
        "Goodput along the load",
        "Requests per second that met all their SLOs, with the confidence interval over the runs. "
        "Dotted: the offered rate.",
    ),
}


def render(result: SweepResult, cache_dir: Path | None = None) -> str:
    """The page of sweep.json. `cache_dir` caches the plotting bundle."""
    drawn = figures(result)
    columns = view.shown_columns(result)
    return render_page(
        "sweep.html.j2",
        drawn,
        cache_dir,
        result=result,
        heading=view.heading(result),
        conclusion=view.conclusion(result),
        notes=[redact(note) for note in view.notes(result)],
        captions=[(name, _CAPTIONS[name]) for name in drawn],
        names=view.factor_names(result),
        benefit=view.benefit_title(result),
        columns=columns,
        rows=[_row(row, result, columns) for row in result.rows],
        how=_how(result),
        command=redacted_command(result.command),
    )


def _row(row: CellRow, result: SweepResult, columns: Sequence[str]) -> dict[str, Any]:
    return {
        "factors": list(row.factors.values()),
        "n": row.n,
        "gpus": "–" if row.gpus is None else row.gpus,
        "benefit": view.benefit_text(row),
        "cost": view.cost_text(row, result),
        "cells": [view.measure_text(row, text) for text in columns],
        "verdict": view.verdict_text(row),
        "standing": view.standing_text(row),
        "runs": [
            {
                "name": f"r{run.repeat}",
                "link": f"{run.directory}/report.html",
                "title": "; ".join(run.reasons),
            }
            for run in row.runs
        ],
    }


def _how(result: SweepResult) -> str:
    level = f"{100 * result.confidence:g} %"
    if result.repeats > 1:
        return (
            f"Means over the runs of a cell (n), ± half of the {level} confidence interval "
            "(Student's t over the runs); a percentile is computed in each run and then averaged. "
            "Failures count as infinitely slow. –: no value, or infinite in some run."
        )
    return "One run per cell. Failures count as infinitely slow. –: no value, or infinite."
