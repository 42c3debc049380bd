"""Counters and histograms cheap enough for the engine thread: integers in lists, no locks.

One thread writes. Another may read at any time: a copy of a list is one operation of the
interpreter, and counts are derived from that copy, so a reader never sees a torn histogram, at
most one whose sum is an observation ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Histogram:
    """Observations by upper bucket edge (≤ edge), as Prometheus counts them."""

    __slots__ = ("_counts", "edges", "sum")

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(sorted(set(edges)))
        self._counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """`n` observations of `value`."""
        self._counts[bisect_left(self.edges, value)] += n
        self.sum += value * n

    def cumulative(self) -> list[int]:
        """Observations at or below each edge, and last all of them."""
        total, out = 0, []
        for count in list(self._counts):
            total += count
            out.append(total)
        return out


class LabelledSums(dict[tuple[str, ...], float]):
    """Sums by label values; unknown ones begin at 0."""

    def add(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        self[labels] = self.get(labels, 0.0) + amount


class BoundedNames:
    """The first `most` names as they are, all later ones as `other`: names come from clients, and
    a time series per name must not grow without bound."""

    def __init__(self, most: int = 64) -> None:
        self._most, self._known = most, set[str]()

    def known(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return "other"
        self._known.add(name)
        return name
