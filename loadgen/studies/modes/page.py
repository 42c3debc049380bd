"""Page of a comparison of batching modes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.studies.modes.charts import figures
from loadgen.studies.modes.view import (
    ALL,
    COLUMNS,
    heading,
    lead,
    notes,
    times_text,
    value_text,
    waits_text,
)
from reports.page import render_page
from reports.redaction import redacted_command

_CAPTIONS = {
    "goodput": (
        "Goodput over the offered rate",
        "Requests per second that met all their SLOs. Dotted: the offered rate. Bands: confidence "
        "interval over the seeds.",
    ),
    "difference": (
        "Gain in goodput over the first mode",
        "Goodput minus that of the first mode, for the same seed and requests. Bands: confidence "
        "interval of these paired differences. Where a band excludes zero, the modes differ.",
    ),
    "latencies": (
        "Latencies by mode",
        "Each dot is a percentile over all requests of a class with its confidence interval; "
        "failures count as infinite. ∞: so many requests failed that the percentile is infinite.",
    ),
    "kept": (
        "SLO attainment by mode",
        "The share of due requests that met all their SLOs, by class, and by offered rate where "
        "rates were varied.",
    ),
}


def render(facts: Mapping[str, Any], cache_dir: Path | None = None) -> str:
    """The page of modes.json. `cache_dir` caches the plotting bundle."""
    drawn = figures(facts)
    has_classes = any(row["class"] for row in facts["rows"])
    return render_page(
        "modes.html.j2",
        drawn,
        cache_dir,
        facts=facts,
        heading=heading(facts),
        notes=notes(facts),
        lead=lead(facts),
        captions=[(name, _CAPTIONS[name]) for name in drawn],
        has_rates=facts["rates_per_s"] is not None,
        has_classes=has_classes,
        titles=[title for title, _, _ in COLUMNS],
        rows=[_row(row, has_classes) for row in facts["rows"]],
        ratio_titles=_ratio_titles(facts),
        ratios=[_ratio_row(row, facts, has_classes) for row in _others(facts)],
        how=_how(facts),
        command=redacted_command(facts["command"]),
    )


def _row(row: Mapping[str, Any], has_classes: bool) -> dict[str, Any]:
    return {
        "mode": row["mode"],
        "rate": "" if row["rate_per_s"] is None else f"{row['rate_per_s']:g}/s",
        "name": row["class"] or (ALL if has_classes else ""),
        "cells": [value_text(row[key], unit) for _, key, unit in COLUMNS],
        "waits": waits_text(row),
    }


def _others(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in facts["rows"] if row["mode"] != facts["baseline"]]


def _ratio_titles(facts: Mapping[str, Any]) -> list[str]:
    return [title for title, key, _ in COLUMNS if key in facts["rows"][0]["ratio"]]


def _ratio_row(
    row: Mapping[str, Any], facts: Mapping[str, Any], has_classes: bool
) -> dict[str, Any]:
    keys = [key for _, key, _ in COLUMNS if key in facts["rows"][0]["ratio"]]
    cells = [times_text(row["ratio"][key]) for key in keys]
    return {**_row(row, has_classes), "cells": cells}


def _how(facts: Mapping[str, Any]) -> str:
    level = f"{100 * facts['confidence']:g} %"
    if len(facts["seeds"]) > 1:
        return (
            f"Means over {len(facts['seeds'])} seeds, ± half of the {level} confidence interval "
            "(Student's t); a percentile is computed in each run and then averaged. Failures count "
            "as infinite. –: no value, or infinite."
        )
    return "One run per mode. Failures count as infinite. –: no value, or infinite."
