"""The largest error that the load generator can have made in the times of each request, from its
measurements of itself. docs/decisions/0057 gives the reasons.

Verdicts depend on lateness, lag, backlog and run delay only through this bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import (
    LONGEST_PROBE_GAP_S,
    PROBE_PERIOD_S,
    ClientReport,
    SelfReport,
)
from loadgen.measure.per_request import Mask, PerRequest, Seconds, greatest
from loadgen.measure.statistics.population import BLOCK
from loadgen.measure.validity.causes import core_sharing, sharing_limit
from loadgen.records import Run, Status

LEAST_WAITING = 20  # connections that had bytes waiting, before their share means anything
UNSEEN_S = 5e-3
"""A delay that the probe of the event loop does not report as a stall."""
_TAIL = -math.log(0.01)  # p99 of an exponential delay over its mean
_BURST = 2.0  # the last read of a burst over the mean of its reads
GAP_METRICS = frozenset({"itl_s", "icl_s", "max_itl_s", "max_stall_s"})
_SHIFTED = (
    "ttft_s",
    "ttft_from_send_s",
    "ttfat_s",
    "tpot_s",
    "e2e_s",
    "e2e_from_send_s",
    "close_s",
    "e2e_per_token_s",
)
_GIVEN_UP = (Status.timeout, Status.cancelled, Status.dropped)  # by the load generator


@dataclass(frozen=True, slots=True)
class WorkerDelay:
    """How late a worker can have read: `usual_s` at any time, more in its stalls. `stalls` has a
    row per stall, by time: (from, until, delay of its latest probe), seconds, shape [n, 3]."""

    shard: int
    usual_s: float
    stalls: NDArray[np.float64]

    def at(self, read_s: Seconds) -> Seconds:
        """The largest delay of reads stamped at `read_s`.

        At the start of a stall the loop was less than 5 ms late, so a read `t` after the start is
        at most `t` + 5 ms late. A probe is due within `LONGEST_PROBE_GAP_S` of the start, so a read
        is at most that much later than the latest probe.
        """
        delay_s = np.full(len(read_s), self.usual_s)
        if len(self.stalls):
            from_s, until_s, latest_s = self.stalls.T
            stall = np.searchsorted(from_s, read_s, side="right") - 1  # NaN: the last
            inside = (stall >= 0) & (read_s <= until_s[stall])
            k, at_s = stall[inside], read_s[inside]
            most_s = np.minimum(at_s - from_s[k] + UNSEEN_S, latest_s[k] + LONGEST_PROBE_GAP_S)
            delay_s[inside] = np.maximum(self.usual_s, most_s)
        return delay_s


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """Bounds of the error of each request's times: float64 seconds, shape [n_requests].

    `late_s` is how late the request was sent. The other arrays are how late the reads of its first
    token, first answer token, last token and end can have been; without such a read they hold the
    worker's `usual_s`.
    """

    late_s: Seconds
    first_token_s: Seconds
    first_answer_s: Seconds
    last_token_s: Seconds
    done_s: Seconds
    workers: tuple[WorkerDelay, ...]
    is_unknown_failure: Mask
    """Rows that the load generator gave up while its own reads were late."""

    @property
    def is_any(self) -> bool:
        """Whether there is any error; a simulated run has none."""
        return bool(self.workers) or bool(self.late_s.any())

    def of(self, metric: str, columns: PerRequest) -> Seconds:
        """The bound of a metric of each request. NaN where a metric per token is undefined.

        A late send and a late read both add to a latency. Late sends also change which requests
        compete: in a first-come-first-served server, sends that are at most δ late move every
        answer by at most δ. Differences of two reads are off by the larger of the two delays.
        """
        if metric == "tpot_s":
            with np.errstate(divide="ignore", invalid="ignore"):
                decode_s = columns.e2e_s - columns.ttft_s
                per_token = np.where(decode_s > 0, columns.tpot_s / decode_s, 1.0)
            return np.maximum(self.first_token_s, self.last_token_s) * per_token
        if metric == "e2e_per_token_s":
            return (self.late_s + self.last_token_s) / np.maximum(columns.output_tokens, 1)
        return self.late_s + self._read_of(metric)

    def _read_of(self, metric: str) -> Seconds:
        by_metric: Mapping[str, Seconds] = {
            "ttft_s": self.first_token_s,
            "ttft_from_send_s": self.first_token_s,
            "ttfat_s": self.first_answer_s,
            "e2e_s": self.last_token_s,
            "e2e_from_send_s": self.last_token_s,
            "close_s": self.done_s,
        }
        return by_metric[metric]

    def of_gaps(self, run: Run, columns: PerRequest) -> Seconds:
        """The bound of each gap of `columns.gaps`, between two reads: the larger of their
        delays."""
        chunks, shard_of = run.chunk_rows, run.request_rows["shard"]
        bound_s = np.empty(len(columns.gaps.icl_s))
        is_first = np.zeros(len(chunks), bool)
        is_first[columns.chunk_starts] = True
        done = 0
        for at in range(1, len(chunks), BLOCK):
            part = chunks[at - 1 : at + BLOCK]
            row = np.searchsorted(run.request_rows["request_id"], part["request_id"])
            delay_s = read_delay(self.workers, shard_of[row], part["received_s"].copy())
            kept = ~is_first[at : at + BLOCK] & (np.diff(part["received_s"]) != 0)
            more = np.maximum(delay_s[1:], delay_s[:-1])[kept]
            bound_s[done : done + len(more)] = more
            done += len(more)
        return bound_s


def error_bound(run: Run, lateness_s: Seconds) -> ErrorBound:
    """The bound for each request of a run. `lateness_s`: sent − released where the load generator
    alone is responsible for it; NaN elsewhere.

    A simulated run has no workers, and its reads are exact.
    """
    workers = worker_delays(run.instrument, run.manifest.instrument_limits)
    rows = run.request_rows

    def read(name: str) -> Seconds:
        return read_delay(workers, rows["shard"], np.ascontiguousarray(rows[name]))

    done_s = read("done_s")
    return ErrorBound(
        late_s=np.nan_to_num(np.maximum(lateness_s, 0.0)),
        first_token_s=read("first_token_s"),
        first_answer_s=read("first_answer_s"),
        last_token_s=read("last_token_s"),
        done_s=done_s,
        workers=workers,
        is_unknown_failure=np.isin(rows["status"], _GIVEN_UP) & (done_s > UNSEEN_S),
    )


def worker_delays(client: ClientReport, limits: InstrumentLimits) -> tuple[WorkerDelay, ...]:
    sharing = core_sharing(client)
    is_shared = sharing is not None and sharing.is_shared(sharing_limit(limits))
    return tuple(
        WorkerDelay(shard.shard, usual_delay_s(shard, limits, is_shared), _stalls(shard))
        for shard in client.shards
    )


def usual_delay_s(shard: SelfReport, limits: InstrumentLimits, is_shared: bool) -> float:
    """How late a read of this worker can have been outside its stalls, seconds: the largest of four
    readings of the same delay.

    - The p99 lag of the event loop. Outside stalls it is 5 ms at most. Without a record of stalls
      the largest lag counts for every read, unless it is below 5 ms.
    - Twice the mean wait of bytes in the sockets: the last read of a burst.
    - The p99 of an exponential delay whose mean is the run-queue delay of a probe period: 4.6 × the
      share of the run × 10 ms.
    - 5 ms if the worker's CPU was full, throttled or shared, because the probes may then have
      missed the delay.
    """
    lag, backlog = shard.loop_lag_s, shard.backlog
    readings = [0.0]
    if lag.n:
        is_placed = shard.stalls is not None or lag.max <= UNSEEN_S
        readings.append(min(lag.p99, UNSEEN_S) if is_placed else lag.max)
    if backlog is not None and backlog.waiting >= LEAST_WAITING:
        readings.append(_BURST * backlog.wait_mean_s)
    if shard.run_delay_share is not None:
        readings.append(_TAIL * shard.run_delay_share * PROBE_PERIOD_S)
    is_full = (shard.cpu_share or 0.0) > limits.cpu_share
    is_throttled = (shard.throttled_share or 0.0) > limits.run_delay_share
    if is_full or is_throttled or is_shared:
        readings.append(UNSEEN_S)
    return max(readings)


def _stalls(shard: SelfReport) -> NDArray[np.float64]:
    spans = () if shard.stalls is None else shard.stalls.spans_s
    return np.array(spans, np.float64).reshape(-1, 3)


def read_delay(
    workers: Sequence[WorkerDelay], shard: NDArray[np.integer], read_s: Seconds
) -> Seconds:
    """The largest delay of reads stamped at `read_s` by the workers numbered `shard`."""
    delay_s = np.zeros(len(read_s))
    for worker in workers:
        mine = shard == worker.shard
        delay_s[mine] = worker.at(read_s[mine])
    return delay_s


def shifted(
    run: Run, columns: PerRequest, bound: ErrorBound, sign: int, has_gaps: bool
) -> PerRequest:
    """The columns with every latency at the far end of its bound: `sign` +1 the slowest, −1 the
    fastest that the measurements allow, never below 0. Gaps between chunks, which are many, move
    only with `has_gaps`.

    At the fastest, a request that the load generator gave up while its reads were late counts as
    answered at once, because its answer may have waited unread. At the slowest no further request
    fails: a late load generator can cause a timeout but cannot prevent it.
    """
    maybe_ok = bound.is_unknown_failure if sign < 0 else np.zeros(len(columns.is_ok), bool)

    def moved(values: Seconds, by_s: Seconds) -> Seconds:
        return np.maximum(values + sign * by_s, 0.0)

    latencies: dict[str, Any] = {
        name: np.where(maybe_ok, 0.0, moved(columns.column(name), bound.of(name, columns)))
        for name in _SHIFTED
    }
    moved_columns = replace(
        columns,
        is_ok=columns.is_ok | maybe_ok,
        has_token=columns.has_token | maybe_ok,
        **latencies,
    )
    if not has_gaps:
        return moved_columns
    gap_s = bound.of_gaps(run, columns)
    gaps = replace(columns.gaps, icl_s=moved(columns.gaps.icl_s, gap_s))
    max_itl_s = greatest(gaps.itl_s, gaps, len(maybe_ok))
    return replace(
        moved_columns,
        gaps=gaps,
        max_itl_s=np.where(columns.has_no_itl, np.nan, max_itl_s),
        max_stall_s=greatest(gaps.icl_s, gaps, len(maybe_ok)),
    )
