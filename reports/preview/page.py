"""A scenario's planned traffic as an HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.records import Schedule
from loadgen.units import format_duration
from reports.page import render_page
from reports.preview import view
from reports.preview.charts import figures, shown_note

_CAPTIONS = {
    "raster": "Arrivals",
    "rate": "Rate over time",
    "length-input": "Prompt lengths",
    "length-output": "Answer lengths",
}


def render(
    facts: Mapping[str, Any],
    schedule: Schedule,
    classes: Sequence[str],
    scenario_text: str,
    cache_dir: Path | None = None,
) -> str:
    """The page of `loadgen.workload.preview.preview`'s facts and of the schedule they describe.
    `cache_dir` caches the plotting bundle, which takes seconds to make."""
    warmup_s = float(facts["window"]["warmup_s"])
    drawn = figures(schedule, classes, warmup_s, float(facts["duration_s"]))
    return render_page(
        "preview.html.j2",
        drawn,
        cache_dir,
        facts=facts,
        number_of_requests=view.number_of_requests(facts),
        arrival_head=view.ARRIVAL_HEAD,
        arrivals=view.arrival_rows(facts["arrivals"]),
        length_head=view.LENGTH_HEAD,
        lengths=view.length_rows(facts),
        agent_head=view.AGENT_HEAD,
        agents=[
            (name, view.agent_lines(figures), view.agent_rows(figures))
            for name, figures in facts["agents"].items()
        ],
        slo_head=view.SLO_HEAD,
        queue_note=view.QUEUE_NOTE,
        slos=[*map(_own_slo, facts["own_slo"]), *view.slo_rows(facts)],
        no_slo=view.NO_SLO,
        captions=_CAPTIONS,
        raster_note=shown_note(facts),
        scenario_text=scenario_text,
    )


def _own_slo(slo: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """The same row for limits that differ from request to request, read from a trace."""
    low, middle, high = (format_duration(slo[key]) for key in ("min_s", "p50_s", "max_s"))
    limits = f"{slo['text']} (from the trace: {low} to {high}, median {middle})"
    return limits, "–", "–", f"{slo['n']} requests have it", ""
