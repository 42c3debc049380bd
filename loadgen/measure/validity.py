"""Whether a run can be believed: the client's health, what it sent, what caches and lengths did.

A *gate* that fails makes the run INVALID, whatever the latencies say; the other checks only tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.load import Load
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo import Slo, lateness_limit_s
from loadgen.measure.stalls import Stalls, changed, stalls
from loadgen.measure.stats import nearest_rank
from loadgen.measure.wording import say, say_count, say_number, say_share
from loadgen.records import CLIENT_LIMIT, Run, Status

LOOP_LAG_S = 0.005
READ_BACKLOG_S = 0.0025  # on average; in a burst of reads the last one then waits for 5 ms
LEAST_WAITING = 20  # connections seen waiting, before their share says anything
CPU_SHARE = 0.90
RUN_DELAY_SHARE = 0.01
OTHERS_SHARE = 0.10  # of the time of the client's cores
IDLE_SHARE = 0.05  # with as much, there is a core to wake up on
STIMULUS_TOLERANCE_S = 1e-3
CACHED_SLACK_TOKENS = 64  # a chat template's own tokens, in whole blocks
CACHED_REQUESTS_SHARE = 0.01
ENCODED_LATE_SHARE = 0.01
LENGTH_TOLERANCE = 0.05
STOLEN_SHARE = 0.01
TEMPLATE_TOKENS = 32  # what a chat template may add to each prompt


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the validity table. `ok` None: not known here. A failed `is_gate` invalidates."""

    name: str
    ok: bool | None
    detail: str
    is_gate: bool = False


def checks(
    run: Run, columns: PerRequest, due: Mask, slos: Sequence[Slo], load: Load | None
) -> list[Check]:
    """All checks of a run, gates first; limits come from the manifest where it overrides them."""
    limits = run.manifest.get("instrument_limits") or {}
    shards = run.instrument.get("shards") or []
    return [
        _rows(run),
        *_client_limits(run),
        _lateness(run, columns, due, slos, limits, shards),
        _loop_lag(shards, float(limits.get("loop_lag_s", LOOP_LAG_S))),
        _backlog(shards, float(limits.get("read_backlog_s", READ_BACKLOG_S))),
        _share(
            "client CPU",
            "of one core used by the client",
            "the client ran out of CPU; use more workers or a lower rate",
            shards,
            lambda shard: shard.get("cpu_share"),
            float(limits.get("cpu_share", CPU_SHARE)),
        ),
        _share(
            "run delay",
            "of the run spent runnable but not running",
            "the machine was too busy to schedule the client",
            shards,
            lambda shard: shard.get("run_delay_share"),
            float(limits.get("run_delay_share", RUN_DELAY_SHARE)),
        ),
        _shared_cores(run, shards, float(limits.get("run_delay_share", RUN_DELAY_SHARE))),
        _share(
            "throttling",
            "of the run throttled by the cgroup",
            "the container's CPU quota held the client back",
            shards,
            lambda shard: shard.get("throttled_share"),
            float(limits.get("run_delay_share", RUN_DELAY_SHARE)),
        ),
        _steal(shards),
        _stimulus(run),
        _stalls(stalls(run, columns, due), int(np.count_nonzero(due))),
        _load(load),
        _cache(run, due),
        _output_lengths(run, columns, due),
        _input_lengths(run, due),
        _connections(shards),
        _encoding(run, shards),
    ]


def is_trusted(found: Sequence[Check]) -> bool:
    return not any(check.is_gate and check.ok is False for check in found)


def _rows(run: Run) -> Check:
    n_lost = int(np.count_nonzero(run.request_rows["status"] == Status.lost))
    n = len(run.request_rows)
    if n_lost:
        detail = f"{say_count(n_lost)} of {say_count(n)} rows were lost by the client"
        return Check("record", False, detail + _how_rows_got_lost(run), is_gate=True)
    for shard in run.instrument.get("shards") or []:
        if why := shard.get("broken"):
            detail = f"load-generating process {shard.get('shard')} stopped before its time: {why}"
            return Check("record", False, detail, is_gate=True)
    return Check("record", True, f"all {say_count(n)} scheduled rows are recorded", is_gate=True)


