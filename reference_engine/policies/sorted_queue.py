"""Queues of waiting requests that stay sorted as requests come and go.

Sorting the whole queue in every step is too slow with thousands of waiting requests. A policy files
each request once, on arrival, under a key that stays valid while the request waits. A score that
grows with the time waited is such a key if all scores grow at the same rate, because their order
then never changes. `ScoredQueue` sorts scores that grow at different rates.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, merge
from math import inf
from operator import itemgetter
from typing import NamedTuple

from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

Key = tuple[float, ...]  # lowest first
Ranked = tuple[Key, Request]

by_rank = itemgetter(0)


def ranked_prefills(view: View, rank: Callable[[Request], Key]) -> list[Ranked]:
    """The running requests in prefill with their ranks, lowest rank first."""
    return sorted(((rank(request), request) for request in view.prefilling), key=by_rank)


class SortedQueue:
    """Requests by key, lowest first, equal keys in the order of filing.

    No hook reports an admission to the policy, so an admitted request stays filed until a walk
    reaches and drops it. A step costs as many entries as it visits. Filing and dropping cost a
    binary search and a shift of the entries behind (10 µs at 100 000 entries).
    """

    __slots__ = ("_entries", "_n_put", "_places")

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Request]] = []
        self._places: dict[str, tuple[Key, int]] = {}
        self._n_put = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def put(self, request: Request, key: Key) -> None:
        """File a request, or move it to another key."""
        self.drop(request.id)
        self._n_put += 1
        self._places[request.id] = key, self._n_put
        insort(self._entries, (key, self._n_put, request))

    def drop(self, request_id: str) -> bool:
        """Remove a request; False when it is not filed."""
        place = self._places.pop(request_id, None)
        if place is None:
            return False
        # A tuple sorts just before the tuples it is a prefix of: requests are never compared.
        del self._entries[bisect_left(self._entries, place)]
        return True

    def entries(self) -> Iterator[Ranked]:
        """All filed requests in order, including admitted requests that no walk has dropped yet."""
        return ((key, request) for key, _, request in self._entries)

    def walk(self, view: View) -> Iterator[Ranked]:
        """The waiting requests in order. Do not call `put` or `drop` during a walk."""
        i, entries = 0, self._entries
        while i < len(entries):
            key, _, request = entries[i]
            if view.is_waiting(request.id):
                yield key, request
                i += 1
            else:
                del entries[i], self._places[request.id]

    def first(self, view: View) -> Ranked | None:
        """The first waiting request with its key."""
        return next(self.walk(view), None)


class OverdueQueue:
    """Requests by the instant at which each becomes overdue.

    An overdue request goes before all that are not, and after those that became overdue earlier.
    This bounds the wait under every policy that uses the queue.
    """

    __slots__ = ("_instants", "_queue")

    def __init__(self) -> None:
        self._queue = SortedQueue()
        self._instants: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._instants

    def put(self, request: Request, overdue_s: float) -> None:
        """File a request, overdue from the instant `overdue_s` on (infinity: never)."""
        self._instants[request.id] = overdue_s
        if overdue_s < inf:
            self._queue.put(request, (overdue_s,))

    def drop(self, request_id: str) -> None:
        self._instants.pop(request_id, None)
        self._queue.drop(request_id)

    def overdue_s(self, request_id: str) -> float:
        """The instant at which a filed request becomes overdue."""
        return self._instants[request_id]

    def rank(self, request_id: str, key: Key, now_s: float) -> Key:
        """The rank of a filed request: its overdue instant, or `key` while it is not overdue."""
        overdue_s = self._instants[request_id]
        return (0.0, overdue_s) if overdue_s <= now_s else (1.0, *key)

    def overdue_first(self, others: Iterator[Ranked], view: View) -> Iterator[Ranked]:
        """The overdue waiting requests, longest overdue first, then the rest of `others`; with
        ranks as by `rank`."""
        now_s, instants = view.now_s, self._instants
        for key, request in self._queue.walk(view):
            if key[0] > now_s:
                break
            yield (0.0, *key), request
        for key, request in others:
            if instants[request.id] > now_s:
                yield (1.0, *key), request


_MOST_VOID = 64  # earlier filings, beyond one for each request


class ScoreSegment(NamedTuple):
    """A linear piece of a score: `at_0 + slope · t` until the instant `until_s`."""

    at_0: float
    slope: float
    until_s: float = inf


class ScoredQueue:
    """Waiting requests by scores that are piecewise linear in time, highest score first.

    Scores of equal slope never change their order, so each slope has a sorted lane and a walk
    merges the lanes. When a score changes its slope (a term reaches its cap, a deadline comes
    near), `refile` moves the request to the lane of the new slope. `segment(request, t)` is the
    piece of the score that is valid at the instant t.
    """

    __slots__ = ("_filed", "_lanes", "_n_filed", "_segment", "_slope_changes")

    def __init__(self, segment: Callable[[Request, float], ScoreSegment]) -> None:
        self._segment = segment
        self._lanes: dict[float, SortedQueue] = {}  # by slope
        self._filed: dict[str, tuple[float, int]] = {}  # slope, number of the last filing
        self._slope_changes: list[
            tuple[float, int, Request]
        ] = []  # a heap; earlier filings are void
        self._n_filed = 0

    def put(self, request: Request, now_s: float) -> None:
        """File a request by its score at `now_s`."""
        self.drop(request.id)
        at_0, slope, until_s = self._segment(request, now_s)
        self._n_filed += 1
        self._filed[request.id] = slope, self._n_filed
        self._lanes.setdefault(slope, SortedQueue()).put(request, (-at_0,))
        if until_s < inf:
            heappush(self._slope_changes, (until_s, self._n_filed, request))
            if len(self._slope_changes) > 2 * len(self._filed) + _MOST_VOID:
                self._forget_void()

    def _forget_void(self) -> None:
        """Drop earlier filings: each holds a request until its instant comes."""
        self._slope_changes = [
            change
            for change in self._slope_changes
            if self._filed.get(change[2].id, (0.0, 0))[1] == change[1]
        ]
        heapify(self._slope_changes)

    def drop(self, request_id: str) -> None:
        slope, _ = self._filed.pop(request_id, (0.0, 0))
        lane = self._lanes.get(slope)
        if lane is not None and lane.drop(request_id) and not lane:
            del self._lanes[slope]

    def refile(self, view: View) -> None:
        """Move requests whose score has changed slope to their new lanes. Call before `walk`."""
        while self._slope_changes and self._slope_changes[0][0] <= view.now_s:
            _, n_filed, request = heappop(self._slope_changes)
            _, n_last = self._filed.get(request.id, (0.0, 0))
            if n_filed == n_last and view.is_waiting(request.id):
                self.put(request, view.now_s)

    def walk(self, view: View) -> Iterator[Ranked]:
        """The waiting requests with their negated scores of now, lowest first."""
        lanes = (self._walk(slope, lane, view) for slope, lane in self._lanes.items())
        return merge(*lanes, key=by_rank)

    def _walk(self, slope: float, lane: SortedQueue, view: View) -> Iterator[Ranked]:
        grown = slope * view.now_s
        for key, request in lane.walk(view):
            yield (key[0] - grown,), request
