"""The health of the client: when it sent, how its event loop ran, what its cores did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadgen.manifest import InstrumentLimits
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo import Slo, lateness_limit_s
from loadgen.measure.stalls import Stalls, changed
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.validity.check import ValidityCheck
from loadgen.measure.validity.machine_checks import taken
from loadgen.measure.wording import format_count, format_share, format_value
from loadgen.records import Run
from loadgen.self_report import SelfReport

LEAST_WAITING = 20  # connections seen waiting, before their share says anything
OTHERS_SHARE = 0.10  # of the time of the client's cores
IDLE_SHARE = 0.05  # with as much, there is a core to wake up on
ENCODED_LATE_SHARE = 0.01


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
        return ValidityCheck(
            "lateness", None, "no request was sent at a planned instant", is_gate=True
        )
    p50, p99 = (float(late_s[nearest_rank(len(late_s), q) - 1]) for q in (0.5, 0.99))
    detail = (
        f"sent after the planned instant: p50 {format_value(p50, 's')}, p99 "
        f"{format_value(p99, 's')},"
        f" max {format_value(float(late_s[-1]), 's')}; limit p99 {format_value(limit_s, 's')}"
    )
    if p99 > limit_s:
        cause = taken(shards) or "the load generator fell behind its own schedule"
        detail = f"client-bound: {detail}; {cause}"
    return ValidityCheck("lateness", p99 <= limit_s, detail, is_gate=True)


def held_by_cap(run: Run) -> Mask:
    """Rows released while `limits.max_concurrency` was used up and `when_full: wait` held them.

    Their wait was asked for by the scenario: latency of the request, not lateness of the client.
    Of n shards each holds cap // n of it, the first cap % n one more.
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
        return ValidityCheck(
            "event loop", None, "the client did not record its loop's lag", is_gate=True
        )
    lag, shard = max(readings, key=lambda reading: reading[0].p99)
    pause_s = max(one.gc.pause_max_s for _, one in readings)
    detail = (
        f"lag p99 {format_value(lag.p99, 's')}, max "
        f"{format_value(lag.max, 's')}{_of_shard(shard, shards)};"
        f" limit p99 {format_value(limit_s, 's')}; longest garbage collection "
        f"{format_value(pause_s, 's')}"
    )
    ok = lag.p99 <= limit_s
    if not ok:
        cause = taken(shards) or "the client's event loop was blocked"
        detail = f"client-bound: {detail}; {cause}"
    return ValidityCheck("event loop", ok, detail, is_gate=True)


def read_backlog(shards: Sequence[SelfReport], limit_s: float) -> ValidityCheck:
    readings = [(shard.backlog, shard) for shard in shards if shard.backlog is not None]
    if not readings:
        detail = "the client did not look at its sockets (it can with the fast transport)"
        return ValidityCheck("read backlog", None, detail, is_gate=True)
    backlog, shard = max(readings, key=lambda reading: reading[0].wait_mean_s)
    n_waiting, wait_s = backlog.waiting, backlog.wait_mean_s
    detail = (
        f"bytes waited {format_value(wait_s, 's')} in the sockets on average before they were read,"
        f" estimated from {format_count(backlog.looks)} looks, of which "
        f"{format_count(n_waiting)}"
        f" found some{_of_shard(shard, shards)}; limit {format_value(limit_s, 's')}"
    )
    ok = wait_s <= limit_s or n_waiting < LEAST_WAITING
    if not ok:
        detail = f"client-bound: {detail}; the client read slower than the server sent"
    return ValidityCheck("read backlog", ok, detail, is_gate=True)


def share_of_time(
    name: str,
    what: str,
    cause: str,
    shards: Sequence[SelfReport],
    read: Callable[[SelfReport], float | None],
    limit: float,
) -> ValidityCheck:
    readings = [(value, shard) for shard in shards if (value := read(shard)) is not None]
    if not readings:
        return ValidityCheck(name, None, "not recorded on this platform", is_gate=True)
    value, shard = max(readings, key=lambda reading: reading[0])
    detail = f"{format_share(value)} {what}{_of_shard(shard, shards)}; limit {format_share(limit)}"
    if value > limit:
        detail = f"client-bound: {detail}; {cause}"
    return ValidityCheck(name, value <= limit, detail, is_gate=True)


