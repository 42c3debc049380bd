"""Replicas that receive requests, at present: those that have failed, start, or are switched off do
not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reference_engine.cluster.routers import Router, Site
from reference_engine.simulator import Replica, Route
from reference_engine.state.sequence import Request


class Membership:
    """The replicas of a cluster by number, behind a router that sees the receiving replicas only.
    The router begins anew whenever they change. Without any, requests wait at the router."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        now_s: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self.replicas = tuple(replicas)
        self._router, self._now_s, self._rng = router, now_s, rng
        self._closed: dict[Replica, set[str]] = {replica: set() for replica in replicas}
        self._members: list[Replica] = []
        self._route: Route = self._routed()

    def close(self, replica: Replica, reason: str) -> None:
        """Send a replica no more requests, until `open` with all reasons."""
        self._closed[replica].add(reason)
        self._route = self._routed()

    def open(self, replica: Replica, reason: str) -> None:
        self._closed[replica].discard(reason)
        self._route = self._routed()

    def is_open(self, replica: Replica) -> bool:
        """Whether it receives requests."""
        return not self._closed[replica]

    def route(self, request: Request) -> int | None:
        if not self._members:
            return None
        number = self._route(request)
        return None if number is None else self.replicas.index(self._members[number])

    def _routed(self) -> Route:
        self._members = [replica for replica in self.replicas if not self._closed[replica]]
        if not self._members:
            return lambda request: None
        return self._router.route(Site(self._members, self._now_s, self._rng))
