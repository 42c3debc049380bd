"""Counterfactual: the same requests simulated under another batching mode.

The simulated engine has the setup of the engine that served the requests, and its steps take as
long as that engine's steps took. Answers have the length they had, a client that left leaves at the
same instant, and cached prompt tokens stay cached; only the mode differs. It is a model: where it
does not reproduce a miss under the mode that missed, it proves nothing about other modes (see
`attribution`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import UnknownKind
from loadgen.system.clock import VirtualClock
from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import (
    Attribution,
    Attributor,
    EngineCapacity,
    MissCause,
    Timing,
    timing,
)
from reference_engine.core.setup import Setup
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import POLICIES
from reference_engine.simulator import Replica, SimulatedService, SimulationStuck, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.cost_model import NO_PADDING, CostModel, Padding, StepCost, StepShape
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepLog, StepRecord

MODES = ("chunked", "bucketed", "sjf", "deadline", "priority", "token_fair", "prefill_first")
"""The simulated modes, in order; the first under which a request meets the SLO is reported."""

_N_PRICED_STEPS = 1000  # evenly spread; enough to estimate the cost of steps
_STEPS_PER_REPORT = 500
_HALF_LIFE = 500.0  # of the length predictor, where the engine's is not known
_SHARED = ("max_num_seqs", "token_budget")  # parameters that limit the engine, whatever the mode


@dataclass(frozen=True, slots=True)
class Case:
    """An engine's setup, the accounts of its requests, its steps, and the most steps to simulate in
    all. With `only`, a request's id, no other request's misses are attributed."""

    setup: Setup
    accounts: Sequence[Account]
    steps: Sequence[StepRecord]
    max_steps: int
    only: str | None = None

    @property
    def selected(self) -> Sequence[Account]:
        """The accounts whose misses are attributed."""
        if self.only is None:
            return self.accounts
        return [entry for entry in self.accounts if entry.request_id == self.only]

    @property
    def cost(self) -> StepCost:
        apart = len(self.steps) // _N_PRICED_STEPS + 1
        return observed_cost(self.steps[::apart], self.setup.cost)

    def capacity(self) -> EngineCapacity:
        limits = self.setup.limits
        n_tokens = self.setup.n_blocks * self.setup.block_tokens
        return EngineCapacity(self.cost, limits.max_num_seqs, limits.max_step_tokens, n_tokens)


def attribute_misses(
    case: Case, on_progress: Callable[[int], None] = lambda n_steps: None
) -> list[Attribution]:
    """The missed SLOs of a case with their causes. May take as long as `max_steps` simulated steps;
    a miss for which they were too few is unsettled. Calls `on_progress` with the steps simulated so
    far, every 500 steps."""
    control = str(case.setup.policy["kind"])
    modes = [mode for mode in MODES if mode != control]
    simulation = Counterfactual(case, on_progress)
    attributor = Attributor(
        case.accounts, case.capacity(), simulation.timings, modes, case.steps, control=control
    )
    misses = _misses(case, attributor)
    if simulation.n_steps_left:
        return misses
    evidence = (
        f"{case.max_steps} simulated steps were too few to show whether another mode would have "
        "met it"
    )
    return [
        replace(miss, cause=MissCause.unsettled, evidence=evidence, subject="")
        if miss.cause is MissCause.interference
        else miss
        for miss in misses
    ]


def attribute_without_simulation(case: Case) -> list[Attribution]:
    """As `attribute_misses`, but without simulating other modes, so a miss reported as interference
    may turn out to be the policy's. Reads the accounts only and takes no noticeable time."""
    return _misses(case, Attributor(case.accounts, case.capacity(), steps=case.steps))


def _misses(case: Case, attributor: Attributor) -> list[Attribution]:
    if case.only is None:
        return attributor.misses()
    return [miss for entry in case.selected for miss in attributor.attribute(entry)]


