"""Page of a comparison of batching modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen.studies.modes.charts import figures
from loadgen.studies.modes.result import ModeRow, ModesFile
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


def render(result: ModesFile, cache_dir: Path | None = None) -> str:
    """The page of modes.json. `cache_dir` caches the plotting bundle."""
    drawn = figures(result)
    has_classes = any(row.class_name for row in result.rows)
    return render_page(
        "modes.html.j2",
        drawn,
        cache_dir,
        result=result,
        heading=heading(result),
        notes=notes(result),
        lead=lead(result),
        captions=[(name, _CAPTIONS[name]) for name in drawn],
        has_rates=result.rates_per_s is not None,
        has_classes=has_classes,
        titles=[title for title, _, _ in COLUMNS],
        rows=[_row(row, has_classes) for row in result.rows],
        ratio_titles=_ratio_titles(result),
        ratios=[_ratio_row(row, result, has_classes) for row in _others(result)],
        how=_how(result),
        command=redacted_command(result.command),
    )


def _row(row: ModeRow, has_classes: bool) -> dict[str, Any]:
    return {
        "mode": row.mode,
        "rate": "" if row.rate_per_s is None else f"{row.rate_per_s:g}/s",
        "name": row.class_name or (ALL if has_classes else ""),
        "cells": [value_text(getattr(row, key), unit) for _, key, unit in COLUMNS],
        "waits": waits_text(row),
    }


def _others(result: ModesFile) -> list[ModeRow]:
    return [row for row in result.rows if row.mode != result.baseline]


def _ratio_titles(result: ModesFile) -> list[str]:
    return [title for title, key, _ in COLUMNS if key in result.rows[0].ratio]


def _ratio_row(row: ModeRow, result: ModesFile, has_classes: bool) -> dict[str, Any]:
    keys = [key for _, key, _ in COLUMNS if key in result.rows[0].ratio]
    cells = [times_text(row.ratio[key]) for key in keys]
    return {**_row(row, has_classes), "cells": cells}


def _how(result: ModesFile) -> str:
    level = f"{100 * result.confidence:g} %"
    if len(result.seeds) > 1:
        return (
            f"Means over {len(result.seeds)} seeds, ± half of the {level} confidence interval "
            "(Student's t); a percentile is computed in each run and then averaged. Failures count "
            "as infinite. –: no value, or infinite."
        )
    return "One run per mode. Failures count as infinite. –: no value, or infinite."
