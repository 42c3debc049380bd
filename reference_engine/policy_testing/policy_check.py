"""The property suite for batching policies: `check_policy(MyPolicy)`.

Every policy is tried on the same random workloads in virtual time; what it does wrong is told with
the rule, the step, and the fewest requests that show it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loadgen.clock import VirtualClock
from reference_engine.core.core import EngineState
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import Policy
from reference_engine.policy_testing.policy_workloads import (
    Workload,
    WorkloadClient,
    flood,
    smaller,
    total_tokens,
    workloads,
)
from reference_engine.policy_testing.watched_policy import (
    PolicyFault,
    WatchedPolicy,
    check_accounting,
    claims,
)
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import SimulationStuck, Simulator
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Plan

FORBIDDEN = frozenset(
    {"time", "datetime", "random", "secrets", "os", "asyncio", "socket", "threading", "torch"}
)
"""What a policy's file may not import: with a clock, chance or the network it could not be
replayed."""
_PATIENCE_S = 60.0  # of an aged policy that does not say
_STEPS_PER_TOKEN = 4  # beyond that a policy is going in circles
_MOST_SHRINKS = 150
_PREFIX = "~"


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
    if claims(chosen, "is_work_conserving"):
        rules.append("work conservation")
    if claims(chosen, "is_aged"):
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


def _run(policy: Policy, workload: Workload) -> WatchedPolicy:
    watched = WatchedPolicy(policy, 200 + _STEPS_PER_TOKEN * total_tokens(workload.asks))
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
    client = WorkloadClient(workload, watched)
    try:
        Simulator(state, Simulated(workload.cost, clock.advance), clock).run(client)
    except SimulationStuck as stuck:
        raise PolicyFault("progress", str(stuck)) from None
    check_accounting(state)
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
