"""The property suite for batching policies: `check_policy(MyPolicy)`.

Every policy is tried on the same random workloads in virtual time; what it does wrong is told with
the rule, the step, and the fewest requests that show it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from loadgen.clock import VirtualClock
from reference_engine.admission import AdmissionError
from reference_engine.core import EngineState
from reference_engine.executors.simulated import Simulated
from reference_engine.kv import KvPool
from reference_engine.plan import Plan, PlanError, View, check_plan
from reference_engine.policies.base import Policy
from reference_engine.policy_workloads import Ask, Workload, flood, smaller, total_tokens, workloads
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.sequence import Request
from reference_engine.simulator import SimulationStuck, Simulator
from reference_engine.step_tokens import StepTokens
from reference_engine.steps import StepRecord

FORBIDDEN = frozenset(
    {"time", "datetime", "random", "secrets", "os", "asyncio", "socket", "threading", "torch"}
)
"""What a policy's file may not import: with a clock, chance or the network it could not be
replayed."""
_SECRET = ("oracle_output_tokens", "_n_last", "_n_milestone")  # how long an answer will be
_PATIENCE_S = 60.0  # of an aged policy that does not say
_STEPS_PER_TOKEN = 4  # beyond that a policy is going in circles
_MOST_SHRINKS = 150
_PREFIX = "~"
_CHECK_EVERY = 16  # steps between two looks at the engine's own invariants, which take long


class PolicyFault(AssertionError):
    """A policy breaks a rule. `rule` names it; the message says where and with which requests."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule, self.what = rule, what


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What was checked, for the curious."""

    policy: str
    rules: tuple[str, ...]
    n_workloads: int
    n_steps: int

    def __str__(self) -> str:
        rules = ", ".join(self.rules)
        return f"{self.policy}: {self.n_workloads} workloads, {self.n_steps} steps; holds: {rules}"


def check_policy(
    policy: type[Policy] | Policy, *, n_workloads: int = 40, seed: int = 0
) -> PolicyReport:
    """Try a policy (a class with defaults, or an instance) on everything a policy must stand.

    - *plans*: within the engine's limits, about requests that are there
    - *progress*: every request ends, and nothing waits for ever
    - *read-only*: planning changes neither requests nor the queue
    - *no oracle*: it never looks at how long an answer will be
    - *no leak*: at the end every KV block is free again, cancelled requests included
    - *determinism*: the same workload makes the same plans
    - *work conservation*, where `is_work_conserving` claims it: no idle step while work fits
    - *aging*, where `is_aged` claims it: nobody waits much longer than `starvation` (s)

    Raises PolicyFault at the first broken rule.
    """
    chosen = policy() if isinstance(policy, type) else policy
    _check_imports(chosen)
    rules = ["plans", "progress", "read-only", "no oracle", "no leak", "determinism"]
    n_steps = 0
    for workload in workloads(n_workloads, seed):
        n_steps += _tried(chosen, workload, _run_twice)
    if _claims(chosen, "is_work_conserving"):
        rules.append("work conservation")
    if _claims(chosen, "is_aged"):
        rules.append("aging")
        n_steps += _check_aging(chosen)
    return PolicyReport(chosen.kind, tuple(rules), n_workloads, n_steps)


def _tried(policy: Policy, workload: Workload, trial: Callable[[Policy, Workload], int]) -> int:
    """Steps of a trial; a fault is told with the smallest workload that still shows it."""
    try:
        return trial(policy, workload)
    except PolicyFault as first:
        shown, worst = workload, first
    n_tries, candidates = 0, smaller(shown)
    while n_tries < _MOST_SHRINKS and (candidate := next(candidates, None)) is not None:
        n_tries += 1
        try:
            trial(policy, candidate)
        except PolicyFault as fault:
            if fault.rule == worst.rule:
                shown, worst, candidates = candidate, fault, smaller(candidate)
    told = PolicyFault(worst.rule, f"{worst.what}\n\nwith {shown}")
    raise told from worst.__cause__


def _run_twice(policy: Policy, workload: Workload) -> int:
    """Once more with other ids in the same order: a set of ids then comes in another order."""
    first, second = _run(policy, workload), _run(policy, workload.renamed(_PREFIX))
    for number, (one, other) in enumerate(zip(first.plans, second.plans, strict=False)):
        if _decisions(one) != _decisions(other):
            raise PolicyFault(
                "determinism",
                f"the same workload again made another plan in step {number}:\n  {one}\n  {other}\n"
                "Keep what a policy remembers in pydantic PrivateAttrs, order sets before use, and "
                "take time only from view.now_s",
            )
    return len(first.plans)


def _decisions(plan: Plan) -> tuple[object, ...]:
    """What a plan does to whom, under the ids of the first run."""

    def name(request_id: str) -> str:
        return request_id.removeprefix(_PREFIX)

    return (
        [(name(item.request_id), item.n_tokens, item.reserve_tokens) for item in plan.items],
        plan.decode_all,
        [name(request_id) for request_id in plan.hold],
        [(name(preemption.request_id), preemption.how) for preemption in plan.preempt],
        [(name(request_id), cause.why, name(cause.blocker)) for request_id, cause in plan.causes],
        (plan.rest.why, name(plan.rest.blocker), plan.wait_until_s, plan.padding),
    )


def _run(policy: Policy, workload: Workload) -> _Watched:
    watched = _Watched(policy, workload)
    clock = VirtualClock()
    pool = KvPool(workload.n_blocks)
    state = EngineState(
        workload.limits,
        pool,
        clock,
        cast(Policy, watched),
        cost=workload.cost,
        predictor=QuantilePredictor(),
    )
    client = _Traffic(workload, watched)
    try:
        Simulator(state, Simulated(workload.cost, clock.advance), clock).run(client)
    except SimulationStuck as stuck:
        raise PolicyFault("progress", str(stuck)) from None
    state.check()
    if pool.n_free != pool.n_blocks:
        raise PolicyFault("no leak", f"{pool.n_blocks - pool.n_free} KV blocks are never freed")
    return watched


def _check_aging(policy: Policy) -> int:
    patience_s = float(getattr(policy, "starvation", _PATIENCE_S))
    workload = flood(patience_s)
    watched = _run(policy, workload)
    victim = watched.requests["victim"]
    assert victim.scheduled_s is not None, "a run that ended scheduled everybody"
    older = sum(
        1
        for request in watched.requests.values()
        if request.arrived_s < victim.arrived_s and (request.scheduled_s or 0.0) > victim.arrived_s
    )
    step_s = workload.cost.step_s
    allowed_s = patience_s + (100 + 3 * older) * step_s
    waited_s = victim.scheduled_s - victim.arrived_s
    if waited_s > allowed_s:
        raise PolicyFault(
            "aging",
            f"it claims is_aged, with a patience of {patience_s:g} s, and let a long unimportant "
            f"request wait {waited_s:.3g} s behind short urgent ones at 1.3 times the engine's "
            f"capacity; {allowed_s:.3g} s were allowed ({older} requests were older)",
        )
    return len(watched.plans)


def _check_imports(policy: Policy) -> None:
    """Look at the file a policy is defined in; one typed into a prompt has none."""
    try:
        path = Path(inspect.getfile(type(policy)))
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in FORBIDDEN:
                assert isinstance(node, ast.Import | ast.ImportFrom)
                raise PolicyFault(
                    "determinism",
                    f"{path.name}:{node.lineno} imports {name}; a policy takes time from "
                    "view.now_s and has no chance in it, so that a run can be replayed",
                )


def _claims(policy: Policy, name: str) -> bool:
    return bool(getattr(type(policy), name, False))


@dataclass
class _Watch:
    """Whether the policy is at work, and what it looked at that it should not have."""

    is_policy: bool = False
    looked_at: list[str] = field(default_factory=list)


class _Watched:
    """A policy seen from outside: passes everything on, and checks it on the way."""

    def __init__(self, policy: Policy, workload: Workload) -> None:
        self._policy, self._workload = policy.fresh(), workload
        self.watch = _Watch()
        self.requests: dict[str, Request] = {}
        self.plans: list[Plan] = []
        self._most_steps = 200 + _STEPS_PER_TOKEN * total_tokens(workload.asks)
        self._is_conserving = _claims(policy, "is_work_conserving")

    def fresh(self) -> _Watched:
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


class _Traffic:
    """Submits a workload and cancels what it says (`simulator.Client`)."""

    def __init__(self, workload: Workload, watched: _Watched) -> None:
        self._watched, self._sealed = watched, _sealed(watched.watch)
        self._todo: list[tuple[float, int, Ask, bool]] = []
        for number, ask in enumerate(workload.asks):
            self._todo.append((ask.at_s, number, ask, False))
            if ask.cancel_after_s is not None:
                self._todo.append((ask.at_s + ask.cancel_after_s, number, ask, True))
        self._todo.sort(key=lambda entry: (entry[0], entry[3], entry[1]), reverse=True)

    @property
    def is_closed(self) -> bool:
        return all(is_cancel for *_, is_cancel in self._todo)

    def next_s(self) -> float | None:
        return self._todo[-1][0] if self._todo else None

    def act(self, engine: Simulator) -> None:
        while self._todo and self._todo[-1][0] <= engine.now_s:
            _, number, ask, is_cancel = self._todo.pop()
            if is_cancel:
                engine.cancel(ask.name)
                continue
            request = self._watched.requests[ask.name] = self._request(ask, number)
            with suppress(AdmissionError):  # it could never run, and nobody is to blame
                engine.submit(request)

    def receive(self, events: StepTokens, engine: Simulator) -> None:
        if len(self._watched.plans) % _CHECK_EVERY == 0:
            engine.state.check()

    def _request(self, ask: Ask, number: int) -> Request:
        n_alike = ask.n_prompt // 2 if ask.prefix else 0
        return self._sealed(
            id=ask.name,
            tokens=[ask.prefix] * n_alike + [100 + number] * (ask.n_prompt - n_alike),
            max_tokens=ask.max_tokens,
            arrived_s=ask.at_s,
            tenant=ask.tenant,
            priority=ask.priority,
            ttft_slo_s=ask.ttft_slo_s,
            deadline_s=None if ask.deadline_s is None else ask.at_s + ask.deadline_s,
            oracle_output_tokens=ask.n_output,
        )


def _sealed(watch: _Watch) -> type[Request]:
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


_FIELDS = ("n_computed", "n_tokens", "max_tokens", "priority", "tenant", "state", "n_blocks")


def _fingerprint(view: View) -> tuple[Any, ...]:
    """Everything a policy might be tempted to change."""
    rows = [
        (r.id, r.n_computed, len(r.tokens), r.max_tokens, r.priority, r.tenant, r.state.name,
         len(r.blocks))
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
