"""Migration of decoding requests from the most to the least loaded replica.

The load is the KV that the requests of a replica hold and are predicted to add, in tokens. Sources:
rescheduling by predicted load, ARES/STAR (arXiv 2510.13668); live migration, of which only the
last tokens' KV is copied while the request pauses, Llumnix (Sun et al., OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadgen.errors import UsageError
from reference_engine.cluster.conductors import Part
from reference_engine.cluster.disaggregation import check_can_leave, check_same_kv
from reference_engine.cluster.transfers import Transfers
from reference_engine.simulator import Replica, Simulator
from reference_engine.state.sequence import Request


class _Load(NamedTuple):
    """The load of a replica (tokens), and its decoding requests with theirs."""

    tokens: float
    movable: list[tuple[float, Request]]


class Rebalancing(Part):
    """Every `every_s` seconds, moves a request from the most loaded of `replicas` to the least
    loaded if their loads differ by more than `gap` of the mean. The request is the one that leaves
    their loads nearest to each other. A replica takes part in one migration at a time; to
    those for which `is_open` is False, requests only leave."""

    def __init__(
        self,
        transfers: Transfers,
        replicas: Sequence[Replica],
        every_s: float,
        gap: float,
        is_open: Callable[[Replica], bool] | None = None,
    ) -> None:
        self._is_open = is_open or _always
        self._transfers, self._replicas = transfers, replicas
        self._every_s, self._gap, self._next = every_s, gap, 1

    def next_s(self, simulator: Simulator) -> float:
        if not any(replica.is_computing for replica in self._replicas):
            return math.inf
        return self._next * self._every_s

    def act(self, simulator: Simulator) -> None:
        n_due = math.floor(simulator.now_s / self._every_s + 1e-9)
        if n_due < self._next:
            return
        is_late = n_due > self._next
        self._next = n_due + 1
        if not is_late:
            self._rebalance(simulator)

    def _rebalance(self, simulator: Simulator) -> None:
        free = [r for r in self._replicas if not self._transfers.is_migrating(r)]
        free = [r for r in free if self._is_open(r) or len(r.population)]
        targets = [replica for replica in free if self._is_open(replica)]
        loads = {replica: _load(replica) for replica in free}
        if len(loads) < 2 or not targets:
            return
        source = max(free, key=lambda replica: loads[replica].tokens)
        target = min(targets, key=lambda replica: loads[replica].tokens)
        gap = loads[source].tokens - loads[target].tokens
        mean = sum(load.tokens for load in loads.values()) / len(loads)
        if gap <= self._gap * mean:
            return
        movable = [(w, r) for w, r in loads[source].movable if w < gap]
        if movable:
            _, request = min(movable, key=lambda entry: abs(entry[0] - gap / 2))
            self._transfers.migrate(request, source, target, simulator)


def _always(replica: Replica) -> bool:
    return True


def rebalancing(
    replicas: Sequence[Replica],
    transfers: Transfers,
    every_s: float,
    gap: float,
    is_open: Callable[[Replica], bool] | None = None,
) -> Rebalancing:
    """Raises UsageError for a single replica, or replicas that requests cannot leave."""
    if len(replicas) < 2:
        raise UsageError("rebalance: needs two replicas that decode")
    for replica in replicas:
        check_can_leave(replica)
    check_same_kv(replicas)
    return Rebalancing(transfers, replicas, every_s, gap, is_open)


def _load(replica: Replica) -> _Load:
    state = replica.state
    state.queues.settle()
    predict = state.view().predictor.predict
    requests = [*state.queues, *replica.unread, *replica.coming.values(), *replica.copying.values()]
    weights = [len(request.tokens) + predict(request).mean for request in requests]
    decoding, in_flight = state.queues.decoding, state.queues.in_flight
    movable = [
        (w, r)
        for w, r in zip(weights, requests, strict=True)
        if r.id in decoding or (r.id in in_flight and r.n_remaining == 1)
    ]
    return _Load(sum(weights), movable)
