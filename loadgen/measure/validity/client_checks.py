"""Checks of the load generator (lateness, event loop, CPU, connections) and of its machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import SelfReport
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo import Slo, lateness_limit_s
from loadgen.measure.stalls import Stalls, changed
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.summary import ValidityCheck, gate
from loadgen.measure.wording import format_count, format_share, format_value
from loadgen.records import Run

LEAST_WAITING = 20  # connections that had bytes waiting, before their share means anything
OTHERS_SHARE = 0.10  # of the time of the client's cores
IDLE_SHARE = 0.05  # with this much idle time there is a core to wake up on
ENCODED_LATE_SHARE = 0.01
STOLEN_SHARE = 0.01
EXPLAINED_SHARE = 0.5  # of the client's stall time that the machine must explain to be the cause
NOT_RECORDED = "not recorded on this platform"


def lateness(
    run: Run,
    columns: PerRequest,
    due: Mask,
    slos: Sequence[Slo],
    limits: InstrumentLimits,
    shards: Sequence[SelfReport],
) -> ValidityCheck:
    limit_s = lateness_limit_s(slos) if limits.lateness_s is None else limits.lateness_s
    late_s = columns.lateness_s[due & ~held_by_cap(run)]
    late_s = np.sort(late_s[~np.isnan(late_s)])
    if not len(late_s):
        return gate("lateness", None, "no request had a scheduled send time")
    p50, p99 = (float(late_s[nearest_rank(len(late_s), q) - 1]) for q in (0.5, 0.99))
    detail = (
        f"requests were sent after their scheduled time by p50 {format_value(p50, 's')}, "
        f"p99 {format_value(p99, 's')}, max {format_value(float(late_s[-1]), 's')}; "
        f"limit p99 {format_value(limit_s, 's')}"
    )
    if p99 > limit_s:
        detail = _held_up(detail, machine_cause(shards) or "it fell behind its own schedule")
    return gate("lateness", p99 <= limit_s, detail)


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


def loop_lag(shards: Sequence[SelfReport], limit_s: float) -> ValidityCheck:
    readings = [(shard.loop_lag_s, shard) for shard in shards if shard.loop_lag_s.n]
    if not readings:
        return gate("event loop", None, "the load generator did not record its event loop's lag")
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
        cause = machine_cause(shards) or "something in its own process blocked the event loop"
        detail = _held_up(detail, f"timestamps may be late; {cause}")
    return gate("event loop", ok, detail)


def read_backlog(shards: Sequence[SelfReport], limit_s: float) -> ValidityCheck:
    readings = [(shard.backlog, shard) for shard in shards if shard.backlog is not None]
    if not readings:
        detail = "the load generator did not sample its sockets (the fast transport does)"
        return gate("read backlog", None, detail)
    backlog, shard = max(readings, key=lambda reading: reading[0].wait_mean_s)
    detail = (
        f"received bytes waited {format_value(backlog.wait_mean_s, 's')} on average before they "
        f"were read, estimated from {format_count(backlog.looks)} samples of which "
        f"{format_count(backlog.waiting)} found waiting bytes{_of_shard(shard, shards)}; "
        f"limit {format_value(limit_s, 's')}"
    )
    ok = backlog.wait_mean_s <= limit_s or backlog.waiting < LEAST_WAITING
    if not ok:
        detail = _held_up(detail, "it read more slowly than the server sent")
    return gate("read backlog", ok, detail)


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
        return gate(name, None, NOT_RECORDED)
    value, shard = max(readings, key=lambda reading: reading[0])
    share = f"{format_share(value)} {meaning}"
    detail = f"{share}{_of_shard(shard, shards)}; limit {format_share(limit)}"
    return gate(name, value <= limit, detail if value <= limit else _held_up(detail, cause))


def shared_cores(run: Run, shards: Sequence[SelfReport], limit: float) -> ValidityCheck:
    """Whether other programs keep the cores that the client is confined to from ever being idle.

    The client then runs only when the scheduler lets it, which run delay need not show. A client
    that may use every core of the machine passes, since the scheduler can move it, and so does a
    client next to programs that the run started itself.
    """
    name, limit = "shared cores", max(OTHERS_SHARE, limit)
    recorded = [s.cores for s in shards if s.cores is not None and s.cores.total_s > 0]
    if not recorded or len(recorded) < len(shards):
        return gate(name, None, NOT_RECORDED)
    ours_s = sum(cores.own_s for cores in recorded) + run.instrument.family_s
    worst = min(recorded, key=lambda cores: cores.idle_s / cores.total_s)
    n = len(worst.allowed)
    idle = worst.idle_s / worst.total_s
    others = max(0.0, worst.programs_s - ours_s) / worst.total_s
    cores = "core" if n == 1 else f"{format_count(n)} cores"
    detail = (
        f"other programs took {format_share(others)} of the time of the load generator's {cores}, "
        f"{format_share(idle)} was idle; limit {format_share(limit)} where less than "
        f"{format_share(IDLE_SHARE)} is idle"
    )
    if 1 < n == worst.online:
        return gate(name, True, f"{detail}, on cores that it is confined to")
    ok = idle >= IDLE_SHARE or others <= limit
    if not ok:
        detail = _held_up(detail, f"another program kept its {cores} busy all the time")
    return gate(name, ok, detail)


def client_stalls(stalls: Stalls | None, n_due: int) -> ValidityCheck:
    """Not a gate: the event loop check covers how often it stalled; this check shows the effect. It
    fails only if a percentile is another one without the requests in a stall; where all were in a
    stall, that is not known."""
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
    share = _stolen_share(shards)
    limit = f"limit {format_share(STOLEN_SHARE)}"
    if share > STOLEN_SHARE:
        return ValidityCheck("steal", False, f"{_steal_cause(shards)}; {limit}")
    detail = f"the host took {format_share(share)} of this machine's time; {limit}"
    return ValidityCheck("steal", True, detail)


def processor_speed(shards: Sequence[SelfReport]) -> ValidityCheck:
    """Not a gate: lateness and the event loop's lag show the effect, and name this cause."""
    recorded = [shard.processor for shard in shards if shard.processor is not None]
    if not recorded:
        return ValidityCheck("processor speed", None, "the processor's speed was not recorded")
    if cause := _slow_processor_cause(shards):
        return ValidityCheck("processor speed", False, cause)
    slow_s = max(processor.slow_s for processor in recorded)
    if not slow_s:
        return ValidityCheck("processor speed", True, "never below a third of its usual speed")
    detail = (
        f"below a third of its usual speed for {format_value(slow_s, 's')}, which did not cause "
        "the load generator's stalls"
    )
    return ValidityCheck("processor speed", True, detail)


