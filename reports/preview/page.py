"""What a scenario would send, on one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.records import Schedule
from loadgen.units import format_duration
from reports.page import render_page
from reports.preview.charts import figures, shown_note

_CAPTIONS = {
    "raster": "Arrivals",
    "rate": "Rate over time",
    "length-input": "Input lengths",
    "length-output": "Output lengths",
}


def render(
    facts: Mapping[str, Any],
    schedule: Schedule,
    classes: Sequence[str],
    scenario_text: str,
    cache_dir: Path | None = None,
) -> str:
    """The page of `loadgen.workload.preview.preview`'s figures and the schedule they describe.
    `cache_dir` keeps the plotting bundle, which takes seconds to make."""
    warmup_s = float(facts["window"]["warmup_s"])
    drawn = figures(schedule, classes, warmup_s, float(facts["duration_s"]))
    return render_page(
        "preview.html.j2",
        drawn,
        cache_dir,
        facts=facts,
        duration=format_duration(facts["duration_s"]),
        arrivals=_arrivals(facts["arrivals"]),
        lengths=_lengths(facts),
        promises=[*map(_own, facts["own_slo"]), *_promises(facts["slo"])],
        captions=_CAPTIONS,
        raster_note=shown_note(facts),
        scenario_text=scenario_text,
    )


def _arrivals(arrivals: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, asked, generated) rows."""
    asked = arrivals["asked_rate_per_s"]
    window_s = arrivals["dispersion_window_s"]
    dispersion = f"dispersion in windows of {format_duration(window_s)}" if window_s else ""
    return [
        ("rate per s", _number(asked), _number(arrivals["generated_rate_per_s"])),
        ("gap cv", "", _number(arrivals["gap_cv"])),
        ("lag-1 correlation of gaps", "", _number(arrivals["gap_lag1"])),
        *([(dispersion, "", _number(arrivals["dispersion"]))] if dispersion else []),
        ("most in any second", "", str(arrivals["peak_in_1s"])),
    ]


def _lengths(facts: Mapping[str, Any]) -> list[list[str]]:
    quantities = ("asked_mean", "mean", "p50", "p90", "p99", "max")
    return [
        [
            word,
            *(_number(facts[f"{word}_tokens"][q]) for q in quantities),
            _number(facts[f"{word}_tokens_per_s"]),
        ]
        for word in ("input", "output")
    ]


def _own(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """The same of a promise that requests of a trace bring themselves."""
    low, middle, high = (format_duration(one[end]) for end in ("min_s", "p50_s", "max_s"))
    limits = f"{one['text']} ({low} to {high}, half of them at most {middle})"
    return limits, "–", f"{one['n']} have one", ""


def _promises(promises: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(promise, requests needed to prove it, in this window, minutes needed) rows."""
    rows = []
    for promise in promises:
        needed, minutes = promise["n_needed"], promise["minutes_needed"]
        if needed is None:
            rows.append((promise["text"], "–", "", ""))
            continue
        enough = "yes" if promise["is_provable"] else "too few"
        window = f"{promise['n']} ({enough})"
        rows.append((promise["text"], str(needed), window, _number(minutes)))
    return rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