class Counterfactual:
    """Simulations of a case under batching modes. Together they make `max_steps` steps at most;
    requests that are not over by then have no timing."""

    def __init__(
        self, case: Case, on_progress: Callable[[int], None] = lambda n_steps: None
    ) -> None:
        self._case, self._cost, self._on_progress = case, case.cost, on_progress
        self.n_steps_left = case.max_steps

    def timings(self, mode: str) -> Mapping[str, Timing]:
        """The simulated timing of each request under a mode; under the engine's own mode, with the
        engine's parameters. Empty for a mode that is not loaded."""
        accounts, setup = self._case.accounts, self._case.setup
        if not accounts:
            return {}
        clock = VirtualClock(min(entry.arrived_s for entry in accounts))
        try:
            simulated = replace(
                setup,
                policy=self._policy(mode),
                prefix_cache=False,  # cached tokens are left out of the prompts
                cost=self._cost,
                half_life=setup.half_life or _HALF_LIFE,
                is_strict=False,
            )
            state = simulated.build(clock, StepLog(), POLICIES.build)
        except UnknownKind:
            return {}
        caps = Caps(setup.n_host_blocks, setup.copy_s, copy_latency_s=setup.host_latency_s)
        n_before = self._case.max_steps - self.n_steps_left
        client = _Clients(
            accounts, self.n_steps_left, lambda n_steps: self._on_progress(n_before + n_steps)
        )
        with suppress(SimulationStuck, _OutOfSteps):
            Simulator([Replica(state, Simulated(self._cost, caps))], clock).run(client)
        self.n_steps_left -= min(self.n_steps_left, state.counters.steps)
        return client.timings

    def _policy(self, mode: str) -> Mapping[str, Any]:
        own = self._case.setup.policy
        if mode == own["kind"]:
            return own
        fields: Mapping[str, Any] = POLICIES.get(mode).model_fields
        shared = {key: own[key] for key in _SHARED if key in own and key in fields}
        return {"kind": mode, **shared}


class _OutOfSteps(Exception):
    """The simulations have made `max_steps` steps."""


class _Clients:
    """Submit the requests of `accounts` at their arrivals and cancel those that clients cancelled,
    at the same instants."""

    is_closed = False  # as for a live engine

    def __init__(
        self, accounts: Sequence[Account], max_steps: int, on_progress: Callable[[int], None]
    ) -> None:
        self._on_progress, self._n_steps = on_progress, 0
        ordered = sorted(accounts, key=lambda entry: (entry.arrived_s, entry.request_id))
        self._leaving = [
            (entry.arrived_s + entry.e2e_s, entry.request_id)
            for entry in ordered
            if entry.state == "finished_abort" and entry.e2e_s is not None
        ]
        heapify(self._leaving)
        self._coming = deque(map(_request, ordered))
        self.timings: dict[str, Timing] = {}
        self._max_steps = max_steps

    def next_s(self) -> float | None:
        instants = [self._coming[0].arrived_s] if self._coming else []
        instants += [self._leaving[0][0]] if self._leaving else []
        return min(instants, default=None)

    def act(self, engine: SimulatedService) -> None:
        while self._coming and self._coming[0].arrived_s <= engine.now_s:
            with suppress(AdmissionError):  # the budgets of another mode may refuse the request
                engine.submit(self._coming.popleft())
        while self._leaving and self._leaving[0][0] <= engine.now_s:
            _, request_id = heappop(self._leaving)
            engine.cancel(request_id)
            self._end(request_id, engine)

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        for request in events.ends:
            self._end(request.id, engine)
        self._n_steps += 1
        if self._n_steps % _STEPS_PER_REPORT == 0:
            self._on_progress(self._n_steps)
        if self._n_steps >= self._max_steps:
            raise _OutOfSteps

    def refuse(self, request: Request, error: AdmissionError) -> None:
        pass  # as in `act`

    def _end(self, request_id: str, engine: SimulatedService) -> None:
        account = engine.explain(request_id)
        if account is not None:
            self.timings[request_id] = timing(account)


