"""Result of a finished run as a capacity probe: requests (or trees of agents) that met the SLO, and
whether it counts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import (
    MeasuredWindow,
    due_rows,
    measured_window,
    meets_own,
    slos_by_class,
)
from loadgen.measure.counted_prompts import why_other_prompts
from loadgen.measure.per_request import Mask, PerRequest, per_request
from loadgen.measure.slo import parse_slo
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.trees import tree_limits, tree_outcomes, trees_of
from loadgen.records import Run, Schedule, Status
from loadgen.run.execute import FinishedRun
from loadgen.studies.capacity.curve import has_grown
from loadgen.studies.capacity.next_probe import NextProbe
from loadgen.studies.capacity.probe import (
    LEAST_BOUNDED,
    N_BLOCKS,
    Array,
    Grade,
    Probe,
    Sent,
    in_blocks,
    overloaded,
)
from loadgen.studies.capacity.result import Counted
from loadgen.workload.scaling import Over

LEAST_SEEN = 4
"""Misses per block assumed for a probe that was stopped in its warm-up."""
NO_LOAD_HELPS = ("stopped_answering", "sick_replica", "payment", "too_long")
"""Causes that end a search: no load is without them."""
_FILLED = 2.0  # times the seconds of an answer, after which answers end as they begin
_MOST_FAILED = 0.05  # of the requests that ended
_MOST_RUN_DELAY = 0.2  # of a probe, that the load generator may wait for a core
_STRAY = 0.01  # share of due requests without a connection that counts as ordinary misses


def probe_of(
    finished: FinishedRun,
    planned: NextProbe,
    grade: Grade,
    spent_s: float,
    target: float,
    name: str,
    over: Over = "rate",
    counted: Counted = "requests",
) -> Probe:
    """The probe of a finished run. A run that its own `stop_when` ended is saturated. A run with an
    invalid measurement is untrusted; a run without a server, or with other prompts than were sent,
    broken; a run behind a rate limit limited; none of them is used. The cause of misses counts only
    where the target is missed.

    Over agents the rate at which requests end shows no throughput: it is in another unit than the
    load.
    """
    run, summary = finished.run, finished.summary
    window, columns, due = measured_window(run), per_request(run), due_rows(run)
    shared = [parse_slo(text) for text in run.manifest.slo]
    met_all = meets_own(run, columns, shared, slos_by_class(run))
    if counted == "trees":
        assert summary.agents is not None, "trees are counted of agents only"
        found = _trees(run, columns, due, met_all, window, summary.agents.attainment)
    else:
        share = Interval(math.nan, summary.attainment.low, summary.attainment.high)
        found = _requests(run, due, met_all, share)
    n_due, n_met = in_blocks(found.at_s, found.met, window.start_s, window.end_s)
    why, is_stopped = run.manifest.end_reason, run.manifest.ended == "stopped"
    if is_stopped and grade == "measured":
        grade = "saturated"
    cause = summary.cause if sum(n_met) < target * sum(n_due) or not sum(n_due) else None
    if cause is not None and cause.kind == "rate_limit":
        grade, why = "limited", cause.sentence
    elif cause is not None and cause.kind in NO_LOAD_HELPS:
        grade, why = "broken", cause.sentence
    elif gone := why_gone(run, due):
        grade, why = "broken", gone
    elif (waited := _run_delay(run)) > _MOST_RUN_DELAY:
        grade = "untrusted"
        why = (
            f"the load generator waited {100 * waited:.0f} % of the probe for a CPU core (limit "
            f"{100 * _MOST_RUN_DELAY:.0f} %): other programs used the machine"
        )
    elif not summary.validity.trusted:
        failed = [c for c in summary.validity.checks if c.is_gate and c.ok is False]
        grade, why = "untrusted", "; ".join(f"{c.name}: {c.detail}" for c in failed)
    elif other := why_other_prompts(run, due):
        grade, why = "broken", other.rstrip(".")
    elif is_stopped and not sum(n_due):  # ended in its warm-up
        n_due, n_met = (LEAST_SEEN,) * N_BLOCKS, (0,) * N_BLOCKS
    probe = Probe(
        level=planned.level,
        due=n_due,
        met=n_met,
        warmup_s=planned.warmup_s,
        measured_s=max(window.length_s, 1e-3),
        spent_s=spent_s,
        grade=grade,
        name=name,
        why=why,
        served_per_s=None if over == "agents" else served_per_s(run, window),
        low=found.bounds.low if sum(n_due) >= LEAST_BOUNDED else None,
        high=found.bounds.high if sum(n_due) >= LEAST_BOUNDED else None,
        sent=sent_of(run, met_all, window.end_s),
        cause="" if cause is None else cause.kind,
        passed_per_s=None if cause is None else cause.passed_per_s,
    )
    grows = any(check.name == "load" and check.ok is False for check in summary.validity.checks)
    if grade in ("measured", "saturated") and grows and probe.n_due:
        return replace(overloaded(probe, target), why=why or "its queue grew until the end")
    return probe


class _Found(NamedTuple):
    """The counted requests or trees: when each was released, whether it met its SLOs, and the
    bounds of the share that did."""

    at_s: Array
    met: Mask
    bounds: Interval


def _requests(run: Run, due: Mask, met: Mask, bounds: Interval) -> _Found:
    released_s = run.request_rows["released_s"]
    at_s = np.where(np.isfinite(released_s), released_s, run.schedule_rows["scheduled_s"])
    counted = due & np.isfinite(at_s)
    return _Found(at_s[counted], met[counted], bounds)


def _trees(
    run: Run,
    columns: PerRequest,
    due: Mask,
    met: Mask,
    window: MeasuredWindow,
    bounds: Interval,
) -> _Found:
    """The trees that began in the window and met or missed their SLOs; those that had missed
    nothing and not ended when the run did are left out."""
    trees = trees_of(run)
    assert trees is not None, "a run of agents"
    outcomes = tree_outcomes(trees, run, due, due & met, window, tree_limits(run), columns.close_s)
    counted = outcomes.met | outcomes.missed
    planned_s = run.schedule_rows["scheduled_s"][trees.first]
    begun_s = trees.begun_s(run)
    at_s = np.where(np.isfinite(begun_s), begun_s, planned_s)
    at_s = np.where(np.isfinite(at_s), at_s, window.end_s)
    return _Found(at_s[counted], outcomes.met[counted], bounds)


def _run_delay(run: Run) -> float:
    """The largest share of the run that a worker waited for a CPU core; 0 where it is unknown."""
    return max((shard.run_delay_share or 0.0 for shard in run.instrument.shards), default=0.0)


def sent_of(run: Run, met: Mask, end_s: float) -> Sent | None:
    """The requests scheduled before `end_s`, with the warm-up; None where a request waits for
    another, or is cancelled on purpose."""
    schedule = run.schedule_rows
    if schedule["n_parents"].any() or schedule["cancel_after_s"].any():
        return None
    rows = np.flatnonzero(schedule["scheduled_s"] < end_s)
    rows = rows[np.argsort(schedule["scheduled_s"][rows], kind="stable")]
    sent = schedule[rows]
    columns = (
        np.rint(sent["scheduled_s"] * 1e6).astype(np.int64),
        sent["input_tokens"],
        new_tokens(sent),
        sent["output_tokens"],
        sent["class_id"],
        (~met[rows]).astype(np.int64),
    )
    return Sent(*(tuple(column.tolist()) for column in columns))


def new_tokens(schedule: Schedule) -> NDArray[np.int64]:
    """Input tokens of each request without its shared prefix."""
    tokens = schedule["input_tokens"].astype(np.int64)
    shared = np.where(schedule["prefix_id"] > 0, schedule["prefix_tokens"].astype(np.int64), 0)
    return np.maximum(tokens - shared, 0)


def served_per_s(run: Run, window: MeasuredWindow) -> float | None:
    """Successful requests that ended per second, from the window's start until the server ran out
    of waiting requests (`_busy_until`). None where requests failed.

    Answers begin and do not end yet in the first seconds of a run, so the time before twice the
    seconds of nearly every answer is left out. None where less than half a window would remain.
    """
    rows = run.request_rows
    done_s, is_ok, end_s = rows["done_s"], rows["status"] == Status.ok, _busy_until(run, window)
    ended = (done_s >= window.start_s) & (done_s < end_s)
    n_ended, n_ok = int(np.count_nonzero(ended)), int(np.count_nonzero(ended & is_ok))
    if not n_ok or n_ok < (1 - _MOST_FAILED) * n_ended or window.length_s <= 0:
        return None
    answers_s = (done_s - rows["first_token_s"])[ended & is_ok]
    start_s = max(window.start_s, _FILLED * float(np.quantile(answers_s, 0.9)))
    if not end_s - start_s >= window.length_s / 2:
        return None
    return int(np.count_nonzero(ended & is_ok & (done_s >= start_s))) / (end_s - start_s)


def _busy_until(run: Run, window: MeasuredWindow) -> float:
    """The time until which the server surely had requests waiting. Where the queue grew in the
    window, this is the time in the drain at which half of the requests in flight at the window's
    end had ended, or the last of them; else the end of the window."""
    rows = run.request_rows
    done_s, is_ok = rows["done_s"], rows["status"] == Status.ok
    n_ended = int(np.count_nonzero((done_s >= window.start_s) & (done_s < window.end_s)))
    n_due = int(np.count_nonzero(due_rows(run)))
    in_flight = (rows["sent_s"] < window.end_s) & ~(done_s < window.end_s)
    later_s = np.sort(done_s[in_flight & is_ok])
    if not len(later_s) or not has_grown(n_due, n_ended):
        return window.end_s
    half = math.ceil(np.count_nonzero(in_flight) / 2)
    return float(later_s[min(half, len(later_s)) - 1])


def why_gone(run: Run, due: Mask) -> str:
    """Why the server was gone during the run: it ended, could not be reached, or refused every
    request; "" if it was up.

    An overloaded server answers late or with an error; a failed connection (refused, no route, no
    name, a proxy that blocks) means that the server is gone. The limit is 1 % of the due requests,
    or a single failure if it is the last request sent. Connections that the load generator could
    not open are not counted: the validity gate "client limits" covers them.
    """
    if run.manifest.end_kind == "refused":
        return run.manifest.end_reason
    if run.manifest.server_ended_s is not None:
        return run.manifest.end_reason or "the server ended"
    rows = run.request_rows[due]
    tried = rows[np.isfinite(rows["sent_s"])]
    is_ours = np.isin(tried["error_id"], run.names.client_limits)
    is_away = (tried["status"] == Status.connect_error) & ~is_ours
    refused = tried[is_away]
    if not len(refused):
        return ""
    is_last = bool(refused["sent_s"].max() >= tried["sent_s"].max())
    if len(refused) <= _STRAY * len(rows) and not is_last:
        return ""
    first = refused[np.argmin(refused["sent_s"])]
    return (
        f"{len(refused)} of {len(rows)} requests got no connection, the first "
        f"{first['sent_s']:.3g} s into the run: {run.names.errors[first['error_id']]}"
    )
