"""Checks of the traffic: rows recorded and sent on schedule, the queue, cached prompts, token
counts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import measured_window
from loadgen.measure.counted_prompts import counted_prompts, has_exact_prompts
from loadgen.measure.load import LoadByQuarter
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.summary import ValidityCheck, gate
from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.records import CLIENT_LIMIT, Run, Status

STIMULUS_TOLERANCE_S = 1e-3


def record(run: Run) -> ValidityCheck:
    n_lost = int(np.count_nonzero(run.request_rows["status"] == Status.lost))
    n = len(run.request_rows)
    if n_lost:
        detail = f"the load generator lost {format_count(n_lost)} of {format_count(n)} requests"
        return gate("record", False, detail + _how_rows_were_lost(run))
    for shard in run.instrument.shards:
        if why := shard.broken:
            return gate("record", False, f"worker {shard.shard} stopped too early: {why}")
    if not run.instrument.shards and run.manifest.clock != "virtual":
        detail = (
            "the load generator's measurements of itself are missing (`instrument` of "
            "manifest.json), so nothing shows that the times are right"
        )
        return gate("record", False, detail)
    if detail := other_chunks(run):
        return gate("record", False, detail)
    return gate("record", True, f"all {format_count(n)} scheduled requests are recorded")


def other_chunks(run: Run) -> str:
    """A clause on chunks.parquet and requests.parquet of different runs; "" where they agree."""
    n_other = _n_other_chunks(run)
    if not n_other:
        return ""
    return (
        f"{format_count(n_other)} of {format_count(len(run.request_rows))} requests have other "
        "chunks in chunks.parquet than requests.parquet counts: the files are not of the same run"
    )


def _n_other_chunks(run: Run) -> int:
    """Number of requests with another number of chunks than their row counts; of requests that the
    run does not have, if there are any."""
    ids, chunk_ids = run.request_rows["request_id"], run.chunk_rows["request_id"]
    places = np.searchsorted(ids, chunk_ids)
    is_known = ids[np.minimum(places, len(ids) - 1)] == chunk_ids if len(ids) else places < 0
    counts = np.bincount(places[is_known], minlength=len(ids))
    n_unknown = len(np.unique(chunk_ids[~is_known]))
    return int(np.count_nonzero(counts != run.request_rows["chunks"])) + n_unknown


def _how_rows_were_lost(run: Run) -> str:
    """How the run ended, and where to read more. A run that lost a worker can be "completed" all
    the same."""
    manifest = run.manifest
    why = manifest.end_reason.rstrip(".")
    log = "; see the logs of its workers, logs/shard-N.log"
    if manifest.workers is not None:  # of other processes, perhaps of other machines
        log = "; see `workers` in manifest.json"
    elif manifest.dead_workers:
        log = f"; see {', '.join(f'logs/shard-{number}.log' for number in manifest.dead_workers)}"
    return f": {why}{log}" if why else log


def client_limits(run: Run) -> list[ValidityCheck]:
    """A gate that is shown only when it fails: requests that the load generator could not even
    start."""
    rows = run.request_rows
    error_ids = rows["error_id"][np.isin(rows["error_id"], run.names.client_limits)]
    if not len(error_ids):
        return []
    why = run.names.errors[error_ids[0]].removesuffix(CLIENT_LIMIT)
    detail = (
        f"{format_count(len(error_ids))} of {format_count(len(rows))} requests got no connection "
        f"because the load generator's machine had none left: {why}"
    )
    return [gate("client limits", False, detail)]


def stimulus(run: Run) -> ValidityCheck:
    """Whether every released row was released at its scheduled time, or when its parents ended plus
    think time."""
    rows, schedule = run.request_rows, run.schedule_rows
    released = np.isfinite(rows["released_s"])
    roots = schedule["n_parents"] == 0
    off_s = np.abs(rows["released_s"] - _planned_s(run))
    n_moved = int(np.count_nonzero(released & ~(off_s <= STIMULUS_TOLERANCE_S)))
    ended = run.manifest.ended == "completed"
    unsent = roots & (rows["status"] == Status.not_released)
    unsent &= schedule["scheduled_s"] < measured_window(run).end_s
    n_unsent = int(np.count_nonzero(unsent)) if ended else 0
    n = int(np.count_nonzero(released))
    n_dry = _n_dry(run) if ended else 0
    if n_dry:
        detail = (
            f"{format_count(n_dry)} users of the closed loop ran out of planned requests before "
            "the window ended, because the server answers (or fails) faster than planned: in 2 ms "
            "and at 10 000 tokens/s, or slower in a plan of more than 100 000 requests; use "
            "workers of this machine only, or set longer answers or a think time"
        )
        return gate("stimulus", False, detail)
    if n_moved or n_unsent:
        detail = (
            f"{format_count(n_moved)} of {format_count(n)} released requests were released more "
            f"than {format_value(STIMULUS_TOLERANCE_S, 's')} off their scheduled time, and "
            f"{format_count(n_unsent)} scheduled requests were never released"
        )
        return gate("stimulus", False, detail)
    detail = f"all {format_count(n)} released requests followed this run's own schedule"
    return gate("stimulus", True if n else None, detail)


def _n_dry(run: Run) -> int:
    """Users of a closed loop whose last planned request was released: the run was longer than their
    plan."""
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
    """`scheduled_s`, or for rows with parents the latest `done_s + delay_s` among their edges, plus
    `think_s`."""
    rows, schedule, edges = run.request_rows, run.schedule_rows, run.edge_rows
    planned_s: NDArray[np.float64] = schedule["scheduled_s"].copy()
    if len(edges):
        ids = rows["request_id"]
        child = np.searchsorted(ids, edges["request_id"])
        parent = np.searchsorted(ids, edges["after"])
        latest_s = np.full(len(rows), -np.inf)
        with np.errstate(invalid="ignore"):  # NaN (never sent) wins; such rows are set below
            np.maximum.at(latest_s, child, rows["done_s"][parent] + edges["delay_s"])
        has_parents = np.isfinite(latest_s)
        planned_s[has_parents] = latest_s[has_parents] + schedule["think_s"][has_parents]
        # a row whose parent was never sent has no scheduled time: take its release as on time
        unknown = schedule["after_failure"] & ~np.isfinite(latest_s)
        planned_s[unknown] = rows["released_s"][unknown]
    return planned_s


CACHED_SLACK_TOKENS = 64  # a chat template's own tokens, in whole blocks
_BLOCK_TOKENS = 16

CACHED_REQUESTS_SHARE = 0.01

LENGTH_TOLERANCE = 0.05


def grown_load(load: LoadByQuarter | None) -> ValidityCheck:
    if load is None:
        return ValidityCheck("load", None, "too few requests to see whether a queue grew")
    first, last = load.in_flight[0], load.in_flight[-1]
    latency = "TTFT" if load.is_streamed else "E2E"
    detail = (
        f"{format_number(first)} requests in flight in the first quarter of the window,"
        f" {format_number(last)} in the last; median {latency} {format_value(load.ttft_s[0], 's')}"
        f" and {format_value(load.ttft_s[-1], 's')}"
    )
    if load.is_growing:
        detail = f"the offered rate is above the server's capacity: {detail}"
    return ValidityCheck("load", not load.is_growing, detail)


def cache(run: Run, due: Mask) -> ValidityCheck:
    """The cached tokens that the server reports, against the declared prefix. First turns only:
    later turns keep their history in the cache."""
    rows, schedule = run.request_rows, run.schedule_rows
    first_turns = due & (schedule["n_parents"] == 0)
    cached = rows["cached_tokens"][first_turns].astype(np.int64)
    if not cached.any():
        return ValidityCheck("cache", None, "the server reported no cached prompt tokens")
    slack = _slack_tokens(run)
    allowed = schedule["prefix_tokens"][first_turns].astype(np.int64) + slack
    n_over, n = int(np.count_nonzero(cached > allowed)), len(cached)
    detail = (
        f"{format_count(n_over)} of {format_count(n)} prompts had more cached tokens than their "
        f"declared prefix plus {slack}; "
        f"{format_count(int(cached.sum()))} cached tokens in total"
    )
    if n_over > CACHED_REQUESTS_SHARE * n:
        return ValidityCheck(
            "cache", False, f"the server's cache held prompts that should be new: {detail}"
        )
    return ValidityCheck("cache", True, detail)


def _slack_tokens(run: Run) -> int:
    """Cached tokens of a new prompt: those of the chat template, and a block."""
    fit = run.manifest.target.prompt_fit
    if fit is None or not has_exact_prompts(run.manifest):
        return CACHED_SLACK_TOKENS
    return min(CACHED_SLACK_TOKENS, math.ceil(fit[0]) + _BLOCK_TOKENS)


def output_lengths(run: Run, columns: PerRequest, due: Mask) -> ValidityCheck:
    answered = due & columns.is_ok & (run.request_rows["results"] == 0)
    requested = run.schedule_rows["output_tokens"][answered].astype(np.int64)
    got = columns.output_tokens[answered]
    if not len(got) or not requested.sum():
        return ValidityCheck("output lengths", None, "no successful answer with tokens")
    n_other = int(np.count_nonzero(got != requested))
    detail = (
        f"{format_number(float(requested.mean()))} tokens requested on average, "
        f"{format_number(float(got.mean()))} received; {format_count(n_other)} of "
        f"{format_count(len(got))} answers differ"
    )
    ok = abs(got.sum() / requested.sum() - 1) <= LENGTH_TOLERANCE
    return ValidityCheck("output lengths", bool(ok), detail)


def input_lengths(run: Run, due: Mask) -> ValidityCheck:
    counted = due & (run.request_rows["input_tokens"] > 0)
    requested = run.schedule_rows["input_tokens"][counted].astype(np.int64)
    got = run.request_rows["input_tokens"][counted].astype(np.int64)
    if not len(got) or not requested.sum():
        return ValidityCheck("input lengths", None, "the server did not count prompt tokens")
    detail = (
        f"{format_number(float(requested.mean()))} prompt tokens planned on average, "
        f"{format_number(float(got.mean()))} counted by the server"
    )
    apart = np.abs(got - requested)
    n_near = int(np.count_nonzero(apart <= 1))
    detail += (
        f"; {format_count(n_near)} of {format_count(len(got))} within one token, "
        f"the largest difference is {format_count(int(apart.max()))}"
    )
    found = counted_prompts(run, due)
    if found.is_short:
        detail = f"the server counted shorter prompts than were planned: {detail}"
    return ValidityCheck("input lengths", not (found.is_short or found.is_long), detail)