def _client_limits(run: Run) -> list[Check]:
    """A gate that only shows where it is closed: what the client could not even begin."""
    found = run.request_rows[np.isin(run.request_rows["error_id"], run.names.client_limits)]
    if not len(found):
        return []
    why = run.names.errors[found["error_id"][0]].removesuffix(CLIENT_LIMIT)
    detail = (
        f"client-bound: {say_count(len(found))} of {say_count(len(run.request_rows))} requests got"
        f" no connection because the client's machine had none left to give: {why}"
    )
    return [Check("client limits", False, detail, is_gate=True)]


def _how_rows_got_lost(run: Run) -> str:
    """How the run ended, and where to read on; a run without one of its workers can be
    "completed" all the same."""
    why = str(run.manifest.get("end_reason") or "").rstrip(".")
    worker = re.search(r"\bprocess (\d+) died", why)
    log = "; what its workers wrote is in logs/shard-N.log"
    if "workers" in run.manifest:  # of other processes, perhaps of other machines
        log = "; manifest.json says under `workers` what is known of each"
    elif worker is not None:
        log = f"; its log is logs/shard-{worker[1]}.log"
    return f": {why}{log}" if why else log


def _lateness(
    run: Run,
    columns: PerRequest,
    due: Mask,
    slos: Sequence[Slo],
    limits: Mapping[str, Any],
    shards: Sequence[Mapping[str, Any]],
) -> Check:
    stated_s = limits.get("lateness_s")
    limit_s = lateness_limit_s(slos) if stated_s is None else float(stated_s)
    late_s = columns.lateness_s[due & ~held_by_cap(run)]
    late_s = np.sort(late_s[~np.isnan(late_s)])
    if not len(late_s):
        return Check("lateness", None, "no request was sent at a planned instant", is_gate=True)
    p50, p99 = (float(late_s[nearest_rank(len(late_s), q) - 1]) for q in (0.5, 0.99))
    detail = (
        f"sent after the planned instant: p50 {say(p50, 's')}, p99 {say(p99, 's')},"
        f" max {say(float(late_s[-1]), 's')}; limit p99 {say(limit_s, 's')}"
    )
    if p99 > limit_s:
        cause = _stolen(shards) or "the load generator fell behind its own schedule"
        detail = f"client-bound: {detail}; {cause}"
    return Check("lateness", p99 <= limit_s, detail, is_gate=True)


def held_by_cap(run: Run) -> Mask:
    """Rows released while `limits.max_concurrency` was used up and `when_full: wait` held them.

    Their wait was asked for by the scenario: latency of the request, not lateness of the client.
    Of n shards each holds cap // n of it, the first cap % n one more.
    """
    rows = run.request_rows
    limits = (run.manifest.get("scenario", {}).get("resolved") or {}).get("limits") or {}
    cap = limits.get("max_concurrency")
    if limits.get("when_full") != "wait" or not cap:
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


def _loop_lag(shards: Sequence[Mapping[str, Any]], limit_s: float) -> Check:
    readings = [(s["loop_lag_s"], s) for s in shards if (s.get("loop_lag_s") or {}).get("n")]
    if not readings:
        return Check("event loop", None, "the client did not record its loop's lag", is_gate=True)
    lag, shard = max(readings, key=lambda reading: float(reading[0]["p99"]))
    pause_s = max(float((s.get("gc") or {}).get("pause_max_s") or 0.0) for _, s in readings)
    detail = (
        f"lag p99 {say(lag['p99'], 's')}, max {say(lag['max'], 's')}{_of_shard(shard, shards)};"
        f" limit p99 {say(limit_s, 's')}; longest garbage collection {say(pause_s, 's')}"
    )
    ok = float(lag["p99"]) <= limit_s
    if not ok:
        cause = _stolen(shards) or "the client's event loop was blocked"
        detail = f"client-bound: {detail}; {cause}"
    return Check("event loop", ok, detail, is_gate=True)


