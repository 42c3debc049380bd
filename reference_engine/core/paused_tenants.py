"""Who of those that wait is kept from the policy, because an operator paused their tenant."""

from __future__ import annotations

from reference_engine.accounting.accounting import Accounting
from reference_engine.state.plan import Cause, Why
from reference_engine.state.queues import Roster
from reference_engine.state.sequence import Request

_PAUSED = Cause(Why.paused_by_operator)


class PausedTenants:
    """The paused tenants. Their running requests go on; the waiting ones keep their places, and
    those that the policy never heard of must be announced to it once they are let through."""

    def __init__(self, roster: Roster, books: Accounting) -> None:
        self._roster, self._books = roster, books
        self.paused: set[str] = set()
        self._unannounced: set[str] = set()

    def is_shut_to(self, request: Request) -> bool:
        return request.tenant in self.paused

    def shut(self, tenant: str, now_s: float) -> int:
        """Hold a tenant's waiting requests; returns how many are held now."""
        self.paused.add(tenant)
        for request in [r for r in self._roster.waiting.values() if r.tenant == tenant]:
            self.hold(request, now_s)
        return sum(request.tenant == tenant for request in self._roster.held.values())

    def open(self, tenant: str, now_s: float) -> list[tuple[Request, bool]]:
        """Give a tenant's requests back their places; returns each with whether the policy knows
        it."""
        self.paused.discard(tenant)
        freed = [r for r in self._roster.held.values() if r.tenant == tenant]
        self._roster.release(freed)
        for request in freed:
            self._books.release(request, now_s)
        told = [(request, request.id not in self._unannounced) for request in freed]
        self._unannounced.difference_update(request.id for request in freed)
        return told

    def hold(self, request: Request, now_s: float, is_known: bool = True) -> None:
        """Keep a waiting request from the policy."""
        self._roster.hold(request)
        self._books.hold(request, now_s, _PAUSED)
        if not is_known:
            self._unannounced.add(request.id)

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._unannounced.discard(request_id)

    def forget_policy(self) -> None:
        """Another policy: it knows none of the held ones."""
        self._unannounced.update(self._roster.held)