def machine_cause(shards: Sequence[SelfReport]) -> str:
    """How the machine held the load generator up: its host took time, or its processor was slow.
    "" where it did not, or where that was not recorded."""
    return _steal_cause(shards) or _slow_processor_cause(shards)


def _steal_cause(shards: Sequence[SelfReport]) -> str:
    """The time that the host took from this virtual machine, where it exceeds 1 % or half of a
    worker's stall time; else ""."""
    if (share := _stolen_share(shards)) > STOLEN_SHARE:
        given = f"gave {format_share(share)} of its time to others (steal)"
        return f"the host of this virtual machine {given}"
    return next(filter(None, map(_stolen_in_stalls, shards)), "")


def _stolen_share(shards: Sequence[SelfReport]) -> float:
    return max((shard.stolen_share or 0.0 for shard in shards), default=0.0)


def _stolen_in_stalls(shard: SelfReport) -> str:
    """The time taken from a core: a worker stalls on a single core at a time, and the average over
    all cores would hide it."""
    stalled_s = _stalled_s(shard)
    stolen_s = 0.0 if shard.cores is None else shard.cores.most_stolen_s or 0.0
    if not stalled_s or stolen_s < EXPLAINED_SHARE * stalled_s:
        return ""
    return (
        f"the host of this virtual machine took {format_value(stolen_s, 's')} of one core's time "
        f"(steal), and the load generator stalled for {format_value(stalled_s, 's')}"
    )


def _slow_processor_cause(shards: Sequence[SelfReport]) -> str:
    """The slowdown of the processor, where it covers at least half of the stall time; else ""."""
    recorded = [shard.processor for shard in shards if shard.processor is not None]
    stalled_s = math.fsum(map(_stalled_s, shards))
    slow_s = math.fsum(processor.slow_in_stalls_s for processor in recorded)
    speeds = [processor.slow_speed or 1.0 for processor in recorded]
    if not stalled_s or slow_s < EXPLAINED_SHARE * stalled_s:
        return ""
    return (
        f"the processor ran at {format_share(min(speeds))} of its usual speed for "
        f"{format_value(slow_s, 's')} of the {format_value(stalled_s, 's')} for which the load "
        "generator stalled (throttled for heat or power, clocked down, or slowed by the host of a "
        "virtual machine)"
    )


def _stalled_s(shard: SelfReport) -> float:
    spans = () if shard.stalls is None else shard.stalls.spans_s
    return sum(until_s - from_s for from_s, until_s, _ in spans)


def _of_shard(shard: SelfReport, shards: Sequence[SelfReport]) -> str:
    return f" (worker {shard.shard}, the worst of {len(shards)})" if len(shards) > 1 else ""


def _held_up(detail: str, cause: str) -> str:
    return f"the load generator was held up: {detail}; {cause}"