def _stolen(shards: Sequence[Mapping[str, Any]]) -> str:
    """What a host that took the machine's time away did; "" where it did not, or is not known."""
    share = max((float(s.get("stolen_share") or 0.0) for s in shards), default=0.0)
    if share <= STOLEN_SHARE:
        return ""
    return f"the host of this virtual machine gave {say_share(share)} of its time to others (steal)"


def _steal(shards: Sequence[Mapping[str, Any]]) -> Check:
    """No gate: what it does to the client, lateness and the event loop's lag show."""
    if all(shard.get("stolen_share") is None for shard in shards):
        return Check("steal", None, "not recorded on this platform")
    told = _stolen(shards)
    share = max(float(s.get("stolen_share") or 0.0) for s in shards)
    limit = f"limit {say_share(STOLEN_SHARE)}"
    detail = f"{say_share(share)} of the machine's time was taken by its host; {limit}"
    return Check("steal", not told, f"{told}; {limit}" if told else detail)


def _backlog(shards: Sequence[Mapping[str, Any]], limit_s: float) -> Check:
    readings = [(s["backlog"], s) for s in shards if s.get("backlog")]
    if not readings:
        detail = "the client did not look at its sockets (it can with the fast transport)"
        return Check("read backlog", None, detail, is_gate=True)
    seen, shard = max(readings, key=lambda reading: float(reading[0]["wait_mean_s"]))
    n_waiting, wait_s = int(seen["waiting"]), float(seen["wait_mean_s"])
    detail = (
        f"bytes waited {say(wait_s, 's')} in the sockets on average before they were read,"
        f" estimated from {say_count(int(seen['looks']))} looks, of which {say_count(n_waiting)}"
        f" found some{_of_shard(shard, shards)}; limit {say(limit_s, 's')}"
    )
    ok = wait_s <= limit_s or n_waiting < LEAST_WAITING
    if not ok:
        detail = f"client-bound: {detail}; the client read slower than the server sent"
    return Check("read backlog", ok, detail, is_gate=True)


def _stalls(found: Stalls | None, n_due: int) -> Check:
    """No gate: how often is the event loop's, and what came of it is shown here."""
    if found is None:
        return Check("stalls", None, "the client did not look for stalls of its own")
    if not found.n:
        return Check("stalls", True, "the client never stalled")
    times = "once" if found.n == 1 else f"{say_count(found.n)} times"
    detail = (
        f"the client stalled {times}, {say(found.total_s, 's')} in all, for"
        f" {say(found.longest_s, 's')} at the longest; {say_count(found.rows)} of"
        f" {say_count(n_due)} requests were sent or had their first or last token stamped meanwhile"
    )
    if found.rows:
        figures = [
            f"p99 {name} {say(without_s, 's')} instead of {say(all_s, 's')}"
            for name, all_s, without_s in changed(found)
        ]
        detail += f"; without them {', '.join(figures) or 'the p99s are the same'}"
    return Check("stalls", not found.rows, detail)


def _share(
    name: str,
    what: str,
    cause: str,
    shards: Sequence[Mapping[str, Any]],
    read: Callable[[Mapping[str, Any]], float | None],
    limit: float,
) -> Check:
    readings = [(value, shard) for shard in shards if (value := read(shard)) is not None]
    if not readings:
        return Check(name, None, "not recorded on this platform", is_gate=True)
    value, shard = max(readings, key=lambda reading: reading[0])
    detail = f"{say_share(value)} {what}{_of_shard(shard, shards)}; limit {say_share(limit)}"
    if value > limit:
        detail = f"client-bound: {detail}; {cause}"
    return Check(name, value <= limit, detail, is_gate=True)


