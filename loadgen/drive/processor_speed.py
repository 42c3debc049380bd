"""How fast the processor runs, looked at with every probe of the event loop while measuring.

A processor that its firmware slows down, for heat or for power, and a host that does so for all its
virtual machines, take nothing that any clock of the system counts: the client's thread has the
whole core and gets a tenth of the work done. Seen on a rented machine: 20 ms at 8 % of the usual
speed every 1.5 s, with no time stolen and nothing waiting to run.
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

from loadgen.self_report import ProcessorReport

SLOW = 3.0
"""Times as long as usual; a neighbour on the other thread of a core costs less than two."""
_LEAST_LOOKS = 3
_TRIES = 3  # the fastest of which counts: what interrupts one of them is no slowness
_WORK = range(100)  # 1.2 µs, without touching memory
_STANDS_FOR_S = 0.02  # a slow look beside one that was not


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

    def summary(self, stalls: Sequence[Sequence[float]] = ()) -> ProcessorReport | None:
        """`usual_s` of the work; for how long in all it took three times as long (`slow_s`), and
        while the loop was stalled (`slow_in_stalls_s`; `stalls` are [from, until, …] by time); and
        how fast the processor was then, over its usual speed (`slow_speed`). None of less than
        three looks."""
        if len(self._works_s) < _LEAST_LOOKS:
            return None
        usual_s = statistics.median(self._works_s)
        spans = self._slow_spans(SLOW * usual_s)
        slow = [took_s for took_s in self._works_s if took_s > SLOW * usual_s]
        return ProcessorReport(
            looks=len(self._works_s),
            usual_s=usual_s,
            slow_s=math.fsum(until_s - from_s for from_s, until_s in spans),
            slow_in_stalls_s=_shared_s(spans, stalls),
            slow_speed=usual_s / statistics.median(slow) if slow else None,
        )

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
