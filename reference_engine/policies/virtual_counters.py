"""Virtual token counters: what each tenant was served, and whose turn it is.

Counters only grow while a tenant is served, so that a heap of old values finds the least served
one: a value that grew meanwhile is put back at its new place.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

from reference_engine.policies.budgets import Budget, TokenBucket
from reference_engine.policies.sorted_queue import SortedQueue
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

_MOST_IDLE = 4096  # tenants come from clients; the one longest idle is forgotten


class Flow:
    """Requests of a tenant that are paid from one budget, first come first served."""

    __slots__ = ("blocked_until_s", "bucket", "budget", "line", "name")

    def __init__(self, name: str, budget: Budget | None, now_s: float) -> None:
        self.name, self.budget = name, budget
        self.bucket: TokenBucket | None = None if budget is None else budget.bucket(now_s)
        self.line = SortedQueue()
        self.blocked_until_s: float | None = None


class TenantCounter:
    """`counter` is what it was served, divided by `weight`. It is active while it waits and its
    budget lets it."""

    __slots__ = ("counter", "flows", "is_active", "n_live", "name", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.counter = 0.0
        self.flows: dict[str, Flow] = {}
        self.is_active = False
        self.n_live = 0

    def serve(self, cost: float) -> None:
        self.counter += cost / self.weight

    def head(self, view: View) -> tuple[Flow, Request] | None:
        """The first come of its flows that are not blocked."""
        heads = [
            (first[0], flow.name, flow, first[1])
            for flow in self.flows.values()
            if flow.blocked_until_s is None and (first := flow.line.first(view)) is not None
        ]
        if not heads:
            return None
        _, _, flow, request = min(heads)
        return flow, request


class VirtualCounters:
    """The tenants, and among the active ones the order of their counters."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, TenantCounter] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._heap: list[tuple[float, str]] = []  # active ones; counters may have grown since
        self._last_left = 0.0

    def of(self, name: str) -> TenantCounter:
        """The tenant; a new one has been served nothing."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = TenantCounter(name, self._weights.get(name, 1.0))
            self._rest(tenant)
        return tenant

    def find(self, name: str) -> TenantCounter | None:
        """The tenant, if anything of it was seen."""
        return self._tenants.get(name)

    def enter(self, tenant: TenantCounter) -> None:
        """One more of its requests is live."""
        tenant.n_live += 1
        self._idle.pop(tenant.name, None)

    def leave(self, tenant: TenantCounter) -> None:
        """One of its requests is over."""
        tenant.n_live -= 1
        if tenant.n_live == 0:
            self._rest(tenant)

    def activate(self, tenant: TenantCounter, *, is_lifted: bool = True) -> None:
        """It has something to serve. Time without is not credited: its counter is lifted to the
        least of the active ones, or, without any, to that of the last one to leave."""
        if tenant.is_active:
            return
        if is_lifted:
            least = self.least()
            floor = self._last_left if least is None else least.counter
            tenant.counter = max(tenant.counter, floor)
        tenant.is_active = True
        heappush(self._heap, (tenant.counter, tenant.name))

    def deactivate_least(self) -> None:
        """The least served active tenant has nothing to serve, or not now."""
        _, name = heappop(self._heap)
        tenant = self._tenants[name]
        tenant.is_active = False
        self._last_left = tenant.counter
        if tenant.n_live == 0:
            self._rest(tenant)

    def least(self) -> TenantCounter | None:
        """The least served of the active tenants; of equals the first by name."""
        heap = self._heap
        while heap:
            counter, name = heap[0]
            tenant = self._tenants[name]
            if counter == tenant.counter:
                return tenant
            heapreplace(heap, (tenant.counter, name))
        return None

    def refund(self, tenant: TenantCounter, cost: float) -> None:
        """Take back what was charged for an admission that did not come about."""
        tenant.serve(-cost)
        heap = self._heap
        for i, (_, name) in enumerate(heap):
            if name == tenant.name:
                heap[i] = tenant.counter, name
                heapify(heap)
                return

    def _rest(self, tenant: TenantCounter) -> None:
        """Nothing of it is live. Remembered, unless too many others rested since."""
        self._idle[tenant.name] = None
        if len(self._idle) > _MOST_IDLE:
            name, _ = self._idle.popitem(last=False)
            if not self._tenants[name].is_active:
                del self._tenants[name]