def _shared_cores(run: Run, shards: Sequence[Mapping[str, Any]], limit: float) -> Check:
    """Cores that the client is confined to and that others keep from ever being idle: it then runs
    as the scheduler lets it, which run delay need not show. Not those of the whole machine, where
    the scheduler has the choice, and not against what this run started itself."""
    name, limit = "shared cores", max(OTHERS_SHARE, limit)
    known = [shard["cores"] for shard in shards if shard.get("cores")]
    known = [cores for cores in known if cores["total_s"] > 0]
    if not known or len(known) < len(shards):
        return Check(name, None, "not recorded on this platform", is_gate=True)
    ours_s = sum(cores["own_s"] for cores in known) + float(run.instrument.get("family_s") or 0.0)
    worst = min(known, key=lambda cores: float(cores["idle_s"] / cores["total_s"]))
    n = len(worst["allowed"])
    idle = worst["idle_s"] / worst["total_s"]
    others = max(0.0, worst["programs_s"] - ours_s) / worst["total_s"]
    whose = "core" if n == 1 else f"{say_count(n)} cores"
    detail = (
        f"other programs took {say_share(others)} of the time of the client's {whose},"
        f" {say_share(idle)} was idle; limit {say_share(limit)} with under"
        f" {say_share(IDLE_SHARE)} idle"
    )
    if 1 < n == worst["online"]:
        return Check(name, True, f"{detail}, of cores that it is confined to", is_gate=True)
    ok = idle >= IDLE_SHARE or others <= limit
    if not ok:
        detail = f"client-bound: {detail}; another program never left the client's {whose} alone"
    return Check(name, ok, detail, is_gate=True)


