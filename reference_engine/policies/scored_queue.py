"""Requests by a score that grows with time, at different speeds for different requests.

Scores that are straight lines of one slope never change their order, so each slope has a lane, and
only the heads of the lanes are compared. A score that bends (a term reached its cap, a deadline
came near) moves its request to another lane at the instant of the bend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge
from math import inf
from typing import NamedTuple

from reference_engine.policies.sorted_queue import Key, SortedQueue
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


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
