"""Requests in an order of a policy's own, kept as they come and go.

A policy may not look at every waiting request in every step. It files each once, when it arrives,
under a key that stays true while the request waits; scores that grow with the time waited are such
keys wherever all of them grow at one rate, because then their order never changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge
from math import inf
from typing import NamedTuple

from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

Key = tuple[float, ...]  # lowest first


class SortedQueue:
    """Requests by key, lowest first, equal keys in the order in which they were put here.

    Nobody tells a policy that a request was admitted; such a one is dropped when a walk comes to
    it. A step costs as many entries as it looks at; coming and going costs a binary search and
    moving the pointers behind (10 µs at 100 000 entries).
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
        """File it, or file it anew under another key."""
        self.drop(request.id)
        self._n_put += 1
        self._places[request.id] = key, self._n_put
        insort(self._entries, (key, self._n_put, request))

    def drop(self, request_id: str) -> bool:
        """Take it out; False when it is not here."""
        place = self._places.pop(request_id, None)
        if place is None:
            return False
        # A tuple sorts before those it is a prefix of.
        del self._entries[bisect_left(self._entries, place)]
        return True

    def entries(self) -> Iterator[tuple[Key, Request]]:
        """Everything filed, in order, whether it still waits or not."""
        return ((key, request) for key, _, request in self._entries)

    def walk(self, view: View) -> Iterator[tuple[Key, Request]]:
        """Those that wait, in order. Nothing may be put or dropped during a walk."""
        i, entries = 0, self._entries
        while i < len(entries):
            key, _, request = entries[i]
            if view.is_waiting(request.id):
                yield key, request
                i += 1
            else:
                del entries[i], self._places[request.id]

    def first(self, view: View) -> tuple[Key, Request] | None:
        """The first that waits."""
        entries = self._entries
        while entries:
            key, _, request = entries[0]
            if view.is_waiting(request.id):
                return key, request
            del entries[0], self._places[request.id]
        return None


class Patience:
    """Until when each request waits its turn. After that instant it is overdue: it comes before
    all that are not, and after those overdue before it. So nobody who came later overtakes it any
    more, which is the bound on waiting of every policy that uses this."""

    __slots__ = ("_instants", "_line")

    def __init__(self) -> None:
        self._line = SortedQueue()
        self._instants: dict[str, float] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._instants

    def put(self, request: Request, until_s: float) -> None:
        """`until_s` is an instant; infinity is for ever."""
        self._instants[request.id] = until_s
        if until_s < inf:
            self._line.put(request, (until_s,))

    def drop(self, request_id: str) -> None:
        self._instants.pop(request_id, None)
        self._line.drop(request_id)

    def until_s(self, request_id: str) -> float:
        """The instant at which it gets overdue."""
        return self._instants[request_id]

    def walk(self, view: View) -> Iterator[tuple[Key, Request]]:
        """The overdue ones, longest first."""
        for key, request in self._line.walk(view):
            if key[0] > view.now_s:
                return
            yield key, request


