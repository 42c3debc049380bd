"""How late a read of this event loop can be, looked at a hundred times a second while measuring."""

from __future__ import annotations

import fcntl
import math
import statistics
import sys
import termios
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from loadgen.timer import Timer

PERIOD_S = 0.01
STALL_S = 0.005  # a probe later than this is a stall of the client's
_MOST_STALLS = 10_000
MOST_LOOKS = 16  # at a time: 10 µs, a hundred times a second
Sockets = Callable[[int], tuple[int, Sequence[int]]]
"""How many connections are in flight, and the file descriptors of so many of them at most."""

SLOW = 3.0
"""Times as long as usual; a neighbour on the other thread of a core costs less than two."""
_LEAST_LOOKS = 3
_TRIES = 3  # the fastest of which counts: what interrupts one of them is no slowness
_WORK = range(100)  # 1.2 µs, without touching memory
_STANDS_FOR_S = 0.02  # a slow look beside one that was not


class LoopProbe:
    """An alarm every 10 ms that takes its turn among the sockets of the loop: what it is late by, a
    read that became due with it is, too. Instants are those of `timer`.

    A stall lasts from the last probe that came on time to the next one that does: only those two
    say that the loop was alive. `look` is called by each probe.
    """

    def __init__(self, timer: Timer, look: Callable[[], None] = lambda: None) -> None:
        self._timer, self._look = timer, look
        self._lags_s: list[float] = []
        self._stalls: list[list[float]] = []  # [from, until, the latest probe's lag], by time
        self._is_stalled = self._is_over = False
        self._due_s = self._alive_s = 0.0

    def start(self) -> None:
        self._alive_s = self._timer.now_s()
        self._due_s = self._alive_s + PERIOD_S
        self._timer.arm(self._due_s, self._probe)

    def stop(self) -> None:
        """A stall that goes on is over with the measuring."""
        self._is_over = True
        if self._is_stalled:
            self._stalls[-1][1] = self._timer.now_s()

    def summary(self) -> dict[str, Any]:
        lags = np.sort(np.array(self._lags_s)) if self._lags_s else np.zeros(1)
        rank = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        quantiles = {
            k: float(lags[max(0, int(np.ceil(q * len(lags))) - 1)]) for k, q in rank.items()
        }
        return {
            "loop_lag_s": {"n": len(self._lags_s), **quantiles},
            "stalls": {
                "over_s": STALL_S,
                "spans_s": [[round(instant, 6) for instant in stall] for stall in self._stalls],
            },
        }

    def _probe(self) -> None:
        """A stall is as many late probes as would have run in it: one long stall must weigh what
        it lasted, or the probe would omit what it is there to see."""
        if self._is_over:
            return
        now_s = self._timer.now_s()
        lag_s = max(0.0, now_s - self._due_s)
        self._note(now_s, lag_s)
        self._look()
        self._lags_s.append(lag_s)
        while lag_s > PERIOD_S:
            lag_s -= PERIOD_S
            self._lags_s.append(lag_s)
        self._due_s = max(self._due_s, now_s - PERIOD_S) + PERIOD_S
        self._timer.arm(self._due_s, self._probe)

    def _note(self, now_s: float, lag_s: float) -> None:
        if lag_s > STALL_S:
            # Past the bound all of the rest is one stall: nobody trusts such a run.
            if self._is_stalled or len(self._stalls) == _MOST_STALLS:
                self._stalls[-1][2] = max(self._stalls[-1][2], lag_s)
            else:
                self._stalls.append([self._alive_s, now_s, lag_s])
            self._is_stalled = True
            return
        if self._is_stalled:
            self._stalls[-1][1] = now_s
            self._is_stalled = False
        self._alive_s = now_s


