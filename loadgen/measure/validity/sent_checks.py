"""What became of the scheduled rows: recorded, begun, and released at their own instants."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.validity.check import ValidityCheck
from loadgen.measure.wording import format_count
from loadgen.records import CLIENT_LIMIT, Run, Status

STIMULUS_TOLERANCE_S = 1e-3


def record(run: Run) -> ValidityCheck:
    n_lost = int(np.count_nonzero(run.request_rows["status"] == Status.lost))
    n = len(run.request_rows)
    if n_lost:
        detail = f"{format_count(n_lost)} of {format_count(n)} rows were lost by the client"
        return ValidityCheck("record", False, detail + _how_rows_got_lost(run), is_gate=True)
    for shard in run.instrument.shards:
        if why := shard.broken:
            detail = f"load-generating process {shard.shard} stopped before its time: {why}"
            return ValidityCheck("record", False, detail, is_gate=True)
    return ValidityCheck(
        "record", True, f"all {format_count(n)} scheduled rows are recorded", is_gate=True
    )


def _how_rows_got_lost(run: Run) -> str:
    """How the run ended, and where to read on; a run without one of its workers can be
    "completed" all the same."""
    why = run.manifest.end_reason.rstrip(".")
    worker = re.search(r"\bprocess (\d+) died", why)
    log = "; what its workers wrote is in logs/shard-N.log"
    if run.manifest.workers is not None:  # of other processes, perhaps of other machines
        log = "; manifest.json says under `workers` what is known of each"
    elif worker is not None:
        log = f"; its log is logs/shard-{worker[1]}.log"
    return f": {why}{log}" if why else log


def client_limits(run: Run) -> list[ValidityCheck]:
    """A gate that only shows where it is closed: what the client could not even begin."""
    found = run.request_rows[np.isin(run.request_rows["error_id"], run.names.client_limits)]
    if not len(found):
        return []
    why = run.names.errors[found["error_id"][0]].removesuffix(CLIENT_LIMIT)
    detail = (
        f"client-bound: {format_count(len(found))} of {format_count(len(run.request_rows))} "
        "requests got"
        f" no connection because the client's machine had none left to give: {why}"
    )
    return [ValidityCheck("client limits", False, detail, is_gate=True)]


def stimulus(run: Run) -> ValidityCheck:
    """Every released row left at its planned instant, or at its parents' end plus think time."""
    rows, schedule = run.request_rows, run.schedule_rows
    released = np.isfinite(rows["released_s"])
    roots = schedule["n_parents"] == 0
    off_s = np.abs(rows["released_s"] - _planned_s(run))
    n_moved = int(np.count_nonzero(released & ~(off_s <= STIMULUS_TOLERANCE_S)))
    ended = run.manifest.ended == "completed"
    unsent = roots & (rows["status"] == Status.not_released)
    n_unsent = int(np.count_nonzero(unsent)) if ended else 0
    n = int(np.count_nonzero(released))
    n_dry = _n_dry(run) if ended else 0
    if n_dry:
        detail = (
            f"{format_count(n_dry)} users of the closed loop had sent all that was planned for them"
            " before the window ended: the server answers (or fails) faster than 20 ms and 1000"
            " tokens/s; ask for longer answers or a think time"
        )
        return ValidityCheck("stimulus", False, detail, is_gate=True)
    if n_moved or n_unsent:
        detail = (
            f"{format_count(n_moved)} of {format_count(n)} released requests left the schedule's "
            "instants"
            f" and {format_count(n_unsent)} planned ones were never released"
        )
        return ValidityCheck("stimulus", False, detail, is_gate=True)
    detail = f"all {format_count(n)} released requests followed this run's own schedule"
    return ValidityCheck("stimulus", True if n else None, detail, is_gate=True)


def _n_dry(run: Run) -> int:
    """Users of a closed loop whose last planned request was released: they had more time than
    requests."""
    schedule, rows = run.schedule_rows, run.request_rows
    if not schedule["after_failure"].any():
        return 0
    in_loop = np.unique(schedule["session_id"][schedule["after_failure"]])
    reversed_sessions = schedule["session_id"][::-1]
    _, last_from_end = np.unique(reversed_sessions, return_index=True)
    last = len(schedule) - 1 - last_from_end  # of each session, sessions ascending
    last = last[np.isin(schedule["session_id"][last], in_loop)]
    return int(np.count_nonzero(rows["status"][last] != Status.not_released))


def _planned_s(run: Run) -> NDArray[np.float64]:
    """`scheduled_s`, or for rows with parents the latest `done_s` among them plus `think_s`."""
    rows, schedule, edges = run.request_rows, run.schedule_rows, run.edge_rows
    planned_s: NDArray[np.float64] = schedule["scheduled_s"].copy()
    if len(edges):
        ids = rows["request_id"]
        child = np.searchsorted(ids, edges["request_id"])
        parent = np.searchsorted(ids, edges["after"])
        latest_s = np.full(len(rows), -np.inf)
        with np.errstate(invalid="ignore"):  # NaN (never sent) wins, and is dealt with below
            np.maximum.at(latest_s, child, rows["done_s"][parent])
        has_parents = np.isfinite(latest_s)
        planned_s[has_parents] = latest_s[has_parents] + schedule["think_s"][has_parents]
        # after a parent that was never sent there is no instant to hold the release against
        unknown = schedule["after_failure"] & ~np.isfinite(latest_s)
        planned_s[unknown] = rows["released_s"][unknown]
    return planned_s
