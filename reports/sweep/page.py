"""A sweep on one HTML page that needs nothing but a browser."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reports.page import render_page
from reports.redaction import redact
from reports.sweep import view
from reports.sweep.charts import figures

_CAPTIONS = {
    "tradeoff": (
        "Latency against throughput",
        "Each dot is a cell; the bars are its intervals over the runs. Filled dots, joined by the "
        "dotted line, are the Pareto front: no other cell is surely better in one of the two and "
        "not surely worse in the other. That is decided run by run: the k-th runs of two cells "
        "had the same seed, so their difference is known better than the bars suggest. Failures "
        "count as infinitely slow.",
    ),
    "goodput": (
        "Goodput along the load",
        "Requests per second that kept all their promises, with the interval over the runs. "
        "Dotted: all that were offered.",
    ),
}


def render(facts: Mapping[str, Any], cache_dir: Path | None = None) -> str:
    """The page of a sweep's facts (sweep.json). `cache_dir` keeps the plotting bundle, which takes
    seconds to make."""
    drawn = figures(facts)
    columns = view.shown_columns(facts)
    return render_page(
        "sweep.html.j2",
        drawn,
        cache_dir,
        facts=facts,
        heading=view.heading(facts),
        notes=[redact(note) for note in view.notes(facts)],
        captions=[(name, _CAPTIONS[name]) for name in drawn],
        names=view.factor_names(facts),
        benefit=view.benefit_title(facts),
        columns=columns,
        rows=[_row(row, facts, columns) for row in facts["rows"]],
        how=_how(facts),
        command=shlex.join(redact(str(word)) for word in facts["command"]),
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
            f"Means over the runs of a cell (n), ± half of the {level} interval (Student's t over "
            "the runs); a percentile is computed in each run and then averaged. Failures count as "
            "infinitely slow; – is a value that does not exist, or is infinite in some run."
        )
    return (
        "Of a single run per cell. Failures count as infinitely slow; – is a value that does not "
        "exist or is infinite."
    )