def _request(entry: Account) -> Request:
    """The request of an account: its prompt without the cached tokens, its answer of the same
    length."""
    is_cut = entry.state == "finished_abort"
    return Request(
        id=entry.request_id,
        tokens=[0] * max(1, entry.input_tokens - entry.cached_tokens),
        max_tokens=entry.max_tokens,
        arrived_s=entry.arrived_s,
        tenant=entry.tenant,
        priority=entry.priority,
        ttft_slo_s=entry.ttft_slo_s,
        tpot_slo_s=entry.tpot_slo_s,
        deadline_s=entry.deadline_s,
        oracle_output_tokens=None if is_cut else max(1, entry.output_tokens),
    )


def observed_cost(steps: Sequence[StepRecord], prior: CostModel | None) -> StepCost:
    """A cost model under which the steps of a log take as long in sum as they took, planning
    included.

    A `prior` under which steps take time is scaled. Otherwise the coefficients of a step, a token,
    a token of context and prompt attention are fitted: non-negative least squares. Without any step
    that computed something the result is the prior, or a model without costs.
    """
    worked = [step for step in steps if step.n_prefill_tokens or step.n_decode]
    base = prior if isinstance(prior, StepCost) else StepCost()
    if not worked:
        return base
    took_s = np.array([step.duration_s + step.plan_s for step in worked])
    shapes = [shape_of(step) for step in worked]
    estimated_s = sum(map(base.estimate, shapes))
    if estimated_s > 0:
        return scaled(base, float(took_s.sum()) / estimated_s)
    features = np.array(
        [
            (1.0, s.prefill_tokens + s.n_decode, s.context_tokens, s.prefill_attention)
            for s in shapes
        ]
    )
    step_s, token_s, context_s, attention_s = _non_negative(features, took_s)
    return StepCost(
        step_s=step_s,
        added_token_s=token_s,
        context_token_s=context_s,
        prefill_attention_s=attention_s,
    )


def shape_of(step: StepRecord) -> StepShape:
    """The shape of a recorded step. A record without requests (level "sizes") counts all its
    prompts as a single one."""
    n_prompts = sum(n > 1 for _, n in step.items) if step.items else step.n_prefill_tokens > 0
    padding, n = NO_PADDING, step.padding_tokens
    if n:
        n_context = step.padding_context_tokens
        is_prefill = step.n_prefill_tokens > 0
        padding = Padding(n, 0, n_context) if is_prefill else Padding(0, n, n_context)
    return StepShape(
        n_seqs=step.n_decode + int(n_prompts),
        prefill_tokens=step.n_prefill_tokens,
        prefill_attention=step.prefill_attention,
        n_decode=step.n_decode,
        context_tokens=step.context_tokens,
        padding=padding,
    )


def scaled(cost: StepCost, factor: float) -> StepCost:
    """The model with every step `factor` times as long."""
    names = [name for name in StepCost.__dataclass_fields__ if name.endswith("_s")]
    pieces = tuple((k, piece_s * factor) for k, piece_s in cost.seq_pieces)
    return replace(
        cost, seq_pieces=pieces, **{name: getattr(cost, name) * factor for name in names}
    )


Numbers = NDArray[np.float64]


def _non_negative(features: Numbers, target: Numbers) -> list[float]:
    """Least-squares coefficients under the condition that none is negative: the best among all
    subsets of the columns whose unconstrained solution meets it, which is exact for so few
    columns. (`scipy.optimize.nnls` would cost an import of 0.3 s in the serving process.)"""
    n_columns = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)  # columns of very different sizes
    best, best_error = np.zeros(n_columns), float(target @ target)
    for n_used in range(1, n_columns + 1):
        for used in map(list, combinations(range(n_columns), n_used)):
            columns = features[:, used] / scale[used]
            solution = np.linalg.lstsq(columns, target, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(np.square(columns @ solution - target).sum())
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(n_columns), error
                best[used] = solution / scale[used]
    return [float(value) for value in best]
