"""The measured window, the requests that count in it, and the requests that met their SLOs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from loadgen.errors import RunInvalid, UsageError
from loadgen.measure.catalog import PASSES_UNDEFINED
from loadgen.measure.per_request import Mask, PerRequest, per_request
from loadgen.measure.slo import Slo, own_slo, parse_slo
from loadgen.measure.stalls import stalled_rows
from loadgen.measure.statistics.dependence import autocorrelation_time
from loadgen.measure.statistics.time_series import mser5
from loadgen.measure.statistics.trend import has_trend
from loadgen.records import Phase, Run, Status, empty_requests
from loadgen.units import parse_duration_s

WARMUP_ERRORS = 4.0
LEAST_STEADY = 50  # successful requests that show a steady state
_APART_S = 1e-6  # of the end of a counted window from the releases before and after it


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The measured window [start_s, end_s), seconds since the run epoch."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def measured_window(run: Run) -> MeasuredWindow:
    """From the end of warm-up for `measure_s`, or until the run stopped releasing, whichever came
    first; without the start of a closed loop (`closed_loop`)."""
    window = run.manifest.window
    start_s = window.warmup_s
    end_s, ended_s = start_s + window.measure_s, window.ended_s
    if window.started_s is not None:
        start_s = max(start_s, window.started_s)
    return MeasuredWindow(start_s, end_s if ended_s is None else max(start_s, min(end_s, ended_s)))


def with_counted_window(run: Run) -> Run:
    """The run whose measured window holds the releases of `window.requests` requests; unchanged
    without that number, and if fewer were released.

    It ends where the next request was released or would have been: the time of n requests has n
    gaps. A window that ended with the last release would lack a gap, with u users u of them, so
    that each rate would be n/(n − u) too high.
    """
    window = run.manifest.window
    if window.requests is None:
        return run
    released_s = np.sort(run.request_rows["released_s"])  # NaN at the end
    counted_s = released_s[np.searchsorted(released_s, window.warmup_s) :]
    if np.count_nonzero(np.isfinite(counted_s)) < window.requests:
        return run
    last_s = float(counted_s[window.requests - 1])
    next_s = _next_release_s(run, last_s)
    end_s = max(last_s + _APART_S, last_s if next_s is None else next_s - _APART_S)
    changed = structs.replace(window, measure_s=end_s - window.warmup_s)
    return replace(run, manifest=structs.replace(run.manifest, window=changed))


def _next_release_s(run: Run, after_s: float) -> float | None:
    """The first time later than `after_s` at which a row was released, or not earlier than it at
    which a row would have been released in a longer window; None if there is none."""
    schedule, rows = run.schedule_rows, run.request_rows
    released_s = rows["released_s"]
    index = {int(number): row for row, number in enumerate(schedule["request_id"].tolist())}
    parents = np.array([index[n] for n in run.edge_rows["after"].tolist()], np.intp)
    children = np.array([index[n] for n in run.edge_rows["request_id"].tolist()], np.intp)
    is_ended = np.isfinite(released_s[parents]) & (
        (rows["status"][parents] == Status.ok) | schedule["after_failure"][children]
    )
    ready_s = np.where(schedule["n_parents"] > 0, -np.inf, schedule["scheduled_s"])
    parents_s = rows["done_s"][parents] + run.edge_rows["delay_s"]
    np.maximum.at(ready_s, children, np.where(is_ended, parents_s, np.inf))
    ready_s = np.where(schedule["n_parents"] > 0, ready_s + schedule["think_s"], ready_s)
    is_unreleased = np.isnan(released_s) & np.isfinite(ready_s) & (ready_s >= after_s)
    later_s = np.r_[released_s[released_s > after_s], ready_s[is_unreleased]]
    return float(later_s.min()) if len(later_s) else None


def warmup_rows(run: Run) -> Mask:
    """Rows of the warm-up: by their schedule, or, for rows that waited for parents, by their
    release."""
    schedule = run.schedule_rows
    planned: Mask = schedule["phase"] == Phase.warmup
    moved = schedule["n_parents"] > 0
    if not moved.any():
        return planned
    released_s = run.request_rows["released_s"]
    moved &= np.isfinite(released_s)
    warmup: Mask = np.where(moved, released_s < run.manifest.window.warmup_s, planned)
    return warmup


def start_rows(run: Run) -> Mask:
    """Rows after the warm-up that belong to the start of a closed loop, which the measured window
    leaves out; those of other classes in that time as well."""
    started_s = run.manifest.window.started_s
    if started_s is None:
        return np.zeros(len(run.schedule_rows), bool)
    released_s = run.request_rows["released_s"]
    at_s = np.where(np.isnan(released_s), run.schedule_rows["scheduled_s"], released_s)
    start: Mask = (at_s < started_s) & ~warmup_rows(run)
    return start


def due_rows(run: Run) -> Mask:
    """Rows that had to be served in the measured window.

    Not due: warm-up and the start of a closed loop; a row whose parents failed or did not finish,
    so that it was never released; a row planned after an interrupted run had stopped releasing; a
    row that another worker released after the last of `window.requests`; a withdrawn row.
    """
    return came_due(run) & ~_is_drawn(run)


def withdrawn_rows(run: Run) -> Mask:
    """Rows of the measured window that were to be cancelled (`requests.cancel`), however they
    ended: counting those that ended before their cancel would count only the quick requests."""
    drawn = _is_drawn(run)
    return drawn & came_due(run) if drawn.any() else drawn


def came_due(run: Run) -> Mask:
    """`due_rows` and `withdrawn_rows` together."""
    schedule, status = run.schedule_rows, run.request_rows["status"]
    unreleased = status == Status.not_released
    came: Mask = ~(warmup_rows(run) | start_rows(run))
    if run.manifest.window.requests is not None:
        came &= ~(run.request_rows["released_s"] >= measured_window(run).end_s)
    if unreleased.any():
        waited = schedule["n_parents"] > 0
        after_end = schedule["scheduled_s"] >= measured_window(run).end_s
        came &= ~(unreleased & (waited | after_end))
    return came


def unfinished_rows(run: Run) -> Mask:
    """Due rows that the end of the drain cancelled. They are misses, but not failures."""
    unfinished: Mask = due_rows(run) & (run.request_rows["status"] == Status.cancelled)
    return unfinished


def failed_rows(run: Run) -> Mask:
    """Due rows that ended without success, those that were dropped or never sent included; not
    those that had no time to finish (`unfinished_rows`)."""
    status = run.request_rows["status"]
    failed: Mask = due_rows(run) & (status != Status.ok) & (status != Status.cancelled)
    return failed


def errors(run: Run) -> tuple[Mask, Mask]:
    """The rows of `error_rate`: those that failed, of those that count. A failure in the start of a
    closed loop counts, although the start is no part of any other figure."""
    status, start = run.request_rows["status"], start_rows(run) & ~_is_drawn(run)
    broken = (status != Status.ok) & (status != Status.cancelled)
    return failed_rows(run) | (start & broken), due_rows(run) | start


def _is_drawn(run: Run) -> Mask:
    drawn: Mask = run.schedule_rows["cancel_after_s"] > 0
    return drawn


def slos_met(columns: PerRequest, slo: Slo) -> Mask:
    """Rows that met a per-request SLO, by its limit or by a limit that the request brought
    itself.

    Only a successful answer with a token meets any. An undefined metric is a miss, except for
    metrics that an answer may be too short to have (`PASSES_UNDEFINED`).
    """
    values, limit = columns.column(slo.metric), request_limits(columns, slo)
    within = values <= limit if slo.operator == "<=" else values >= limit
    if slo.metric in PASSES_UNDEFINED:
        within |= np.isnan(values)
    met: Mask = within & columns.is_ok & columns.has_token
    return met


def request_limits(columns: PerRequest, slo: Slo) -> float | NDArray[np.float64]:
    """The limit of a per-request SLO for each row: the request's own, else the common limit."""
    own_s = columns.own_slo_s.get(slo.metric)
    return slo.limit if own_s is None else np.where(own_s > 0, own_s, slo.limit)


