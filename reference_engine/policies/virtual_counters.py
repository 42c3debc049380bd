"""Virtual token counters: the service of each tenant, and the tenant with the least.

A counter only grows while its tenant is served. So the heap may hold outdated, lower values: an
outdated entry is put back with its new value when it reaches the top.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from reference_engine.policies.budgets import Budget, TokenBucket
from reference_engine.policies.sorted_queue import SortedQueue
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

_MOST_IDLE = 4096  # clients choose the tenant names; the tenant that is idle longest is forgotten


@dataclass(slots=True, eq=False)
class BudgetQueue:
    """The waiting requests that share a budget of a tenant, first come first served."""

    name: str
    budget: Budget | None
    bucket: TokenBucket | None  # None without a budget
    requests: SortedQueue = field(default_factory=SortedQueue)
    blocked_until_s: float | None = None  # instant at which the bucket can pay the head


@dataclass(slots=True, eq=False)
class TenantCounter:
    """The service a tenant has received, divided by its `weight`. A tenant is active while it has a
    request that waits and can be paid."""

    name: str
    weight: float
    counter: float = 0.0
    queues: dict[str, BudgetQueue] = field(default_factory=dict)
    is_active: bool = False
    n_live: int = 0

    def serve(self, cost: float) -> None:
        self.counter += cost / self.weight

    def head(self, view: View) -> tuple[BudgetQueue, Request] | None:
        """The oldest waiting request of the tenant's queues that are not blocked, with its
        queue."""
        heads = [
            (first[0], queue.name, queue, first[1])
            for queue in self.queues.values()
            if queue.blocked_until_s is None and (first := queue.requests.first(view)) is not None
        ]
        if not heads:
            return None
        _, _, queue, request = min(heads)
        return queue, request


class VirtualCounters:
    """All tenants, with the active tenants in order of their counters."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, TenantCounter] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._heap: list[tuple[float, str]] = []  # active tenants; counters may be outdated
        self._last_left = 0.0

    def tenant(self, name: str) -> TenantCounter:
        """The tenant of this name, added without any service if it is new."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = TenantCounter(name, self._weights.get(name, 1.0))
            self._rest(tenant)
        return tenant

    def find(self, name: str) -> TenantCounter | None:
        """The tenant, or None if there is none of this name."""
        return self._tenants.get(name)

    def enter(self, tenant: TenantCounter) -> None:
        """Add a live request of the tenant."""
        tenant.n_live += 1
        self._idle.pop(tenant.name, None)

    def leave(self, tenant: TenantCounter) -> None:
        """Remove a live request of the tenant."""
        tenant.n_live -= 1
        if tenant.n_live == 0:
            self._rest(tenant)

    def activate(self, tenant: TenantCounter, *, is_lifted: bool = True) -> None:
        """Make the tenant active. Idle time earns no credit: with `is_lifted`, its counter is
        raised to the lowest of the active tenants or, without any, to that of the tenant that was
        active last."""
        if tenant.is_active:
            return
        if is_lifted:
            least = self.least()
            floor = self._last_left if least is None else least.counter
            tenant.counter = max(tenant.counter, floor)
        tenant.is_active = True
        heappush(self._heap, (tenant.counter, tenant.name))

    def deactivate_least(self) -> None:
        """Make the least served active tenant inactive."""
        _, name = heappop(self._heap)
        tenant = self._tenants[name]
        tenant.is_active = False
        self._last_left = tenant.counter
        if tenant.n_live == 0:
            self._rest(tenant)

    def least(self) -> TenantCounter | None:
        """The least served active tenant; among equals the first by name."""
        heap = self._heap
        while heap:
            counter, name = heap[0]
            tenant = self._tenants[name]
            if counter == tenant.counter:
                return tenant
            heapreplace(heap, (tenant.counter, name))
        return None

    def refund(self, tenant: TenantCounter, cost: float) -> None:
        """Take back a charge. The counter falls, so its heap entry is corrected at once."""
        tenant.serve(-cost)
        heap = self._heap
        for i, (_, name) in enumerate(heap):
            if name == tenant.name:
                heap[i] = tenant.counter, name
                heapify(heap)
                return

    def _rest(self, tenant: TenantCounter) -> None:
        """Remember a tenant without live requests, until too many others have become idle."""
        self._idle[tenant.name] = None
        if len(self._idle) > _MOST_IDLE:
            name, _ = self._idle.popitem(last=False)
            if not self._tenants[name].is_active:
                del self._tenants[name]
