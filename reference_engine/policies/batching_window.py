"""Waiting on purpose, so that a batch gets larger."""

from __future__ import annotations

from reference_engine.state.plan import Cause, Plan, View, Why


def wait_for_more(view: View, want: int, delay_s: float) -> Plan | None:
    """An empty plan until the oldest waiting request has waited `delay_s`; None when it has.

    The queue is first come first served, but preempted requests stand at its head, so the oldest
    is looked for.
    """
    oldest_s = min((request.arrived_s for request in view.waiting), default=view.now_s)
    until_s = oldest_s + delay_s
    if until_s <= view.now_s:
        return None
    cause = Cause(Why.window_open, until_s=until_s, have=len(view.waiting), want=want)
    return Plan(rest=cause, wait_until_s=until_s)