class ReceiveBacklog:
    """What was seen waiting in the receive queues of `sockets`."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._n_probes = self._n_looks = self._n_waiting = self._bytes_max = 0
        self._waiting_sum = 0.0

    def look(self) -> None:
        self._n_probes += 1
        n, descriptors = self._sockets(MOST_LOOKS)
        if not descriptors:
            return
        waiting = 0
        for descriptor in descriptors:
            size = unread_bytes(descriptor)
            waiting += size > 0
            self._bytes_max = max(self._bytes_max, size)
        self._n_looks += len(descriptors)
        self._n_waiting += waiting
        self._waiting_sum += waiting * n / len(descriptors)

    def summary(self, n_reads: int, window_s: float) -> dict[str, Any] | None:
        """None where no connection could be looked at, or nothing was read."""
        if not self._n_looks or not n_reads:
            return None
        return {
            "looks": self._n_looks,
            "waiting": self._n_waiting,
            "bytes_max": self._bytes_max,
            "reads": n_reads,
            "wait_mean_s": self._waiting_sum / self._n_probes * window_s / n_reads,
        }


def unread_bytes(descriptor: int) -> int:
    """Bytes in a socket's receive queue. Source: ioctl(FIONREAD), tcp(7)."""
    try:
        told = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except (OSError, ValueError):  # closed since it was named
        return 0
    return int.from_bytes(told, sys.byteorder)


class ProcessorSpeed:
    """The same small work, timed at each look; usual is the median of a run.

    The time between two looks is slow where both were; beside one that was not, a slow look stands
    for 20 ms at most. A slow phase between two looks is not seen.
    """

    def __init__(self, work_s: Callable[[], float] | None = None) -> None:
        self._work_s = work_s or _work_s
        self._instants_s, self._works_s = array("d"), array("d")

    def look(self, now_s: float) -> None:
        self._instants_s.append(now_s)
        self._works_s.append(self._work_s())

    def summary(self, stalls: Sequence[Sequence[float]] = ()) -> dict[str, Any] | None:
        """`usual_s` of the work; for how long in all it took three times as long (`slow_s`), and
        while the loop was stalled (`slow_in_stalls_s`; `stalls` are [from, until, …] by time); and
        how fast the processor was then, over its usual speed (`slow_speed`). None of less than
        three looks."""
        if len(self._works_s) < _LEAST_LOOKS:
            return None
        usual_s = statistics.median(self._works_s)
        spans = self._slow_spans(SLOW * usual_s)
        slow = [took_s for took_s in self._works_s if took_s > SLOW * usual_s]
        return {
            "looks": len(self._works_s),
            "usual_s": usual_s,
            "slow_s": math.fsum(until_s - from_s for from_s, until_s in spans),
            "slow_in_stalls_s": _shared_s(spans, stalls),
            "slow_speed": usual_s / statistics.median(slow) if slow else None,
        }

    def _slow_spans(self, over_s: float) -> list[tuple[float, float]]:
        looks = zip(self._instants_s, self._works_s, strict=True)
        spans = []
        for (before_s, then_s), (now_s, took_s) in pairwise(looks):
            if then_s > over_s and took_s > over_s:
                spans.append((before_s, now_s))
            elif took_s > over_s:
                spans.append((max(before_s, now_s - _STANDS_FOR_S), now_s))
        return spans


def _shared_s(spans: Sequence[tuple[float, float]], others: Sequence[Sequence[float]]) -> float:
    """How long both last; each by time and without overlaps."""
    shared, place = [], 0
    for from_s, until_s in spans:
        while place < len(others) and others[place][1] <= from_s:
            place += 1
        reached = place
        while reached < len(others) and others[reached][0] < until_s:
            begin_s, end_s, *_ = others[reached]
            shared.append(min(until_s, end_s) - max(from_s, begin_s))
            reached += 1
    return math.fsum(shared)


def _work_s() -> float:
    best_ns = 1 << 62
    for _ in range(_TRIES):
        started_ns = time.perf_counter_ns()
        sum(_WORK)
        best_ns = min(best_ns, time.perf_counter_ns() - started_ns)
    return best_ns * 1e-9
