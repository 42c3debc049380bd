"""Interventions of an operator in a running engine, between two steps, and the paused tenants.

Each intervention is an event in the log, with the `actor` and `reason` passed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference_engine.accounting.accounting import Accounting
from reference_engine.policies.base import Policy
from reference_engine.state.plan import Cause, Why
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request

if TYPE_CHECKING:
    from reference_engine.core.core import EngineState  # which imports PausedTenants from here

_PAUSED = Cause(Why.paused_by_operator)


def switch_policy(state: EngineState, policy: Policy, actor: str = "", reason: str = "") -> None:
    """Continue under another policy. Nothing drains: every running and waiting request is
    announced to the new policy as an arrival."""
    before = state.policy.described()
    state.policy = policy.fresh()
    view = state.view()
    state.accounting.ledger.unassign(view.now_s)
    for request in [*view.running, *view.waiting]:
        state.policy.on_arrival(request, view)
    state.paused_tenants.forget_announcements()
    detail = {"reason": reason, "before": before, "after": state.policy.described()}
    state.log_event("switch_policy", detail, view.now_s, actor=actor)


def pause(state: EngineState, tenant: str, actor: str = "", reason: str = "") -> int:
    """Hide a tenant's waiting and future requests from the policy; its running requests go
    on. Returns how many are held now."""
    now_s = state.view().now_s
    n_held = state.paused_tenants.pause(tenant, now_s)
    detail = {"reason": reason, "held": n_held}
    state.log_event("pause_tenant", detail, now_s, tenant=tenant, actor=actor)
    return n_held


def resume(state: EngineState, tenant: str, actor: str = "", reason: str = "") -> int:
    """Return a tenant's held requests to their places in the queue; returns how many."""
    view = state.view()
    released = state.paused_tenants.resume(tenant, view.now_s)
    for request, is_announced in released:
        if is_announced:
            state.policy.on_requeue(request, view)
        else:
            state.policy.on_arrival(request, view)
    detail = {"reason": reason, "released": len(released)}
    state.log_event("resume_tenant", detail, view.now_s, tenant=tenant, actor=actor)
    return len(released)


def reprioritise(
    state: EngineState, request_id: str, priority: int, actor: str = "", reason: str = ""
) -> bool:
    """Change a request's priority; False when the request is over."""
    request = state.queues.find(request_id)
    if request is None:
        return False
    detail = {"reason": reason, "before": request.priority, "after": priority}
    request.priority = priority
    view = state.view()
    ids = {"request_id": request_id, "tenant": request.tenant}
    state.log_event("reprioritise", detail, view.now_s, **ids, actor=actor)
    if view.is_waiting(request_id):
        state.policy.on_requeue(request, view)
    return True


def note_cancel(state: EngineState, request_id: str, actor: str = "", reason: str = "") -> None:
    """Log that an operator cancels a request, which ends as if its client had left."""
    ids = {"request_id": request_id, "actor": actor}
    state.log_event("cancel_request", {"reason": reason}, state.view().now_s, **ids)


def reset_prefix_cache(state: EngineState, actor: str = "", reason: str = "") -> int:
    """Empty the prefix cache; running requests keep their memory. Returns how many blocks were
    cached."""
    n_cached = state.kv.clear_prefix_cache()
    detail = {"reason": reason, "blocks": n_cached}
    state.log_event("reset_prefix_cache", detail, state.view().now_s, actor=actor)
    return n_cached


class PausedTenants:
    """The paused tenants by name. Their running requests go on. Their waiting requests are held:
    hidden from the policy until the tenant is resumed. A request that arrived while its tenant was
    paused has not been announced to the policy yet."""

    def __init__(self, queues: Queues, accounting: Accounting) -> None:
        self._queues, self._accounting = queues, accounting
        self.names: set[str] = set()
        self._unannounced: set[str] = set()

    def pause(self, tenant: str, now_s: float) -> int:
        """Hold a tenant's waiting requests; returns how many of its requests are held now."""
        self.names.add(tenant)
        for request in [r for r in self._queues.waiting.values() if r.tenant == tenant]:
            self.hold(request, now_s)
        return sum(request.tenant == tenant for request in self._queues.held.values())

    def resume(self, tenant: str, now_s: float) -> list[tuple[Request, bool]]:
        """Return a tenant's requests to their places in the queue. Returns each with whether it
        was announced to the policy before."""
        self.names.discard(tenant)
        requests = [r for r in self._queues.held.values() if r.tenant == tenant]
        self._queues.release(requests)
        for request in requests:
            self._accounting.release(request, now_s)
        released = [(request, request.id not in self._unannounced) for request in requests]
        self._unannounced.difference_update(request.id for request in requests)
        return released

    def hold(self, request: Request, now_s: float, is_announced: bool = True) -> None:
        self._queues.hold(request)
        self._accounting.hold(request, now_s, _PAUSED)
        if not is_announced:
            self._unannounced.add(request.id)

    def forget(self, request_id: str) -> None:
        """Drop a request that is over."""
        self._unannounced.discard(request_id)

    def forget_announcements(self) -> None:
        """Mark all held requests as unannounced, because the policy is new."""
        self._unannounced.update(self._queues.held)