def _of_shard(shard: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> str:
    return f" (worker {shard['shard']}, the worst of {len(shards)})" if len(shards) > 1 else ""


def _stimulus(run: Run) -> Check:
    """Every released row left at its planned instant, or at its parents' end plus think time."""
    rows, schedule = run.request_rows, run.schedule_rows
    released = np.isfinite(rows["released_s"])
    roots = schedule["n_parents"] == 0
    off_s = np.abs(rows["released_s"] - _planned_s(run))
    n_moved = int(np.count_nonzero(released & ~(off_s <= STIMULUS_TOLERANCE_S)))
    ended = run.manifest.get("ended", "completed") == "completed"
    unsent = roots & (rows["status"] == Status.not_released)
    n_unsent = int(np.count_nonzero(unsent)) if ended else 0
    n = int(np.count_nonzero(released))
    n_dry = _n_dry(run) if ended else 0
    if n_dry:
        detail = (
            f"{say_count(n_dry)} users of the closed loop had sent all that was planned for them"
            " before the window ended: the server answers (or fails) faster than 20 ms and 1000"
            " tokens/s; ask for longer answers or a think time"
        )
        return Check("stimulus", False, detail, is_gate=True)
    if n_moved or n_unsent:
        detail = (
            f"{say_count(n_moved)} of {say_count(n)} released requests left the schedule's instants"
            f" and {say_count(n_unsent)} planned ones were never released"
        )
        return Check("stimulus", False, detail, is_gate=True)
    detail = f"all {say_count(n)} released requests followed this run's own schedule"
    return Check("stimulus", True if n else None, detail, is_gate=True)


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


def _load(load: Load | None) -> Check:
    if load is None:
        return Check("load", None, "too few requests to tell whether a queue grew")
    first, last = load.in_flight[0], load.in_flight[-1]
    detail = (
        f"{say_number(first)} requests in flight in the first quarter of the window,"
        f" {say_number(last)} in the last; median TTFT {say(load.ttft_s[0], 's')}"
        f" and {say(load.ttft_s[-1], 's')}"
    )
    if load.is_growing:
        detail = f"offered rate above capacity: {detail}"
    return Check("load", not load.is_growing, detail)


def _cache(run: Run, due: Mask) -> Check:
    """Cached tokens the server reports, against the declared prefix; turns keep their history."""
    rows, schedule = run.request_rows, run.schedule_rows
    first_turns = due & (schedule["n_parents"] == 0)
    cached = rows["cached_tokens"][first_turns].astype(np.int64)
    if not cached.any():
        return Check("cache", None, "the server reported no cached prompt tokens")
    allowed = schedule["prefix_tokens"][first_turns].astype(np.int64) + CACHED_SLACK_TOKENS
    n_over, n = int(np.count_nonzero(cached > allowed)), len(cached)
    detail = (
        f"{say_count(n_over)} of {say_count(n)} prompts had more cached tokens than their declared"
        f" prefix plus {CACHED_SLACK_TOKENS}; {say_count(int(cached.sum()))} cached tokens in all"
    )
    if n_over > CACHED_REQUESTS_SHARE * n:
        return Check("cache", False, f"contaminated: {detail}")
    return Check("cache", True, detail)


def _output_lengths(run: Run, columns: PerRequest, due: Mask) -> Check:
    answered = due & columns.is_ok
    asked = run.schedule_rows["output_tokens"][answered].astype(np.int64)
    got = columns.output_tokens[answered]
    if not len(got) or not asked.sum():
        return Check("output lengths", None, "no answer to measure")
    n_other = int(np.count_nonzero(got != asked))
    detail = (
        f"asked for {say_number(float(asked.mean()))} tokens on average, got"
        f" {say_number(float(got.mean()))}; {say_count(n_other)} of {say_count(len(got))} differ"
    )
    ok = abs(got.sum() / asked.sum() - 1) <= LENGTH_TOLERANCE
    return Check("output lengths", bool(ok), detail)


def _input_lengths(run: Run, due: Mask) -> Check:
    counted = due & (run.request_rows["input_tokens"] > 0)
    asked = run.schedule_rows["input_tokens"][counted].astype(np.int64)
    got = run.request_rows["input_tokens"][counted].astype(np.int64)
    if not len(got) or not asked.sum():
        return Check("input lengths", None, "the server did not count prompt tokens")
    detail = (
        f"planned {say_number(float(asked.mean()))} prompt tokens on average, the server counted"
        f" {say_number(float(got.mean()))}"
    )
    apart = np.abs(got - asked)
    n_near = int(np.count_nonzero(apart <= 1))
    detail += (
        f"; {say_count(n_near)} of {say_count(len(got))} within one token, the farthest"
        f" {say_count(int(apart.max()))} off"
    )
    off = float(abs(got.sum() - asked.sum()))
    ok = off <= max(LENGTH_TOLERANCE * float(asked.sum()), TEMPLATE_TOKENS * len(got))
    return Check("input lengths", bool(ok), detail)


def _connections(shards: Sequence[Mapping[str, Any]]) -> Check:
    totals = [s["connections"] for s in shards if s.get("connections")]
    if not totals:
        return Check("connections", None, "the client did not count its connections")
    opened, reused, refused = (
        sum(int(t.get(key) or 0) for t in totals)
        for key in ("opened", "reused", "not_opened_ahead")
    )
    detail = f"{say_count(opened)} opened, reused {say_count(reused)} times"
    if refused:
        detail += (
            f"; {say_count(refused)} that were to be opened before the first request were not: the"
            " server refused some, and requests that found none waited for their own"
        )
    return Check("connections", not refused, detail)


def _encoding(run: Run, shards: Sequence[Mapping[str, Any]]) -> Check:
    """Requests whose bytes were not ready at their instant; making them delays whoever is due."""
    counted = [int(s["encoded_late"]) for s in shards if s.get("encoded_late") is not None]
    n_sent = int(np.count_nonzero(np.isfinite(run.request_rows["sent_s"])))
    if not counted or not n_sent:
        return Check("encoding", None, "the client did not count requests encoded when due")
    n_late = sum(counted)
    detail = (
        f"{say_count(n_late)} of {say_count(n_sent)} requests were encoded only when they were due"
    )
    return Check("encoding", n_late <= ENCODED_LATE_SHARE * n_sent, detail)
