"""Probe of a shard's event loop: some 100 times a second it samples how late a socket read would
be, how many received bytes wait unread, and how fast the processor runs.

The samples separate the client's delays from the server's; docs/decisions 0038 and 0054.
"""

from __future__ import annotations

import fcntl
import math
import random
import statistics
import sys
import termios
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from loadgen.manifest.self_report import (
    PROBE_PERIOD_S,
    BacklogReport,
    LoopLag,
    ProcessorReport,
    StallsReport,
)
from loadgen.system.timer import Timer

STALL_S = 0.005  # a probe later than this marks a stall of the client
_MOST_STALLS = 10_000
MOST_SOCKETS = 16  # per probe, which takes 10 µs
Sockets = Callable[[int], tuple[int, Sequence[int]]]
"""`Transport.in_flight`: the number of connections in flight, and some of their descriptors."""
_SLOW = 3.0  # times the median; a busy neighbour thread on the core costs less than twice
_LEAST_SAMPLES = 3
_TRIES = 3  # the fastest counts, so that an interrupted try does not look slow
_WORK = range(100)  # additions, 1.2 µs, without touching memory
_SLOW_SPAN_S = 0.02  # most that a single slow sample stands for


class LoopProbe:
    """An alarm every 5 to 15 ms, handled by the loop like a socket: a read that becomes due
    together with the probe is as late as the probe. Times are those of `timer`; each probe calls
    `on_probe`.

    The gaps are drawn uniformly (`uniform` returns numbers in [0, 1)). With a fixed gap of 10 ms
    the probe met the bursts of a server that emits all tokens every 10 ms either always or never.

    A stall lasts from the last punctual probe to the next punctual probe, because only these prove
    that the loop was running.
    """

    def __init__(
        self,
        timer: Timer,
        on_probe: Callable[[], None] = lambda: None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._timer, self._on_probe, self._uniform = timer, on_probe, uniform
        self._lags_s: list[float] = []
        self._stalls: list[list[float]] = []  # [start, end, lag of the latest probe], by time
        self._is_stalled = self._is_stopped = False
        self._due_s = self._punctual_s = 0.0

    def start(self) -> None:
        self._punctual_s = self._timer.now_s()
        self._due_s = self._punctual_s + self._gap_s()
        self._timer.arm(self._due_s, self._probe)

    def stop(self) -> None:
        """Stops probing; a stall that still lasts ends now."""
        self._is_stopped = True
        if self._is_stalled:
            self._stalls[-1][1] = self._timer.now_s()

    def summary(self) -> tuple[LoopLag, StallsReport]:
        lags = np.sort(np.array(self._lags_s)) if self._lags_s else np.zeros(1)

        def quantile(q: float) -> float:
            return float(lags[math.ceil(q * len(lags)) - 1])

        lag = LoopLag(n=len(self._lags_s), p50=quantile(0.5), p99=quantile(0.99), max=quantile(1.0))
        spans_s = tuple(
            (round(from_s, 6), round(until_s, 6), round(lag_s, 6))
            for from_s, until_s, lag_s in self._stalls
        )
        return lag, StallsReport(over_s=STALL_S, spans_s=spans_s)

    def _probe(self) -> None:
        """Records a lag for each probe that a delay displaced. Otherwise a stall of 2 s would count
        as a single late probe instead of 200 (coordinated omission). The next probe after a stall
        is due at once."""
        if self._is_stopped:
            return
        now_s = self._timer.now_s()
        lag_s = max(0.0, now_s - self._due_s)
        self._note_stall(now_s, lag_s)
        self._on_probe()
        self._lags_s.append(lag_s)
        due_s = self._due_s + self._gap_s()
        while due_s < now_s:
            self._lags_s.append(now_s - due_s)
            due_s += self._gap_s()
        self._due_s = now_s if lag_s > STALL_S else due_s
        self._timer.arm(self._due_s, self._probe)

    def _gap_s(self) -> float:
        return PROBE_PERIOD_S * (0.5 + self._uniform())

    def _note_stall(self, now_s: float, lag_s: float) -> None:
        if lag_s > STALL_S:
            # Beyond the limit, the rest of the run counts as a single stall.
            if self._is_stalled or len(self._stalls) == _MOST_STALLS:
                self._stalls[-1][2] = max(self._stalls[-1][2], lag_s)
            else:
                self._stalls.append([self._punctual_s, now_s, lag_s])
            self._is_stalled = True
            return
        if self._is_stalled:
            self._stalls[-1][1] = now_s
            self._is_stalled = False
        self._punctual_s = now_s


class ReceiveBacklog:
    """Samples of the bytes that wait unread in the sockets of `sockets`. Bytes that wait are
    stamped late, and no read notices it.

    By Little's law the mean time that bytes wait is the mean number of connections with unread
    bytes, divided by the reads per second. The probe queues for the loop like a read, so it sees
    that number as it is on average. Sampling costs the reads nothing; the kernel's own receive
    timestamps would cost more than the rest of a read.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._n_probes = self._n_sockets = self._n_waiting = self._bytes_max = 0
        self._waiting_sum = 0.0

    def sample(self) -> None:
        self._n_probes += 1
        n_in_flight, descriptors = self._sockets(MOST_SOCKETS)
        if not descriptors:
            return
        sizes = [unread_bytes(descriptor) for descriptor in descriptors]
        n_waiting = sum(size > 0 for size in sizes)
        self._bytes_max = max(self._bytes_max, *sizes)
        self._n_sockets += len(descriptors)
        self._n_waiting += n_waiting
        self._waiting_sum += n_waiting * n_in_flight / len(descriptors)

    def summary(self, n_reads: int, window_s: float) -> BacklogReport | None:
        """None if no connection was sampled or nothing was read."""
        if not self._n_sockets or not n_reads:
            return None
        return BacklogReport(
            looks=self._n_sockets,
            waiting=self._n_waiting,
            bytes_max=self._bytes_max,
            reads=n_reads,
            wait_mean_s=self._waiting_sum / self._n_probes * window_s / n_reads,
        )


def unread_bytes(descriptor: int) -> int:
    """Bytes in a socket's receive queue. Source: ioctl(FIONREAD), tcp(7)."""
    try:
        size = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except (OSError, ValueError):  # closed since the transport listed it
        return 0
    return int.from_bytes(size, sys.byteorder)


class ProcessorSpeed:
    """Samples of the time that the same small work takes; the usual time is the run's median.

    Firmware that throttles a processor, and a host that throttles a virtual machine, appear in no
    clock of the system: the thread has the whole core but gets a tenth of the work done. Seen on a
    rented machine: 8 % of the usual speed for 20 ms every 1.5 s, without steal or run-queue delay.

    The time between two slow samples is slow. A slow sample next to a normal sample stands for at
    most 20 ms. Slow phases between two samples are missed.
    """

    def __init__(self, work_s: Callable[[], float] | None = None) -> None:
        self._work_s = work_s or _work_s
        self._times_s, self._works_s = array("d"), array("d")

    def sample(self, now_s: float) -> None:
        self._times_s.append(now_s)
        self._works_s.append(self._work_s())

    def summary(self, stalls: Sequence[Sequence[float]] = ()) -> ProcessorReport | None:
        """`usual_s`: median time of the work. `slow_s`: total time at less than a third of the
        usual speed, `slow_in_stalls_s`: the part of it inside `stalls` ([start, end, …], sorted).
        `slow_speed`: median speed of the slow samples over the usual speed. None for fewer than
        three samples."""
        if len(self._works_s) < _LEAST_SAMPLES:
            return None
        usual_s = statistics.median(self._works_s)
        spans = self._slow_spans(_SLOW * usual_s)
        slow = [work_s for work_s in self._works_s if work_s > _SLOW * usual_s]
        return ProcessorReport(
            looks=len(self._works_s),
            usual_s=usual_s,
            slow_s=math.fsum(end_s - start_s for start_s, end_s in spans),
            slow_in_stalls_s=_overlap_s(spans, stalls),
            slow_speed=usual_s / statistics.median(slow) if slow else None,
        )

    def _slow_spans(self, limit_s: float) -> list[tuple[float, float]]:
        samples = zip(self._times_s, self._works_s, strict=True)
        spans = []
        for (before_s, before_work_s), (now_s, work_s) in pairwise(samples):
            if work_s > limit_s:
                is_between_slow = before_work_s > limit_s
                start_s = before_s if is_between_slow else max(before_s, now_s - _SLOW_SPAN_S)
                spans.append((start_s, now_s))
        return spans


def _overlap_s(spans: Sequence[tuple[float, float]], others: Sequence[Sequence[float]]) -> float:
    """Total time that is in a span of both lists; each is sorted and without overlaps."""
    overlaps_s, first = [], 0
    for start_s, end_s in spans:
        while first < len(others) and others[first][1] <= start_s:
            first += 1
        k = first
        while k < len(others) and others[k][0] < end_s:
            overlaps_s.append(min(end_s, others[k][1]) - max(start_s, others[k][0]))
            k += 1
    return math.fsum(overlaps_s)


def _work_s() -> float:
    best_ns = 1 << 62
    for _ in range(_TRIES):
        started_ns = time.perf_counter_ns()
        sum(_WORK)
        best_ns = min(best_ns, time.perf_counter_ns() - started_ns)
    return best_ns * 1e-9
