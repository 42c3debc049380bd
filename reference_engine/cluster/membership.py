"""Replicas that receive requests, at present: those that have failed, start, or are switched off do
not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reference_engine.cluster.routers import Router, Site
from reference_engine.simulator import Replica, Route, only_replica
from reference_engine.state.sequence import Request


class Membership:
    """The replicas of a cluster by number, behind a router that sees the receiving replicas only,
    of those with a role the prefill replicas; `decode_router` sees the decode replicas. A router
    begins anew whenever its replicas change. Without any, requests wait."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        now_s: Callable[[], float],
        rng: np.random.Generator,
        decode_router: Router | None = None,
    ) -> None:
        self.replicas = tuple(replicas)
        self._closed: dict[Replica, set[str]] = {replica: set() for replica in replicas}
        entry = [r for r in replicas if r.role != "decode"]
        self._entry = _Pool(entry, self._closed, router, now_s, rng)
        self._decode: _Pool | None = None
        if decode_router is not None:
            decoders = [r for r in replicas if r.role == "decode"]
            self._decode = _Pool(decoders, self._closed, decode_router, now_s, rng)

    def close(self, replica: Replica, reason: str) -> None:
        """Send a replica no more requests, until `open` with all reasons."""
        self._closed[replica].add(reason)
        self._pool_of(replica).begin()

    def open(self, replica: Replica, reason: str) -> None:
        self._closed[replica].discard(reason)
        self._pool_of(replica).begin()

    def is_open(self, replica: Replica) -> bool:
        """Whether it receives requests."""
        return not self._closed[replica]

    def route(self, request: Request) -> int | None:
        """The number of the replica for a new request (`simulator.Route`)."""
        replica = self._entry.select(request)
        return None if replica is None else replica.number

    def decode_route(self, request: Request) -> Replica | None:
        """The decode replica for a request with its first token."""
        assert self._decode is not None, "no replica has a role"
        return self._decode.select(request)

    def _pool_of(self, replica: Replica) -> _Pool:
        return self._decode if replica.role == "decode" and self._decode else self._entry


class _Pool:
    """Replicas of a router; those that are `closed` for a reason are left out."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        closed: Mapping[Replica, set[str]],
        router: Router,
        now_s: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self._replicas, self._closed = replicas, closed
        self._router, self._now_s, self._rng = router, now_s, rng
        self._members: list[Replica] = []
        self._route: Route = only_replica
        self.begin()

    def begin(self) -> None:
        """Begin anew with the replicas that receive requests now."""
        self._members = [replica for replica in self._replicas if not self._closed[replica]]
        if self._members:
            self._route = self._router.route(Site(self._members, self._now_s, self._rng))

    def select(self, request: Request) -> Replica | None:
        number = self._route(request) if self._members else None
        return None if number is None else self._members[number]
