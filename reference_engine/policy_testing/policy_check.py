"""Property checks for batching policies: `check_policy(MyPolicy)`.

Every policy runs the same random workloads in virtual time. A fault is reported with the broken
rule, the step, and the smallest workload that still shows it.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loadgen.system.clock import VirtualClock
from reference_engine.core.core import EngineState
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import Policy
from reference_engine.policy_testing.policy_workloads import (
    Workload,
    WorkloadClient,
    flood,
    smaller_workloads,
    workloads,
)
from reference_engine.policy_testing.watched_policy import (
    PolicyFault,
    WatchedPolicy,
    check_invariants,
    has_claim,
)
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import Replica, SimulationStuck, Simulator
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Plan

FORBIDDEN = frozenset(
    {"time", "datetime", "random", "secrets", "os", "asyncio", "socket", "threading", "torch"}
)
"""Modules that a policy's file may not import: a run that depends on a clock, random numbers or the
network cannot be replayed."""
_STARVATION_S = 60.0  # of an aged policy without a field `starvation`
_STEPS_PER_TOKEN = 4  # a policy that needs more makes no progress
_MOST_SLOTS = 4  # that run at a time in the check of aging; fewer if the policy admits fewer
_MOST_PREEMPTIONS = 3  # per finished request, on average over all workloads
_MOST_TRIALS = 150  # to find a smaller workload
_PREFIX = "~"


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The rules that a policy was found to keep, and the size of the check."""

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
    """Check a policy (a class with default parameters, or an instance) on random workloads.

    - *plans*: plans are valid: within the engine's limits, and about live requests
    - *progress*: every request ends, and no request waits for ever
    - *read-only*: planning changes neither requests nor the queue
    - *no oracle*: the policy never reads how long an answer will be
    - *no leak*: all KV blocks are free at the end, those of cancelled requests included
    - *determinism*: equal workloads give equal plans
    - *preemption*: a preempted request does not return before the request it made room for, and the
      plans preempt at most three times per finished request on average
    - *work conservation*, if claimed by `is_work_conserving`: no idle step while a request fits
    - *aging*, if claimed by `is_aged`: no request waits much longer than `starvation` (seconds)

    Raises PolicyFault at the first broken rule.
    """
    checked = policy() if isinstance(policy, type) else policy
    _check_imports(checked)
    rules = ["plans", "progress", "read-only", "no oracle", "no leak", "determinism", "preemption"]
    n_steps = n_preemptions = n_finished = 0
    for workload in workloads(n_workloads, seed):
        tried = _try_workload(checked, workload)
        n_steps += len(tried.plans)
        n_preemptions += tried.n_preemptions
        n_finished += tried.n_finished
    if n_preemptions > _MOST_PREEMPTIONS * n_finished:
        raise PolicyFault(
            "preemption",
            f"{n_preemptions} preemptions for {n_finished} finished requests in {n_workloads} "
            f"workloads, more than {_MOST_PREEMPTIONS} for each: their work is done again",
        )
    if has_claim(checked, "is_work_conserving"):
        rules.append("work conservation")
    if has_claim(checked, "is_aged"):
        rules.append("aging")
        n_steps += _check_aging(checked)
    return PolicyReport(checked.kind, tuple(rules), n_workloads, n_steps)


def _try_workload(policy: Policy, workload: Workload) -> WatchedPolicy:
    """Run a workload. A fault is raised again with the smallest workload found that breaks the same
    rule."""
    try:
        return _run_twice(policy, workload)
    except PolicyFault as first:
        smallest, fault = workload, first
    n_trials, candidates = 0, smaller_workloads(smallest)
    while n_trials < _MOST_TRIALS and (candidate := next(candidates, None)) is not None:
        n_trials += 1
        try:
            _run_twice(policy, candidate)
        except PolicyFault as next_fault:
            if next_fault.rule == fault.rule:
                smallest, fault = candidate, next_fault
                candidates = smaller_workloads(candidate)
    raise PolicyFault(fault.rule, f"{fault.detail}\n\nwith {smallest}") from fault.__cause__


def _run_twice(policy: Policy, workload: Workload) -> WatchedPolicy:
    """Run a workload twice and compare the plans. The second run has other ids, which sort alike: a
    policy that iterates over a set of ids then sees another order."""
    first, second = _run(policy, workload), _run(policy, workload.renamed(_PREFIX))
    for number, (plan, again) in enumerate(zip(first.plans, second.plans, strict=False)):
        if _decisions(plan) != _decisions(again):
            raise PolicyFault(
                "determinism",
                f"the same workload gave two different plans in step {number}:\n  {plan}\n"
                f"  {again}\nKeep the state of a policy in pydantic PrivateAttrs, sort sets before "
                "use, and read the time from view.now_s only",
            )
    return first


def _decisions(plan: Plan) -> tuple[object, ...]:
    """The contents of a plan, under the ids of the first run."""

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


def _run(policy: Policy, workload: Workload) -> WatchedPolicy:
    watched = WatchedPolicy(policy, 200 + _STEPS_PER_TOKEN * workload.n_tokens)
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
    client = WorkloadClient(workload, watched, state)
    try:
        Simulator([Replica(state, Simulated(workload.cost))], clock).run(client)
    except SimulationStuck as stuck:
        raise PolicyFault("progress", str(stuck)) from None
    check_invariants(state)
    if pool.n_free != pool.n_blocks:
        raise PolicyFault("no leak", f"{pool.n_blocks - pool.n_free} KV blocks are never freed")
    return watched


def _check_aging(policy: Policy) -> int:
    starvation_s = float(getattr(policy, "starvation", _STARVATION_S))
    n_slots = min(_MOST_SLOTS, getattr(policy, "max_num_seqs", None) or _MOST_SLOTS)
    workload = flood(starvation_s, n_slots)
    watched = _run(policy, workload)
    victim = watched.requests["victim"]
    assert victim.scheduled_s is not None, "a finished run has scheduled all requests"
    n_older = sum(
        1
        for request in watched.requests.values()
        if request.arrived_s < victim.arrived_s and (request.scheduled_s or 0.0) > victim.arrived_s
    )
    limit_s = starvation_s + (100 + 3 * n_older * _MOST_SLOTS / n_slots) * workload.cost.step_s
    waited_s = victim.scheduled_s - victim.arrived_s
    if waited_s > limit_s:
        raise PolicyFault(
            "aging",
            f"it claims is_aged with starvation {starvation_s:g} s, but a long request of low "
            f"priority waited {waited_s:.3g} s behind short urgent requests at 1.3 times the  "
            f"capacity (limit {limit_s:.3g} s, with {n_older} older requests)",
        )
    return len(watched.plans)


def _check_imports(policy: Policy) -> None:
    """Check the imports of the file that defines a policy; a policy from a prompt has no file."""
    try:
        path = Path(inspect.getfile(type(policy)))
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] in FORBIDDEN:
                raise PolicyFault(
                    "determinism",
                    f"{path.name}:{node.lineno} imports {name}; a policy may not use clocks, "
                    "random numbers or the network, or its runs could not be replayed "
                    "(the time is view.now_s)",
                )
