"""Page of a demonstration: two tables, the method, and the settings of every tool."""

from __future__ import annotations

from pathlib import Path

from loadgen.studies.demo.result import Demo
from loadgen.studies.demo.view import (
    STALLS_HEAD,
    STEADY_HEAD,
    absent_rows,
    headline,
    invalid_runs,
    method,
    stall_rows,
    steady_rows,
    tools_of,
)
from reports.page import render_page
from reports.redaction import redact, redacted_command


def render(result: Demo, cache_dir: Path | None = None) -> str:
    """The page of demo.json. `cache_dir` caches the plotting bundle."""
    return render_page(
        "demo.html.j2",
        {},
        cache_dir,
        result=result,
        headline=headline(result),
        tone="invalid" if result.exit_code else "met",
        steady_head=STEADY_HEAD,
        steady_rows=steady_rows(result),
        stalls_head=STALLS_HEAD,
        stall_rows=stall_rows(result),
        absent=[(name, redact(reason)) for name, reason in absent_rows(result)],
        invalid=[redact(line) for line in invalid_runs(result)],
        method=method(result),
        tools=tools_of(result),
        command=redacted_command(result.command),
    )