def meets(columns: PerRequest, slos: Sequence[Slo]) -> Mask:
    """Rows that met every per-request SLO in `slos` and the limits that they brought themselves;
    without any, the successful rows."""
    met = columns.is_ok & columns.has_token
    for slo in (*slos, *map(own_slo, columns.own_slo_s)):
        if slo.scope == "request":
            met = met & slos_met(columns, slo)
    return met


def recorded_slos(texts: Sequence[str]) -> list[Slo]:
    """The SLOs of a manifest. Raises RunInvalid for a text that is none."""
    try:
        return [parse_slo(text) for text in texts]
    except ValueError as error:
        raise RunInvalid(f"manifest.json: slo: {error}") from None


def slos_by_class(run: Run) -> dict[str, list[Slo]]:
    """The SLOs of each class alone; empty for a run with a single class that has no SLOs of its
    own."""
    own = {name: recorded_slos(run.manifest.class_slos(name)) for name in run.names.classes}
    return own if len(own) > 1 or any(own.values()) else {}


def meets_own(
    run: Run, columns: PerRequest, slos: Sequence[Slo], by_class: Mapping[str, Sequence[Slo]]
) -> Mask:
    """Rows that met every per-request SLO of all traffic and of their class."""
    met = meets(columns, slos)
    for number, name in enumerate(run.names.classes):
        elsewhere = run.schedule_rows["class_id"] != number
        met = met & (elsewhere | meets(columns, by_class.get(name, ())))
    return met


