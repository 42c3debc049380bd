"""The tree of a recorded conversation: which request waits for which.

A *chain* is a sequence of requests of a model, each of which starts after the one before it has
ended and extends its prompt (or keeps a beginning of it, as after a compaction). A request that
overlaps its chain, or branches off exactly where an earlier request of it ended, begins another
chain: a child of the request from which it branches. A subagent is one or more such chains, spawned
by a request. The first request of the parent's chain that starts after the last request of a child
has ended waits for it; children without such a request are in the background.

Delays count from the end of a request that is waited for to the start of the waiting request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadgen.workload.traces.blocks import n_common

Ids = NDArray[np.int64]
_SAME_INSTANT_S = 1e-9


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as recorded, in seconds from the start of the conversation. `ids` are the hashes of
    its full blocks. `agent` is 0 for the conversation itself, else the number of a subagent."""

    start_s: float
    end_s: float
    model: str
    ids: Ids
    agent: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """`child` starts `delay_s` after the end of `parent`, or later."""

    child: int
    parent: int
    delay_s: float


@dataclass(slots=True)
class Chain:
    """Requests in order of time; `origin` is the request from which they branch, None at a root."""

    depth: int
    origin: int | None
    parent: int | None
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestTree:
    """The chains of a conversation, the number of each request's chain, and the edges.
    `n_background` chains are waited for by no request."""

    chains: tuple[Chain, ...]
    chain_of: tuple[int, ...]
    edges: tuple[Edge, ...]
    n_background: int


def grow_tree(requests: Sequence[RecordedRequest], spawns: Sequence[int]) -> RequestTree:
    """The tree of requests, which are sorted by their start. `spawns[k]` is the request that
    spawned subagent k + 1."""
    growing = _Growing(requests, spawns)
    for row in range(len(requests)):
        growing.add(row)
    n_background = growing.join()
    edges = sorted(growing.edges, key=lambda edge: (edge.child, edge.parent))
    return RequestTree(tuple(growing.chains), tuple(growing.chain_of), tuple(edges), n_background)


def grow_streams(requests: Sequence[RecordedRequest], spawns: Sequence[int]) -> RequestTree:
    """The tree of requests, sorted by their start, whose chains are known: the requests of an agent
    are a chain, all chains begin on their own, and no request waits for another chain."""
    assert not spawns, "streams spawn nothing"
    numbers: dict[int, int] = {}
    chains: list[Chain] = []
    chain_of, edges = [], []
    for row, request in enumerate(requests):
        number = numbers.setdefault(request.agent, len(numbers))
        if number == len(chains):
            chains.append(Chain(0, None, None))
        chain = chains[number]
        if chain.rows:
            gap_s = request.start_s - requests[chain.rows[-1]].end_s
            edges.append(Edge(row, chain.rows[-1], max(0.0, gap_s)))
        chain.rows.append(row)
        chain_of.append(number)
    return RequestTree(tuple(chains), tuple(chain_of), tuple(edges), len(chains) - 1)


class _Growing:
    def __init__(self, requests: Sequence[RecordedRequest], spawns: Sequence[int]) -> None:
        self._requests, self._spawns = requests, spawns
        self.chains: list[Chain] = []
        self.chain_of: list[int] = []
        self.edges: list[Edge] = []

    def add(self, row: int) -> None:
        """Appends a request to the chain that it continues, else to a chain of its own."""
        number = self._continued(row)
        if number is None:
            number = self._begin(row)
        else:
            self._wait(row, self.chains[number].rows[-1])
        self.chains[number].rows.append(row)
        self.chain_of.append(number)

    def join(self) -> int:
        """Lets each chain's parent wait for its end; returns the number of chains without one."""
        n_background = 0
        for chain in self.chains:
            if chain.parent is None:
                continue
            last = chain.rows[-1]
            later = (
                row
                for row in self.chains[chain.parent].rows
                if row > last and self._is_after(row, last)
            )
            waiting = next(later, None)
            if waiting is None:
                n_background += 1
            else:
                self._wait(waiting, last)
        return n_background

    def _continued(self, row: int) -> int | None:
        """The number of the chain whose last request shares most with a request, the latest ended
        of equals; None if it shares nothing, or branches off."""
        request, best, number = self._requests[row], (0, False, 0.0), None
        for k, chain in enumerate(self.chains):
            last = self._requests[chain.rows[-1]]
            if (last.model, last.agent) != (request.model, request.agent):
                continue
            if not self._is_after(row, chain.rows[-1]):
                continue
            common = n_common(last.ids, request.ids)
            rank = (common, common == len(last.ids), last.end_s)
            if (common or not len(last.ids)) and (number is None or rank > best):
                best, number = rank, k
        if number is None or best[1]:
            return number
        return None if self._branches(row, self.chains[number], best[0]) else number

    def _branches(self, row: int, chain: Chain, n_shared: int) -> bool:
        """Whether a request leaves the path of a chain's last request exactly at the end of an
        earlier request."""
        ids = self._requests[row].ids
        earlier = (self._requests[k].ids for k in chain.rows[:-1])
        return any(len(own) == n_shared == n_common(own, ids) for own in earlier)

    def _begin(self, row: int) -> int:
        """Adds a chain, and lets its first request wait for the request from which it branches or,
        where that was still running, for the request that had ended last."""
        origin = self._origin(row)
        parent = None if origin is None else self.chain_of[origin]
        depth = 0 if parent is None else self.chains[parent].depth + 1
        self.chains.append(Chain(depth, origin, parent))
        if origin is not None and not self._is_after(row, origin):
            ended = [k for k in range(row) if self._is_after(row, k)]
            origin = max(ended, key=lambda k: self._requests[k].end_s, default=None)
        if origin is not None:
            self._wait(row, origin)
        return len(self.chains) - 1

    def _origin(self, row: int) -> int | None:
        """The earliest request of the same agent that shares most with a request. Without shared
        blocks: the request that spawned the subagent, else the latest before it."""
        request = self._requests[row]
        own = [k for k in range(row) if self._requests[k].agent == request.agent]
        shared = [n_common(self._requests[k].ids, request.ids) for k in own]
        if max(shared, default=0):
            return own[shared.index(max(shared))]
        if request.agent:
            return self._spawns[request.agent - 1]
        return own[-1] if own else None

    def _is_after(self, row: int, other: int) -> bool:
        return self._requests[other].end_s <= self._requests[row].start_s + _SAME_INSTANT_S

    def _wait(self, row: int, other: int) -> None:
        gap_s = self._requests[row].start_s - self._requests[other].end_s
        self.edges.append(Edge(row, other, max(0.0, gap_s)))
