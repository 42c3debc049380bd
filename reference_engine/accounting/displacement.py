"""Who is pushed back when a request is let in before others that came earlier.

Waiting requests are kept in the order of their arrival numbers. What a jump costs all before it is
written once, at the last of them, and means everybody up to there; whoever leaves takes the sum
from its own place on, and hands what is written at its place to the one before it.

    arrival  3   5   8   9        a jump of number 7, 0.2 s: written at 5, suffered by 3 and 5
    written  0  .2   0   0
"""

from __future__ import annotations

from bisect import bisect_left


class Displacements:
    """Arrival numbers of the waiting, and seconds by which jumps pushed them back."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._written: list[float] = []
        self._is_even = True  # nothing but zeros is written

    def enter(self, arrival: int) -> None:
        at = bisect_left(self._arrivals, arrival)
        # What was written behind its place was suffered by those before it, but not by itself.
        earlier_s = self._from(at)
        self._arrivals.insert(at, arrival)
        self._written.insert(at, -earlier_s)
        if at:
            self._written[at - 1] += earlier_s

    def leave(self, arrival: int) -> float:
        """Seconds by which it was pushed back while it was here; 0 for one that is not."""
        at = bisect_left(self._arrivals, arrival)
        if at == len(self._arrivals) or self._arrivals[at] != arrival:
            return 0.0
        pushed_back_s = self._from(at)
        del self._arrivals[at]
        written = self._written.pop(at)
        if at:
            self._written[at - 1] += written
        elif not self._arrivals:
            self._is_even = True
        return pushed_back_s

    def so_far(self, arrival: int) -> float:
        """As `leave`, without leaving."""
        at = bisect_left(self._arrivals, arrival)
        is_here = at < len(self._arrivals) and self._arrivals[at] == arrival
        return self._from(at) if is_here else 0.0

    def n_before(self, arrival: int) -> int:
        """How many wait that came earlier."""
        return bisect_left(self._arrivals, arrival)

    def jump(self, arrival: int, seconds: float) -> None:
        """All that came earlier wait so much longer."""
        at = bisect_left(self._arrivals, arrival)
        if at:
            self._written[at - 1] += seconds
            self._is_even = False

    def _from(self, at: int) -> float:
        return 0.0 if self._is_even else sum(self._written[at:])
