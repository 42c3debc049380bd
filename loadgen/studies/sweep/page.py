"""Page of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.studies.sweep import view
from loadgen.studies.sweep.charts import figures
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


def render(facts: Mapping[str, Any], cache_dir: Path | None = None) -> str:
    """The page of sweep.json. `cache_dir` caches the plotting bundle."""
    drawn = figures(facts)
    columns = view.shown_columns(facts)
    return render_page(
        "sweep.html.j2",
        drawn,
        cache_dir,
        facts=facts,
        heading=view.heading(facts),
        conclusion=view.conclusion(facts),
        notes=[redact(note) for note in view.notes(facts)],
        captions=[(name, _CAPTIONS[name]) for name in drawn],
        names=view.factor_names(facts),
        benefit=view.benefit_title(facts),
        columns=columns,
        rows=[_row(row, facts, columns) for row in facts["rows"]],
        how=_how(facts),
        command=redacted_command(facts["command"]),
    )


def _row(row: Mapping[str, Any], facts: Mapping[str, Any], columns: Any) -> dict[str, Any]:
    return {
        "factors": list(row["factors"].values()),
        "n": row["n"],
        "gpus": "–" if row["gpus"] is None else row["gpus"],
        "benefit": view.benefit_text(row),
        "cost": view.cost_text(row, facts),
        "cells": [view.measure_text(row, text) for text in columns],
        "verdict": view.verdict_text(row),
        "standing": view.standing_text(row),
        "runs": [
            {"name": f"r{run['repeat']}", "link": f"{run['directory']}/report.html",
             "title": "; ".join(run["reasons"])}
            for run in row["runs"]
        ],
    }  # fmt: skip


def _how(facts: Mapping[str, Any]) -> str:
    level = f"{100 * facts['confidence']:g} %"
    if facts["repeats"] > 1:
        return (
            f"Means over the runs of a cell (n), ± half of the {level} confidence interval "
            "(Student's t over the runs); a percentile is computed in each run and then averaged. "
            "Failures count as infinitely slow. –: no value, or infinite in some run."
        )
    return "One run per cell. Failures count as infinitely slow. –: no value, or infinite."
