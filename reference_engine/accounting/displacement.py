"""Displacement: the wait added to earlier arrivals when a request is admitted before them.

Waiting requests are kept in the order of their arrival numbers. The cost of a jump applies to all
requests before the jumping one, but is written only once, at the last of them: a request's total is
the sum from its own place to the end. A request that leaves hands the value at its place to the
request before it.

    arrival  3   5   8   9        a jump of number 7, 0.2 s: written at 5, added to 3 and 5
    written  0  .2   0   0
"""

from __future__ import annotations

from bisect import bisect_left


class Displacements:
    """Arrival numbers of the waiting requests, and the seconds by which jumps push them back."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._written: list[float] = []
        self._is_all_zero = True

    def enter(self, arrival: int) -> None:
        at = bisect_left(self._arrivals, arrival)
        # The values behind its place belong to the requests before it, but not to itself.
        earlier_s = self._sum_from(at)
        self._arrivals.insert(at, arrival)
        self._written.insert(at, -earlier_s)
        if at:
            self._written[at - 1] += earlier_s

    def leave(self, arrival: int) -> float:
        """Remove a request and return the seconds by which it was pushed back while it was here;
        0 for a request that is not."""
        at = self._index(arrival)
        if at is None:
            return 0.0
        pushed_back_s = self._sum_from(at)
        del self._arrivals[at]
        written = self._written.pop(at)
        if at:
            self._written[at - 1] += written
        elif not self._arrivals:
            self._is_all_zero = True
        return pushed_back_s

    def so_far(self, arrival: int) -> float:
        """As `leave`, without leaving."""
        at = self._index(arrival)
        return 0.0 if at is None else self._sum_from(at)

    def n_before(self, arrival: int) -> int:
        """The number of waiting requests that arrived earlier."""
        return bisect_left(self._arrivals, arrival)

    def jump(self, arrival: int, seconds: float) -> None:
        """Push all earlier arrivals back by `seconds`."""
        at = bisect_left(self._arrivals, arrival)
        if at:
            self._written[at - 1] += seconds
            self._is_all_zero = False

    def _sum_from(self, at: int) -> float:
        return 0.0 if self._is_all_zero else sum(self._written[at:])

    def _index(self, arrival: int) -> int | None:
        at = bisect_left(self._arrivals, arrival)
        return at if at < len(self._arrivals) and self._arrivals[at] == arrival else None