def shared_cores(run: Run, shards: Sequence[SelfReport], limit: float) -> ValidityCheck:
    """Cores that the client is confined to and that others keep from ever being idle: it then runs
    as the scheduler lets it, which run delay need not show. Not those of the whole machine, where
    the scheduler has the choice, and not against what this run started itself."""
    name, limit = "shared cores", max(OTHERS_SHARE, limit)
    known = [shard.cores for shard in shards if shard.cores is not None and shard.cores.total_s > 0]
    if not known or len(known) < len(shards):
        return ValidityCheck(name, None, "not recorded on this platform", is_gate=True)
    ours_s = sum(cores.own_s for cores in known) + run.instrument.family_s
    worst = min(known, key=lambda cores: cores.idle_s / cores.total_s)
    n = len(worst.allowed)
    idle = worst.idle_s / worst.total_s
    others = max(0.0, worst.programs_s - ours_s) / worst.total_s
    whose = "core" if n == 1 else f"{format_count(n)} cores"
    detail = (
        f"other programs took {format_share(others)} of the time of the client's {whose},"
        f" {format_share(idle)} was idle; limit {format_share(limit)} with under"
        f" {format_share(IDLE_SHARE)} idle"
    )
    if 1 < n == worst.online:
        return ValidityCheck(name, True, f"{detail}, of cores that it is confined to", is_gate=True)
    ok = idle >= IDLE_SHARE or others <= limit
    if not ok:
        detail = f"client-bound: {detail}; another program never left the client's {whose} alone"
    return ValidityCheck(name, ok, detail, is_gate=True)


def stalls_of_our_own(found: Stalls | None, n_due: int) -> ValidityCheck:
    """No gate: how often is the event loop's, and what came of it is shown here."""
    if found is None:
        return ValidityCheck("stalls", None, "the client did not look for stalls of its own")
    if not found.n:
        return ValidityCheck("stalls", True, "the client never stalled")
    times = "once" if found.n == 1 else f"{format_count(found.n)} times"
    detail = (
        f"the client stalled {times}, {format_value(found.total_s, 's')} in all, for"
        f" {format_value(found.longest_s, 's')} at the longest; {format_count(found.rows)} of"
        f" {format_count(n_due)} requests were sent or had their first or last token stamped "
        "meanwhile"
    )
    if found.rows:
        figures = [
            f"p99 {name} {format_value(without_s, 's')} instead of {format_value(all_s, 's')}"
            for name, all_s, without_s in changed(found)
        ]
        detail += f"; without them {', '.join(figures) or 'the p99s are the same'}"
    return ValidityCheck("stalls", not found.rows, detail)


def connections(shards: Sequence[SelfReport]) -> ValidityCheck:
    if not shards:
        return ValidityCheck("connections", None, "the client did not count its connections")
    opened = sum(shard.connections.opened for shard in shards)
    reused = sum(shard.connections.reused for shard in shards)
    refused = sum(shard.connections.not_opened_ahead for shard in shards)
    detail = f"{format_count(opened)} opened, reused {format_count(reused)} times"
    if refused:
        detail += (
            f"; {format_count(refused)} that were to be opened before the first request were "
            "not: the"
            " server refused some, and requests that found none waited for their own"
        )
    return ValidityCheck("connections", not refused, detail)


def encoding(run: Run, shards: Sequence[SelfReport]) -> ValidityCheck:
    """Requests whose bytes were not ready at their instant; making them delays whoever is due."""
    n_sent = int(np.count_nonzero(np.isfinite(run.request_rows["sent_s"])))
    if not shards or not n_sent:
        return ValidityCheck("encoding", None, "the client did not count requests encoded when due")
    n_late = sum(shard.encoded_late for shard in shards)
    detail = (
        f"{format_count(n_late)} of {format_count(n_sent)} requests were encoded only when "
        "they were due"
    )
    return ValidityCheck("encoding", n_late <= ENCODED_LATE_SHARE * n_sent, detail)


def _of_shard(shard: SelfReport, shards: Sequence[SelfReport]) -> str:
    return f" (worker {shard.shard}, the worst of {len(shards)})" if len(shards) > 1 else ""
