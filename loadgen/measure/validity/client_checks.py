"""Checks of the load generator (lateness, event loop, CPU, connections) and of its machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import ClientReport, SelfReport
from loadgen.measure.per_request import Mask, PerRequest, Seconds
from loadgen.measure.slo import Slo, lateness_limit_s
from loadgen.measure.stalls import Stalls, changed
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.summary import ValidityCheck, gate, timing
from loadgen.measure.validity.causes import (
    IDLE_SHARE,
    STOLEN_SHARE,
    cause_of,
    core_sharing,
    sharing_limit,
    slow_processor_cause,
    steal_cause,
    stolen_share,
)
from loadgen.measure.validity.error_bound import LEAST_WAITING
from loadgen.measure.wording import format_count, format_share, format_value
from loadgen.records import Run

BEHIND_SHARE = 0.05  # of the due requests, and of the window
ENCODED_LATE_SHARE = 0.01
NOT_RECORDED = "not recorded on this platform"


def lateness(
    run: Run,
    columns: PerRequest,
    due: Mask,
    slos: Sequence[Slo],
    limits: InstrumentLimits,
) -> ValidityCheck:
    limit_s = lateness_limit_s(slos) if limits.lateness_s is None else limits.lateness_s
    late_s = columns.lateness_s[due & ~held_by_cap(run)]
    late_s = np.sort(late_s[~np.isnan(late_s)])
    if not len(late_s):
        return timing("lateness", None, "no request had a scheduled send time")
    p50, p99 = (float(late_s[nearest_rank(len(late_s), q) - 1]) for q in (0.5, 0.99))
    detail = (
        f"requests were sent after their scheduled time by p50 {format_value(p50, 's')}, "
        f"p99 {format_value(p99, 's')}, max {format_value(float(late_s[-1]), 's')}; "
        f"limit p99 {format_value(limit_s, 's')}"
    )
    if p99 > limit_s:
        detail = _held_up(detail, cause_of(run.instrument, limits).text)
    return timing("lateness", p99 <= limit_s, detail)


def on_schedule(run: Run, lateness_s: Seconds, due: Mask, window_s: float) -> ValidityCheck:
    """Whether the offered load was the scheduled load: a load generator that falls further and
    further behind sends less traffic than scheduled. `lateness_s` is NaN for rows that it held back
    on purpose."""
    limits = run.manifest.instrument_limits
    late_s = np.sort(lateness_s[due & ~np.isnan(lateness_s)])
    if not len(late_s) or window_s <= 0:
        return gate("offered load", None, "no request had a scheduled send time")
    limit_s = max(BEHIND_SHARE * window_s, limits.lateness_s or 0.0)
    behind_s = float(late_s[nearest_rank(len(late_s), 1 - BEHIND_SHARE) - 1])
    n_behind = int(np.count_nonzero(late_s > limit_s))
    source = "5 % of the measured window"
    if limit_s > BEHIND_SHARE * window_s:
        source = "instrument.lateness"
    detail = (
        f"{format_count(n_behind)} of {format_count(len(late_s))} due requests were sent more than "
        f"{format_value(limit_s, 's')} late ({source})"
    )
    if behind_s > limit_s:
        cause = cause_of(run.instrument, limits)
        detail = _held_up(f"{detail}, so the server got less load than planned", cause.text)
        return gate("offered load", False, detail, cause.remedy)
    return gate("offered load", True, detail)


def held_by_cap(run: Run) -> Mask:
    """Rows released while `limits.max_concurrency` was used up and `when_full: wait` held them.

    The scenario requests that wait, so it is latency of the request, not lateness of the client. Of
    n shards each holds cap // n of the cap, and the first cap % n shards hold 1 more.
    """
    rows = run.request_rows
    limits = run.manifest.scenario.limits
    cap = limits.max_concurrency
    if limits.when_full != "wait" or not cap:
        return np.zeros(len(rows), bool)
    held = np.zeros(len(rows), bool)
    n_shards = int(rows["shard"].max(initial=0)) + 1
    for shard in range(n_shards):
        mine = np.isfinite(rows["sent_s"]) & (rows["shard"] == shard)
        at_s = rows["released_s"][mine]
        done_s = np.sort(rows["done_s"][mine])  # NaN sorts last: never done
        ahead = np.searchsorted(np.sort(at_s), at_s) - np.searchsorted(done_s, at_s, side="right")
        held[mine] = ahead >= cap // n_shards + (shard < cap % n_shards)
    return held


def loop_lag(client: ClientReport, limits: InstrumentLimits) -> ValidityCheck:
    shards, limit_s = client.shards, limits.loop_lag_s
    readings = [(shard.loop_lag_s, shard) for shard in shards if shard.loop_lag_s.n]
    if not readings:
        return timing("event loop", None, "the load generator did not record its event loop's lag")
    lag, shard = max(readings, key=lambda reading: reading[0].p99)
    pause_s = max(report.gc.pause_max_s for _, report in readings)
    detail = (
        f"the event loop ran late by p99 {format_value(lag.p99, 's')}, "
        f"max {format_value(lag.max, 's')}{_of_shard(shard, shards)}; "
        f"limit p99 {format_value(limit_s, 's')}; "
        f"longest garbage collection {format_value(pause_s, 's')}"
    )
    ok = lag.p99 <= limit_s
    if not ok:
        detail = _held_up(detail, f"timestamps may be late; {cause_of(client, limits).text}")
    return timing("event loop", ok, detail)


def read_backlog(client: ClientReport, limits: InstrumentLimits) -> ValidityCheck:
    shards, limit_s = client.shards, limits.read_backlog_s
    readings = [(shard.backlog, shard) for shard in shards if shard.backlog is not None]
    if not readings:
        detail = "the load generator did not sample its sockets (the fast transport does)"
        return timing("read backlog", None, detail)
    backlog, shard = max(readings, key=lambda reading: reading[0].wait_mean_s)
    detail = (
        f"received bytes waited {format_value(backlog.wait_mean_s, 's')} on average before they "
        f"were read, estimated from {format_count(backlog.looks)} samples of which "
        f"{format_count(backlog.waiting)} found waiting bytes{_of_shard(shard, shards)}; "
        f"limit {format_value(limit_s, 's')}"
    )
    ok = backlog.wait_mean_s <= limit_s or backlog.waiting < LEAST_WAITING
    if not ok:
        detail = _held_up(detail, cause_of(client, limits).text)
    return timing("read backlog", ok, detail)


def share_of_time(
    name: str,
    meaning: str,
    cause: str,
    shards: Sequence[SelfReport],
    read: Callable[[SelfReport], float | None],
    limit: float,
) -> ValidityCheck:
    readings = [(value, shard) for shard in shards if (value := read(shard)) is not None]
    if not readings:
        return timing(name, None, NOT_RECORDED)
    value, shard = max(readings, key=lambda reading: reading[0])
    share = f"{format_share(value)} {meaning}"
    detail = f"{share}{_of_shard(shard, shards)}; limit {format_share(limit)}"
    return timing(name, value <= limit, detail if value <= limit else _held_up(detail, cause))


def shared_cores(client: ClientReport, limits: InstrumentLimits) -> ValidityCheck:
    """Whether other programs keep the cores that the client is confined to from ever being idle.

    The client then runs only when the scheduler lets it, which run delay need not show. A client
    that may use every core of the machine passes, since the scheduler can move it, and so does a
    client next to programs that the run started itself.
    """
    name, limit = "shared cores", sharing_limit(limits)
    sharing = core_sharing(client)
    if sharing is None:
        return timing(name, None, NOT_RECORDED)
    cores = "core" if sharing.n == 1 else f"{format_count(sharing.n)} cores"
    detail = (
        f"other programs took {format_share(sharing.others)} of the time of the load generator's "
        f"{cores}, {format_share(sharing.idle)} was idle; limit {format_share(limit)} where less "
        f"than {format_share(IDLE_SHARE)} is idle"
    )
    if sharing.is_movable:
        return timing(name, True, f"{detail}, on cores that it is confined to")
    ok = not sharing.is_shared(limit)
    if not ok:
        detail = _held_up(detail, f"another program kept its {cores} busy all the time")
    return timing(name, ok, detail)


def client_stalls(stalls: Stalls | None, n_due: int) -> ValidityCheck:
    """The effect of stalls on the percentiles; the instrument error includes each stall.

    Fails only if leaving out the requests in stalls lowers a p99 (`changed`). Unknown if every
    request was in a stall.
    """
    if stalls is None:
        return ValidityCheck("stalls", None, "the load generator did not record its own stalls")
    if not stalls.n:
        return ValidityCheck("stalls", True, "the load generator never stalled")
    times = "once" if stalls.n == 1 else f"{format_count(stalls.n)} times"
    detail = (
        f"the load generator stalled {times}, {format_value(stalls.total_s, 's')} in total, "
        f"{format_value(stalls.longest_s, 's')} at most; during stalls {format_count(stalls.rows)} "
        f"of {format_count(n_due)} requests were sent or got their first or last token"
    )
    if stalls.rows == n_due:
        return ValidityCheck("stalls", None, detail)
    figures = [
        f"p99 {name} {format_value(without_s, 's')} instead of {format_value(all_s, 's')}"
        for name, all_s, without_s in changed(stalls)
    ]
    if figures:
        detail += f"; without them {', '.join(figures)}"
    return ValidityCheck("stalls", not figures, detail)


def connections(shards: Sequence[SelfReport]) -> ValidityCheck:
    if not shards:
        return ValidityCheck("connections", None, "connections were not counted")
    opened = sum(shard.connections.opened for shard in shards)
    reused = sum(shard.connections.reused for shard in shards)
    refused = sum(shard.connections.not_opened_ahead for shard in shards)
    detail = f"{format_count(opened)} opened, reused {format_count(reused)} times"
    if refused:
        detail += (
            f"; the server refused {format_count(refused)} connections that were to be opened "
            "before the first request, so some requests waited for a connection of their own"
        )
    return ValidityCheck("connections", not refused, detail)


def encoding(run: Run, shards: Sequence[SelfReport]) -> ValidityCheck:
    """Requests whose bytes were not ready when they were due; encoding them late delays others."""
    n_sent = int(np.count_nonzero(np.isfinite(run.request_rows["sent_s"])))
    if not shards or not n_sent:
        return ValidityCheck("encoding", None, "requests encoded when due were not counted")
    n_late = sum(shard.encoded_late for shard in shards)
    detail = (
        f"{format_count(n_late)} of {format_count(n_sent)} requests were not encoded in advance, "
        "only when they were due"
    )
    return ValidityCheck("encoding", n_late <= ENCODED_LATE_SHARE * n_sent, detail)


def steal(shards: Sequence[SelfReport]) -> ValidityCheck:
    """Not a gate: lateness and the event loop's lag show the effect, and name this cause."""
    if all(shard.stolen_share is None for shard in shards):
        return ValidityCheck("steal", None, NOT_RECORDED)
    share = stolen_share(shards)
    limit = f"limit {format_share(STOLEN_SHARE)}"
    if share > STOLEN_SHARE:
        return ValidityCheck("steal", False, f"{steal_cause(shards)}; {limit}")
    detail = f"the host took {format_share(share)} of this machine's time; {limit}"
    return ValidityCheck("steal", True, detail)


def processor_speed(shards: Sequence[SelfReport]) -> ValidityCheck:
    """Not a gate: lateness and the event loop's lag show the effect, and name this cause."""
    recorded = [shard.processor for shard in shards if shard.processor is not None]
    if not recorded:
        return ValidityCheck("processor speed", None, "the processor's speed was not recorded")
    if cause := slow_processor_cause(shards):
        return ValidityCheck("processor speed", False, cause)
    slow_s = max(processor.slow_s for processor in recorded)
    if not slow_s:
        return ValidityCheck("processor speed", True, "never below a third of its usual speed")
    detail = (
        f"below a third of its usual speed for {format_value(slow_s, 's')}, which did not cause "
        "the load generator's stalls"
    )
    return ValidityCheck("processor speed", True, detail)


def _of_shard(shard: SelfReport, shards: Sequence[SelfReport]) -> str:
    return f" (worker {shard.shard}, the worst of {len(shards)})" if len(shards) > 1 else ""


def _held_up(detail: str, cause: str) -> str:
    return f"the load generator was held up: {detail}; {cause}"
