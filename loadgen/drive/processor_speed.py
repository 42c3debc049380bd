"""How fast the processor runs, looked at with every probe of the event loop while measuring.

A processor that its firmware slows down, for heat or for power, and a host that does so for all its
virtual machines, take nothing that any clock of the system counts: the client's thread has the
whole core and gets a tenth of the work done. Seen on a rented machine: 20 ms at 8 % of the usual
speed every 1.5 s, with no time stolen and nothing waiting to run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

SLOW = 3.0
"""Times as long as usual; a neighbour on the other thread of a core costs less than two."""
_TRIES = 3  # the fastest of which counts: what interrupts one of them is no slowness
_WORK = range(100)  # 1.2 µs, without touching memory


class ProcessorSpeed:
    """The same small work, timed at each look; usual is the median of a run.

    A look stands for the time since the one before. That is all a slow phase shows: one that lies
    between two looks is not seen, and one that both ends of a stall saw was as long as the stall.
    """

    def __init__(self, work_s: Callable[[], float] | None = None) -> None:
        self._work_s = work_s or _work_s
        self._looks: list[tuple[float, float]] = []  # (instant, what the work took), s

    def look(self, now_s: float) -> None:
        self._looks.append((now_s, self._work_s()))

    def summary(self) -> dict[str, Any] | None:
        """`usual_s` of the work; `slow_s` is how long in all it took three times as long, and
        `slow_speed` how fast the processor was then, over its usual speed. None without two
        looks."""
        if len(self._looks) < 2:
            return None
        usual_s = statistics.median(took_s for _, took_s in self._looks)
        slow = [
            (now_s - before_s, took_s)
            for (before_s, _), (now_s, took_s) in zip(self._looks, self._looks[1:], strict=False)
            if took_s > SLOW * usual_s
        ]
        return {
            "looks": len(self._looks),
            "usual_s": usual_s,
            "slow_s": sum(for_s for for_s, _ in slow),
            "slow_speed": usual_s / statistics.median(took_s for _, took_s in slow)
            if slow
            else None,
        }


def _work_s() -> float:
    best_ns = 1 << 62
    for _ in range(_TRIES):
        started_ns = time.perf_counter_ns()
        sum(_WORK)
        best_ns = min(best_ns, time.perf_counter_ns() - started_ns)
    return best_ns * 1e-9
