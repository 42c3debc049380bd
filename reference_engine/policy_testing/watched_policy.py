"""Wrapper of a policy that passes all calls on and raises a fault when the policy breaks a rule.

The core would reject much of this as well; here the fault names the rule and lists the running and
waiting requests.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from reference_engine.core.core import EngineState
from reference_engine.policies.base import Policy
from reference_engine.state.plan import NoProgress, Plan, PlanError, View, check_plan
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord

# Fields that depend on the true length of the answer.
_ORACLE = ("oracle_output_tokens", "_n_last", "_n_milestone")
# Fields that a policy must not change; `n_blocks` is added.
_FIELDS = (
    "id",
    "n_computed",
    "n_tokens",
    "max_tokens",
    "min_tokens",
    "arrived_s",
    "priority",
    "tenant",
    "ttft_slo_s",
    "tpot_slo_s",
    "deadline_s",
    "state.name",
)
_read_fields = attrgetter(*_FIELDS)


class PolicyFault(AssertionError):
    """A policy breaks a rule. `rule` names the rule; the message adds the step and the requests."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


@dataclass
class PolicyWatch:
    """Whether the policy's code is running, and its reads of forbidden fields."""

    is_active: bool = False
    oracle_reads: list[str] = field(default_factory=list)


class WatchedPolicy:
    """A policy with checks around its methods. Keeps its plans, and the requests of the
    workload."""

    def __init__(self, policy: Policy, most_steps: int) -> None:
        self._policy, self._most_steps = policy.fresh(), most_steps
        self.watch = PolicyWatch()
        self.requests: dict[str, Request] = {}
        self.plans: list[Plan] = []
        self.n_preemptions = 0  # by its plans
        self._made_room_for: dict[str, str] = {}  # blocker by victim, while both wait
        self._is_conserving = has_claim(policy, "is_work_conserving")

    def fresh(self) -> WatchedPolicy:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def n_finished(self) -> int:
        return sum(request.finished_s is not None for request in self.requests.values())

    def plan(self, view: View) -> Plan:
        if len(self.plans) >= self._most_steps:
            raise PolicyFault(
                "progress", f"not done after {len(self.plans)} steps: {_situation(view)}"
            )
        plan = self._call("plan", view, view)
        if not isinstance(plan, Plan):
            raise PolicyFault("plans", f"plan() returned {plan!r}, not a Plan")
        try:
            check_plan(plan, view)
        except PlanError as error:
            rule = "progress" if isinstance(error, NoProgress) else "plans"
            raise PolicyFault(rule, f"{error}; {_situation(view)}") from None
        self.plans.append(plan)
        self._check_preemptions(plan, view)
        if self._is_conserving:
            _check_busy(plan, view)
        return plan

    def on_arrival(self, request: Request, view: View) -> None:
        self._call("on_arrival", view, request, view)

    def on_requeue(self, request: Request, view: View) -> None:
        self._call("on_requeue", view, request, view)

    def on_finish(self, request: Request, view: View) -> None:
        self._call("on_finish", view, request, view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        self._call("on_step_end", view, record, view)

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        return list(self._call("victims", view, view, request, need_blocks))

    def _check_preemptions(self, plan: Plan, view: View) -> None:
        """Raises PolicyFault if the plan admits a preempted request before the request that it made
        room for."""
        blockers, admitted = self._made_room_for, list[str]()
        for victim, blocker in list(blockers.items()):
            if not view.is_waiting(victim) or not view.is_waiting(blocker):
                del blockers[victim]
        for item in plan.items:
            if item.request_id in blockers and blockers[item.request_id] not in admitted:
                blocker = blockers[item.request_id]
                raise PolicyFault(
                    "preemption",
                    f"it admits {item.request_id}, which it preempted for {blocker}, and {blocker} "
                    f"still waits; admit {blocker} in the step that preempts; {_situation(view)}",
                )
            if view.is_waiting(item.request_id):
                admitted.append(item.request_id)
        self.n_preemptions += len(plan.preempt)
        blockers |= {
            preemption.request_id: preemption.by
            for preemption in plan.preempt
            if view.is_waiting(preemption.by)
        }

    def _call(self, method: str, view: View, *arguments: object) -> Any:
        """Call a method of the policy and return its result.

        Raises PolicyFault if the method raises, reads the true length of an answer, or changes the
        engine.
        """
        before = _fingerprint(view)
        self.watch.is_active = True
        try:
            result = getattr(self._policy, method)(*arguments)
            if isinstance(result, Iterator):  # a generator must run while it is watched
                result = list(result)
        except Exception as error:  # foreign code: report whatever it raises, with its place
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise PolicyFault(
                "plans",
                f"{method}() raised {type(error).__name__}: {error} "
                f"({Path(where.filename).name}:{where.lineno}); {_situation(view)}",
            ) from error
        finally:
            self.watch.is_active = False
        if self.watch.oracle_reads:
            raise PolicyFault(
                "no oracle",
                f"{method}() reads {self.watch.oracle_reads[0]}: the length of an answer is "
                "unknown until it ends; use view.predictor.predict(request)",
            )
        after = _fingerprint(view)
        if after != before:
            raise PolicyFault(
                "read-only",
                f"{method}() changed {_difference(before, after)}; a policy only proposes, in its "
                "plan",
            )
        return result


def watched_request_type(watch: PolicyWatch) -> type[Request]:
    """A subclass of Request that records in `watch` when a policy reads how long the answer will
    be."""

    def guarded(name: str) -> property:
        slot = Request.__dict__[name]

        def read(request: Request) -> Any:
            if watch.is_active:
                watch.oracle_reads.append(f"request.{name} ({_reader()})")
            return slot.__get__(request)

        return property(read, slot.__set__)

    return type("Request", (Request,), {"__slots__": (), **{n: guarded(n) for n in _ORACLE}})


def _reader() -> str:
    """The file and line that reads a guarded field, e.g. `my_policy.py:31`."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def check_invariants(state: EngineState) -> None:
    """Check the engine's own invariants, which break when a policy changes private state of the
    engine."""
    try:
        state.check()
    except AssertionError as error:
        raise PolicyFault("no leak", f"the engine's state is inconsistent: {error}") from error


def has_claim(policy: Policy, name: str) -> bool:
    return bool(getattr(type(policy), name, False))


def _fingerprint(view: View) -> tuple[Any, ...]:
    """The free blocks, and the fields of every request that a policy must not change."""
    rows = [
        (*_read_fields(request), len(request.blocks))
        for requests in (view.running, view.waiting)
        for request in requests
    ]
    return (view.kv.n_free, *rows)


def _difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """The first field that differs between two fingerprints."""
    for old, new in zip(before[1:], after[1:], strict=False):
        for name, was, now in zip((*_FIELDS, "n_blocks"), old, new, strict=True):
            if was != now:
                return f"{old[0]}: {name} was {was!r}, is {now!r}"
    return "the queue, the batch or the KV"


def _check_busy(plan: Plan, view: View) -> None:
    """Raises PolicyFault for an idle step while a running request could continue or a waiting
    request fits."""
    held = {*plan.hold, *(preemption.request_id for preemption in plan.preempt)}
    if plan.items or (plan.decode_all and any(r.id not in held for r in view.decoding)):
        return
    fitting = [r.id for r in view.running]
    if len(view.running) < view.limits.max_num_seqs:
        fitting += [r.id for r in view.waiting if view.kv.missing_to_admit(r, 1) <= view.kv.n_free]
    if fitting:
        raise PolicyFault(
            "work conservation",
            f"it claims is_work_conserving but is idle at {view.now_s:g} s although "
            f"{', '.join(fitting[:5])} could run; {_situation(view)}",
        )


def _situation(view: View) -> str:
    def listed(requests: Iterable[Request]) -> str:
        words = [f"{r.id} ({view.to_compute(r)} to compute)" for r in requests]
        more = f", … {len(words) - 8} more" if len(words) > 8 else ""
        return ", ".join(words[:8]) + more or "none"

    return (
        f"at {view.now_s:g} s running: {listed(view.running)}; waiting: {listed(view.waiting)}; "
        f"{view.kv.n_free} of {view.kv.n_blocks} KV blocks free"
    )
