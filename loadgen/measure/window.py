"""A recorded run with another measured window: a chosen one, or from the start of the steady
state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from loadgen.errors import UsageError
from loadgen.measure.attainment import due_rows, measured_window
from loadgen.measure.per_request import per_request
from loadgen.measure.statistics.time_series import mser5
from loadgen.records import Phase, Run
from loadgen.units import parse_duration_s


def with_window(run: Run, text: str) -> Run:
    """The run measured over `30s:90s` (from its start), or over `steady`: from where TTFT has
    settled (MSER-5). Requests scheduled after the window are left out.

    Raises UsageError for a window that is malformed, empty or not found.
    """
    start_s, end_s = _steady(run) if text == "steady" else _ends(text)
    window = measured_window(run)
    if not start_s < end_s or start_s >= window.end_s:
        raise UsageError(f"--window {text}: the window is empty; the run ends at {window.end_s:g}s")
    planned_s = run.schedule_rows["scheduled_s"]
    due_s = np.where(np.isnan(planned_s), run.request_rows["released_s"], planned_s)
    kept = ~(due_s >= end_s)
    schedule = run.schedule_rows[kept].copy()
    schedule["phase"] = np.where(due_s[kept] < start_s, Phase.warmup, Phase.measure)
    ids = schedule["request_id"]
    length_s = min(end_s, window.end_s) - start_s
    changed = structs.replace(run.manifest.window, warmup_s=start_s, measure_s=length_s)
    return replace(
        run,
        manifest=structs.replace(run.manifest, window=changed),
        schedule_rows=schedule,
        request_rows=run.request_rows[kept],
        chunk_rows=run.chunk_rows[np.isin(run.chunk_rows["request_id"], ids)],
        edge_rows=run.edge_rows[np.isin(run.edge_rows["request_id"], ids)],
    )


def _ends(text: str) -> tuple[float, float]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError("expected START:END, e.g. 30s:90s, or steady")
        return parse_duration_s(first), parse_duration_s(last)
    except ValueError as error:
        raise UsageError(f"--window {text}: {error}") from None


def _steady(run: Run) -> tuple[float, float]:
    columns, window = per_request(run), measured_window(run)
    counted = due_rows(run) & columns.is_ok & np.isfinite(columns.ttft_s)
    order = np.argsort(run.request_rows["released_s"][counted], kind="stable")
    found = mser5(columns.ttft_s[counted][order])
    if not found.is_found:
        raise UsageError(
            "--window steady: TTFT does not settle in this run, or the run is too short"
        )
    return float(run.request_rows["released_s"][counted][order][found.cut]), window.end_s
