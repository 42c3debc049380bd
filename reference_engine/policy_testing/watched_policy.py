"""A policy seen from outside: what it is asked goes through, and what it does wrong is a fault.

The core would refuse much of it as well; here it is told with the rule it breaks and with what ran
and waited at that moment.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference_engine.core.core import EngineState
from reference_engine.policies.base import Policy
from reference_engine.state.plan import Plan, PlanError, View, check_plan
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord

_SECRET = ("oracle_output_tokens", "_n_last", "_n_milestone")  # how long an answer will be


class PolicyFault(AssertionError):
    """A policy breaks a rule. `rule` names it; the message says where and with which requests."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule, self.what = rule, what


@dataclass
class PolicyWatch:
    """Whether the policy is at work, and what it looked at that it should not have."""

    is_policy: bool = False
    looked_at: list[str] = field(default_factory=list)


class WatchedPolicy:
    """A policy seen from outside: passes everything on, and checks it on the way."""

    def __init__(self, policy: Policy, most_steps: int) -> None:
        self._policy, self._most_steps = policy.fresh(), most_steps
        self.watch = PolicyWatch()
        self.requests: dict[str, Request] = {}
        self.plans: list[Plan] = []
        self._is_conserving = claims(policy, "is_work_conserving")

    def fresh(self) -> WatchedPolicy:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def plan(self, view: View) -> Plan:
        if len(self.plans) >= self._most_steps:
            raise PolicyFault(
                "progress", f"not done after {len(self.plans)} steps: {_situation(view)}"
            )
        before = _fingerprint(view)
        with self._at_work("plan", view):
            plan = self._policy.plan(view)
        self._check_unchanged("plan", before, view)
        if not isinstance(plan, Plan):
            raise PolicyFault("plans", f"plan() answered {plan!r}, not a Plan")
        try:
            check_plan(plan, view)
        except PlanError as error:
            rule = "progress" if type(error).__name__ == "NoProgress" else "plans"
            raise PolicyFault(rule, f"{error}; {_situation(view)}") from None
        self.plans.append(plan)
        if self._is_conserving:
            _check_busy(plan, view)
        return plan

    def on_arrival(self, request: Request, view: View) -> None:
        self._hook("on_arrival", view, request, view)

    def on_requeue(self, request: Request, view: View) -> None:
        self._hook("on_requeue", view, request, view)

    def on_finish(self, request: Request, view: View) -> None:
        self._hook("on_finish", view, request, view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        self._hook("on_step_end", view, record, view)

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        before = _fingerprint(view)
        with self._at_work("victims", view):
            named = list(self._policy.victims(view, request, need_blocks))
        self._check_unchanged("victims", before, view)
        return named

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        with self._at_work("explain", view):
            return self._policy.explain(request_id, view)

    def _hook(self, name: str, view: View, *arguments: object) -> None:
        before = _fingerprint(view)
        with self._at_work(name, view):
            getattr(self._policy, name)(*arguments)
        self._check_unchanged(name, before, view)

    @contextmanager
    def _at_work(self, name: str, view: View) -> Iterator[None]:
        self.watch.is_policy = True
        try:
            yield
        except PolicyFault:
            raise
        except (
            Exception
        ) as error:  # somebody else's code: whatever it raises is told, with its place
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise PolicyFault(
                "plans",
                f"{name}() raised {type(error).__name__}: {error} "
                f"({Path(where.filename).name}:{where.lineno}); {_situation(view)}",
            ) from error
        finally:
            self.watch.is_policy = False
        if self.watch.looked_at:
            raise PolicyFault(
                "no oracle",
                f"{name}() reads {self.watch.looked_at[0]}: how long an answer will be is known to "
                "nobody; view.predictor.predict(request) is what can be known",
            )

    def _check_unchanged(self, name: str, before: tuple[Any, ...], view: View) -> None:
        after = _fingerprint(view)
        if after == before:
            return
        changed = next(
            (
                f"{old[0]}: {key} was {was!r}, is {now!r}"
                for old, new in zip(before[1:], after[1:], strict=False)
                for key, was, now in zip(("id", *_FIELDS), old, new, strict=True)
                if was != now
            ),
            "the queue, the batch or the KV",
        )
        raise PolicyFault(
            "read-only", f"{name}() changed {changed}; a policy proposes, the core does"
        )


def sealed(watch: PolicyWatch) -> type[Request]:
    """A Request that notes when a policy looks at how long its answer will be."""

    def guarded(name: str) -> property:
        slot = Request.__dict__[name]

        def read(request: Request) -> Any:
            if watch.is_policy:
                watch.looked_at.append(f"request.{name} ({_reader()})")
            return slot.__get__(request)

        return property(read, slot.__set__)

    return type("Request", (Request,), {"__slots__": (), **{n: guarded(n) for n in _SECRET}})


def _reader() -> str:
    """`my_policy.py:31`, the line that reads a secret."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def check_accounting(state: EngineState) -> None:
    """The engine's own invariants; where they do not hold, a policy reached behind the view."""
    try:
        state.check()
    except AssertionError as error:
        raise PolicyFault("no leak", f"the engine's books no longer agree: {error}") from error


def claims(policy: Policy, name: str) -> bool:
    return bool(getattr(type(policy), name, False))


_FIELDS = (
    "n_computed", "n_tokens", "max_tokens", "min_tokens", "arrived_s", "priority", "tenant",
    "ttft_slo_s", "tpot_slo_s", "deadline_s", "state", "n_blocks",
)  # fmt: skip


def _fingerprint(view: View) -> tuple[Any, ...]:
    """Everything a policy might be tempted to change."""
    rows = [
        (r.id, r.n_computed, len(r.tokens), r.max_tokens, r.min_tokens, r.arrived_s, r.priority,
         r.tenant, r.ttft_slo_s, r.tpot_slo_s, r.deadline_s, r.state.name, len(r.blocks))
        for requests in (view.running, view.waiting)
        for r in requests
    ]  # fmt: skip
    return (view.kv.n_free, *rows)


def _check_busy(plan: Plan, view: View) -> None:
    """No idle step while a running request could go on or a waiting one fits."""
    held = {*plan.hold, *(preemption.request_id for preemption in plan.preempt)}
    if plan.items or (plan.decode_all and any(r.id not in held for r in view.decoding)):
        return
    fitting = [r.id for r in view.running]
    if len(view.running) < view.limits.max_num_seqs:
        fitting += [r.id for r in view.waiting if view.kv.missing_to_admit(r, 1) <= view.kv.n_free]
    if fitting:
        raise PolicyFault(
            "work conservation",
            f"it claims is_work_conserving and idles at {view.now_s:g} s although "
            f"{', '.join(fitting[:5])} could go on; {_situation(view)}",
        )


def _situation(view: View) -> str:
    def listed(requests: Iterable[Request]) -> str:
        words = [f"{r.id} ({view.to_compute(r)} to compute)" for r in requests]
        return ", ".join(words[:8]) + (f", … {len(words) - 8} more" if len(words) > 8 else "")

    return (
        f"at {view.now_s:g} s run: {listed(view.running) or 'none'}; wait: "
        f"{listed(view.waiting) or 'none'}; {view.kv.n_free} of {view.kv.n_blocks} KV blocks free"
    )
