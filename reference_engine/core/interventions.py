"""What an operator does to a running engine, between two steps. Each is an event in the log;
`actor` and `reason` are for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference_engine.accounting.accounting import Accounting
from reference_engine.policies.base import Policy
from reference_engine.state.plan import Cause, Why
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request

if TYPE_CHECKING:
    from reference_engine.core.core import EngineState  # which imports PausedTenants from here


def switch_policy(state: EngineState, policy: Policy, actor: str = "", reason: str = "") -> None:
    """Go on under another policy. Nothing drains: it is told of every request that waits or runs
    as if it arrived."""
    before = state.policy.described()
    state.policy = policy.fresh()
    view = state.view()
    state.accounting.ledger.unassign(view.now_s)
    for request in [*view.running, *view.waiting]:
        state.policy.on_arrival(request, view)
    state.paused_tenants.forget_policy()
    after = state.policy.described()
    detail = {"reason": reason, "before": before, "after": after}
    state.log_event("switch_policy", detail, view.now_s, actor=actor)


def pause(state: EngineState, tenant: str, actor: str = "", reason: str = "") -> int:
    """Keep a tenant's waiting and coming requests from the policy; running ones go on. Returns
    how many are held now."""
    now_s = state.view().now_s
    n_held = state.paused_tenants.shut(tenant, now_s)
    detail = {"reason": reason, "held": n_held}
    state.log_event("pause_tenant", detail, now_s, tenant=tenant, actor=actor)
    return n_held


def resume(state: EngineState, tenant: str, actor: str = "", reason: str = "") -> int:
    """Give them back their places in the queue; returns how many."""
    view = state.view()
    freed = state.paused_tenants.open(tenant, view.now_s)
    for request, is_known in freed:
        if is_known:
            state.policy.on_requeue(request, view)
        else:
            state.policy.on_arrival(request, view)
    detail = {"reason": reason, "released": len(freed)}
    state.log_event("resume_tenant", detail, view.now_s, tenant=tenant, actor=actor)
    return len(freed)


def reprioritise(
    state: EngineState, request_id: str, priority: int, actor: str = "", reason: str = ""
) -> bool:
    """Change a request's priority; False when it is over."""
    request = state.queues.find(request_id)
    if request is None:
        return False
    detail = {"reason": reason, "before": request.priority, "after": priority}
    request.priority = priority
    view = state.view()
    state.log_event(
        "reprioritise",
        detail,
        view.now_s,
        request_id=request_id,
        tenant=request.tenant,
        actor=actor,
    )
    if view.is_waiting(request_id):
        state.policy.on_requeue(request, view)
    return True


def reset_prefix_cache(state: EngineState, actor: str = "", reason: str = "") -> int:
    """Forget every cached prefix; what runs keeps its memory. Returns how many blocks were
    cached."""
    n_cached = state.kv.clear_prefix_cache()
    detail = {"reason": reason, "blocks": n_cached}
    state.log_event("reset_prefix_cache", detail, state.view().now_s, actor=actor)
    return n_cached


_PAUSED = Cause(Why.paused_by_operator)


class PausedTenants:
    """The paused tenants. Their running requests go on; the waiting ones keep their places, and
    those that the policy never heard of must be announced to it once they are let through."""

    def __init__(self, queues: Queues, accounting: Accounting) -> None:
        self._queues, self._accounting = queues, accounting
        self.names: set[str] = set()
        self._unannounced: set[str] = set()

    def is_shut_to(self, request: Request) -> bool:
        return request.tenant in self.names

    def shut(self, tenant: str, now_s: float) -> int:
        """Hold a tenant's waiting requests; returns how many are held now."""
        self.names.add(tenant)
        for request in [r for r in self._queues.waiting.values() if r.tenant == tenant]:
            self.hold(request, now_s)
        return sum(request.tenant == tenant for request in self._queues.held.values())

    def open(self, tenant: str, now_s: float) -> list[tuple[Request, bool]]:
        """Give a tenant's requests back their places; returns each with whether the policy knows
        it."""
        self.names.discard(tenant)
        freed = [r for r in self._queues.held.values() if r.tenant == tenant]
        self._queues.release(freed)
        for request in freed:
            self._accounting.release(request, now_s)
        told = [(request, request.id not in self._unannounced) for request in freed]
        self._unannounced.difference_update(request.id for request in freed)
        return told

    def hold(self, request: Request, now_s: float, is_known: bool = True) -> None:
        """Keep a waiting request from the policy."""
        self._queues.hold(request)
        self._accounting.hold(request, now_s, _PAUSED)
        if not is_known:
            self._unannounced.add(request.id)

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._unannounced.discard(request_id)

    def forget_policy(self) -> None:
        """Another policy: it knows none of the held ones."""
        self._unannounced.update(self._queues.held)