def limited_rows(
    run: Run, columns: PerRequest, slos: Sequence[Slo], by_class: Mapping[str, Sequence[Slo]]
) -> Mask:
    """Rows with a per-request limit: of all traffic, of their class, or of their own."""
    limited: Mask = np.full(len(run.schedule_rows), _has_limit(slos))
    for number, name in enumerate(run.names.classes):
        if _has_limit(by_class.get(name, ())):
            limited |= run.schedule_rows["class_id"] == number
    for own_s in columns.own_slo_s.values():
        limited |= own_s > 0
    return limited


def _has_limit(slos: Sequence[Slo]) -> bool:
    return any(slo.scope == "request" for slo in slos)


def derived(run: Run) -> dict[str, NDArray[np.generic]]:
    """The computed columns of requests.parquet: `ttft_s tpot_s e2e_s`, `slo_met` by the run's own
    SLOs, and `client_stalled` where any of their times fell into a stall of the load generator."""
    columns = per_request(run)
    slos = recorded_slos(run.manifest.slo)
    return {
        "ttft_s": columns.ttft_s,
        "tpot_s": columns.tpot_s,
        "e2e_s": columns.e2e_s,
        "slo_met": meets_own(run, columns, slos, slos_by_class(run)),
        "client_stalled": stalled_rows(run),
    }


def with_window(run: Run, text: str) -> Run:
    """The run measured over `30s:90s` (from its start), over `steady`: from where TTFT has settled
    (MSER-5), or over `all`, the start of a closed loop included. Requests scheduled after the
    window are left out; those of agents count as not released, because their tree went on.

    Raises UsageError for a window that is malformed, empty or not found.
    """
    if text == "all":
        bare = structs.replace(run.manifest.window, started_s=None)
        return replace(run, manifest=structs.replace(run.manifest, window=bare))
    start_s, end_s = _steady(run) if text == "steady" else _ends(text)
    window = measured_window(run)
    if not start_s < end_s or start_s >= window.end_s:
        raise UsageError(f"--window {text}: the window is empty; the run ends at {window.end_s:g}s")
    planned_s = run.schedule_rows["scheduled_s"]
    due_s = np.where(np.isnan(planned_s), run.request_rows["released_s"], planned_s)
    is_later = due_s >= end_s
    is_cut = is_later & (run.schedule_rows["chain"] > 0)
    kept, rows = ~is_later | is_cut, run.request_rows.copy()
    rows[is_cut] = empty_requests(run.schedule_rows[is_cut])
    schedule = run.schedule_rows[kept].copy()
    schedule["phase"] = np.where(due_s[kept] < start_s, Phase.warmup, Phase.measure)
    ids = schedule["request_id"]
    length_s = min(end_s, window.end_s) - start_s
    changed = structs.replace(
        run.manifest.window, warmup_s=start_s, measure_s=length_s, started_s=None
    )
    return replace(
        run,
        manifest=structs.replace(run.manifest, window=changed),
        schedule_rows=schedule,
        request_rows=rows[kept],
        chunk_rows=run.chunk_rows[np.isin(run.chunk_rows["request_id"], ids[~is_cut[kept]])],
        edge_rows=run.edge_rows[np.isin(run.edge_rows["request_id"], ids)],
    )


def _ends(text: str) -> tuple[float, float]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError("expected START:END, e.g. 30s:90s, steady or all")
        return parse_duration_s(first), parse_duration_s(last)
    except ValueError as error:
        raise UsageError(f"--window {text}: {error}") from None


def _steady(run: Run) -> tuple[float, float]:
    columns, window = per_request(run), measured_window(run)
    counted = due_rows(run) & columns.is_ok & np.isfinite(columns.ttft_s)
    order = np.argsort(run.request_rows["released_s"][counted], kind="stable")
    ttft_s = columns.ttft_s[counted][order]
    if len(ttft_s) < LEAST_STEADY:
        raise UsageError(
            f"--window steady: the run is too short, with {len(ttft_s)} successful requests; "
            f"{LEAST_STEADY} are needed"
        )
    cut = steady_from(ttft_s)
    if cut is None:
        raise UsageError("--window steady: TTFT does not settle in this run, it has a trend")
    return float(run.request_rows["released_s"][counted][order][cut]), window.end_s


def steady_from(ttft_s: NDArray[np.float64]) -> int | None:
    """The number of values, in order of release, before the steady state; None without any.

    It begins where MSER-5 cuts. A queue has calm and busy stretches of its own, and a cut that
    drops a busy stretch at the start leaves a calm run. So nothing is cut in the second half, and
    nothing whose mean differs from that of the rest by less than four standard errors, with the
    autocorrelation time of the rest. What remains must have no trend.
    """
    found = mser5(ttft_s)
    cut = found.cut if found.is_found else 0
    if cut:
        first, rest = ttft_s[:cut], ttft_s[cut:]
        variance = float(np.var(rest)) * autocorrelation_time(rest) * (1 / cut + 1 / len(rest))
        if abs(first.mean() - rest.mean()) <= WARMUP_ERRORS * math.sqrt(variance):
            cut = 0
    return None if has_trend(ttft_s[cut:]) else cut
