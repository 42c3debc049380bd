"""The levels of a multi-level feedback queue: who is on which, and whose quantum is up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from reference_engine.policies.sorted_queue import Ranking
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


@dataclass(slots=True)
class _Stay:
    """A stay in the batch: its number, and when its quantum ends on the clock of served time."""

    n: int
    end_s: float


class Levels:
    """Level i has a quantum of `base_s` · `ratio`^i seconds. On a level, requests are in the order
    in which they joined it.

    Running requests are served at one rate, so that the end of a quantum is an instant on a clock
    that adds up step durations, `served_s`: a step costs only those whose quantum it ends.
    """

    def __init__(self, base_s: float, ratio: float, n_levels: int) -> None:
        self.quanta_s = [base_s * ratio**level for level in range(n_levels)]
        self.ranking = Ranking()
        self.served_s = 0.0
        self._level_of: dict[str, int] = {}
        self._running: list[dict[str, Request]] = [{} for _ in range(n_levels)]
        self._stays: dict[str, _Stay] = {}
        self._ends: list[tuple[float, int, Request]] = []  # a heap; may be too early, or void
        self._n_stays = self._n_joined = 0

    def level(self, request_id: str) -> int:
        return self._level_of[request_id]

    def left_s(self, request_id: str) -> float | None:
        """What is left of its quantum; None while it does not run."""
        stay = self._stays.get(request_id)
        return None if stay is None else stay.end_s - self.served_s

    def enter(self, request: Request, read_s: float, overdue_s: float) -> None:
        """A new request joins the first level in whose quantum its prompt can be read."""
        fits = (level for level, quantum_s in enumerate(self.quanta_s) if quantum_s >= read_s)
        self._level_of[request.id] = next(fits, len(self.quanta_s) - 1)
        self.wait(request, overdue_s)

    def wait(self, request: Request, overdue_s: float) -> None:
        """It waits, at the end of its level."""
        self._stop(request.id)
        self._n_joined += 1
        key = float(self._level_of[request.id]), float(self._n_joined)
        self.ranking.put(request, key, overdue_s)

    def begin(self, request: Request, read_s: float, is_at_top: bool) -> None:
        """It was admitted, with a quantum that is enough to read what there is; `is_at_top` moves
        it to the first level."""
        if is_at_top:
            self._level_of[request.id] = 0
        level = self._level_of[request.id]
        self._running[level][request.id] = request
        self._n_stays += 1
        end_s = self.served_s + max(self.quanta_s[level], read_s)
        self._stays[request.id] = _Stay(self._n_stays, end_s)
        heappush(self._ends, (end_s, self._n_stays, request))

    def drop(self, request_id: str) -> None:
        self.ranking.drop(request_id)
        self._stop(request_id)
        self._level_of.pop(request_id, None)

    def serve(self, duration_s: float, skipped: Iterable[str]) -> None:
        """All running requests but the skipped ones took part in a step. Those whose quantum is
        used up go to the end of the next level."""
        for request_id in skipped:
            if request_id in self._stays:
                self._stays[request_id].end_s += duration_s
        self.served_s += duration_s
        ends = self._ends
        while ends and ends[0][0] <= self.served_s:
            _, n, request = heappop(ends)
            stay = self._stays.get(request.id)
            if stay is None or stay.n != n:
                continue
            if stay.end_s <= self.served_s and not self._demote(request, stay):
                continue
            heappush(ends, (stay.end_s, n, request))

    def running_below(self, level: int, view: View) -> Iterator[Request]:
        """Decoding requests of lower levels than this one, lowest first, last joined first."""
        for running in reversed(self._running[level + 1 :]):
            for request in reversed(running.values()):
                if view.is_decoding(request.id):
                    yield request

    def _demote(self, request: Request, stay: _Stay) -> bool:
        """One level down; False on the last, where it may stay."""
        level = self._level_of[request.id]
        if level + 1 == len(self.quanta_s):
            return False
        del self._running[level][request.id]
        self._level_of[request.id] = level + 1
        self._running[level + 1][request.id] = request
        self._n_joined += 1
        self.ranking.move(request.id, (float(level + 1), float(self._n_joined)))
        stay.end_s += self.quanta_s[level + 1]
        return True

    def _stop(self, request_id: str) -> None:
        if self._stays.pop(request_id, None) is not None:
            del self._running[self._level_of[request_id]][request_id]