class Ranking:
    """Live requests by rank: the overdue ones first, then by the key they were filed under."""

    __slots__ = ("_keys", "_line", "patience")

    def __init__(self) -> None:
        self.patience = Patience()
        self._line = SortedQueue()
        self._keys: dict[str, Key] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether it was ever filed, and is not over."""
        return request_id in self._keys

    def put(self, request: Request, key: Key, overdue_s: float = inf) -> None:
        """File it under `key`, overdue from the instant `overdue_s` on."""
        self._keys[request.id] = key
        self._line.put(request, key)
        self.patience.put(request, overdue_s)

    def move(self, request_id: str, key: Key) -> None:
        """Another key for a running request, which is in no line."""
        self._keys[request_id] = key

    def drop(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        self._line.drop(request_id)
        self.patience.drop(request_id)

    def key(self, request_id: str) -> Key:
        """The key it was filed under."""
        return self._keys[request_id]

    def is_overdue(self, request_id: str, now_s: float) -> bool:
        return self.patience.until_s(request_id) <= now_s

    def rank(self, request_id: str, now_s: float) -> Key:
        """What it is ordered by at this instant, waiting or running."""
        until_s = self.patience.until_s(request_id)
        return (0.0, until_s) if until_s <= now_s else (1.0, *self._keys[request_id])

    def waiting(self, view: View) -> Iterator[tuple[Key, Request]]:
        """Those that wait, with their ranks."""
        now_s, patience = view.now_s, self.patience
        for key, request in patience.walk(view):
            yield (0.0, *key), request
        for key, request in self._line.walk(view):
            if patience.until_s(request.id) > now_s:
                yield (1.0, *key), request

    def reading(self, view: View) -> list[tuple[Key, Request]]:
        """The running ones that still read their prompt, with their ranks, in order."""
        now_s = view.now_s
        ranked = [(self.rank(request.id, now_s), request) for request in view.prefilling]
        ranked.sort(key=_rank_of)
        return ranked

    def worse(self, view: View, request: Request) -> list[str]:
        """Running requests that rank after this one, the last one first."""
        now_s = view.now_s
        own = self.rank(request.id, now_s)
        ranked = [(self.rank(other.id, now_s), other.id) for other in view.running]
        return [other_id for rank, other_id in sorted(ranked, reverse=True) if rank > own]


def _rank_of(entry: tuple[Key, Request]) -> Key:
    return entry[0]


class Stretch(NamedTuple):
    """A score as a straight line: `at_0 + slope · t` until the instant `until_s`."""

    at_0: float
    slope: float
    until_s: float = inf


class ScoredQueue:
    """Waiting requests, highest score first. `stretch(request, t)` is the score around t."""

    __slots__ = ("_bends", "_lane_of", "_lanes", "_n_filed", "_stretch")

    def __init__(self, stretch: Callable[[Request, float], Stretch]) -> None:
        self._stretch = stretch
        self._lanes: dict[float, SortedQueue] = {}
        self._lane_of: dict[str, tuple[float, int]] = {}  # slope, number of its last filing
        self._bends: list[tuple[float, int, Request]] = []  # a heap; older filings are void
        self._n_filed = 0

    def put(self, request: Request, now_s: float) -> None:
        """File it by its score of now."""
        self.drop(request.id)
        at_0, slope, until_s = self._stretch(request, now_s)
        self._n_filed += 1
        self._lane_of[request.id] = slope, self._n_filed
        self._lanes.setdefault(slope, SortedQueue()).put(request, (-at_0,))
        if until_s < inf:
            heappush(self._bends, (until_s, self._n_filed, request))

    def drop(self, request_id: str) -> None:
        slope, _ = self._lane_of.pop(request_id, (0.0, 0))
        lane = self._lanes.get(slope)
        if lane is not None and lane.drop(request_id) and not lane:
            del self._lanes[slope]

    def turn(self, view: View) -> None:
        """Move those whose scores bent. To be called before a walk."""
        bends = self._bends
        while bends and bends[0][0] <= view.now_s:
            _, n_filed, request = heappop(bends)
            if self._lane_of.get(request.id, (0.0, 0))[1] == n_filed and view.is_waiting(
                request.id
            ):
                self.put(request, view.now_s)

    def walk(self, view: View) -> Iterator[tuple[Key, Request]]:
        """Those that wait, with minus their scores of now, lowest first."""
        return merge(
            *(self._walk(slope, lane, view) for slope, lane in self._lanes.items()), key=_key_of
        )

    def _walk(self, slope: float, lane: SortedQueue, view: View) -> Iterator[tuple[Key, Request]]:
        grown = slope * view.now_s
        for key, request in lane.walk(view):
            yield (key[0] - grown,), request


def _key_of(entry: tuple[Key, Request]) -> Key:
    return entry[0]
