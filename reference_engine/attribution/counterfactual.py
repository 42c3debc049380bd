"""The same requests under another batching mode: what would each of them have been served?

Simulated, on an engine like the one that served them, whose steps take as long as its steps took.
An answer is as long as it was, a client that left leaves at the same instant, and what the prefix
cache had is had again. Only the mode is another. It is a model's word: where it does not even show
a miss under the mode that did miss, it has nothing to say about others (see `attribution`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.clock import VirtualClock
from loadgen.errors import UnknownKind
from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import (
    Attribution,
    Attributor,
    EngineCapacity,
    MissCause,
    Timing,
)
from reference_engine.core.core import EngineState
from reference_engine.core.setup import Setup
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import SimulationStuck, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.cost_model import NO_PADDING, CostModel, Padding, StepCost, StepShape
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord
from reference_engine.state.swap import HostPool

MODES = ("chunked", "bucketed", "sjf", "deadline", "priority", "token_fair", "prefill_first")
"""Asked in this order; the first that keeps a promise is named."""

_PRICED = 1000  # steps, evenly spread, are enough to say what steps cost
_SHARED = ("max_num_seqs", "token_budget")  # limits of the engine rather than of one mode


@dataclass(frozen=True, slots=True)
class Case:
    """An engine, what it served, its steps, and how many steps may be simulated in all. `only` is
    the one request whose misses are asked for; None: everybody's."""

    setup: Setup
    accounts: Sequence[Account]
    steps: Sequence[StepRecord]
    max_steps: int
    only: str | None = None

    @property
    def asked(self) -> Sequence[Account]:
        """The accounts whose misses are asked for."""
        if self.only is None:
            return self.accounts
        return [entry for entry in self.accounts if entry.request_id == self.only]

    @property
    def cost(self) -> StepCost:
        apart = len(self.steps) // _PRICED + 1
        return observed_cost(self.steps[::apart], self.setup.cost)

    def plant(self) -> EngineCapacity:
        limits = self.setup.limits
        n_tokens = self.setup.n_blocks * self.setup.block_tokens
        return EngineCapacity(self.cost, limits.max_num_seqs, limits.max_step_tokens, n_tokens)


def attribute_misses(case: Case) -> list[Attribution]:
    """The missed promises of a case and whose fault each is. May take as long as `max_steps`
    simulated steps do; what they were too few for is unsettled."""
    control = str(case.setup.policy["kind"])
    others = [mode for mode in MODES if mode != control]
    what_if = Counterfactual(case)
    attributor = Attributor(
        case.accounts, case.plant(), what_if.served, others, case.steps, control=control
    )
    found = _misses(case, attributor)
    if what_if.n_steps_left:
        return found
    return [_unsettled(miss, case.max_steps) for miss in found]


def _unsettled(miss: Attribution, max_steps: int) -> Attribution:
    """A miss for which no better mode was found, though not all were simulated to the end."""
    if miss.cause is not MissCause.interference:
        return miss
    because = f"{max_steps} simulated steps did not tell whether another mode would have kept it"
    return replace(miss, cause=MissCause.unsettled, evidence=because, subject="")


def attribute_without_simulation(case: Case) -> list[Attribution]:
    """As `attribute_misses`, but without simulating other modes, so a miss reported as interference
    may turn out to be the policy's. Reads the accounts only and takes no noticeable time."""
    return _misses(case, Attributor(case.accounts, case.plant(), steps=case.steps))


def _misses(case: Case, attributor: Attributor) -> list[Attribution]:
    if case.only is None:
        return attributor.misses()
    return [found for entry in case.asked for found in attributor.attribute(entry)]


class Counterfactual:
    """The requests of a case, served again under modes. All simulations together make `max_steps`
    steps at most; what was not served by then has no times."""

    def __init__(self, case: Case) -> None:
        self._case, self._cost = case, case.cost
        self.n_steps_left = case.max_steps

    def served(self, mode: str) -> Mapping[str, Timing]:
        """What each request would have been served with under a mode, or, where it is the engine's
        own, under that with its own parameters. Nothing for a mode that is not known here."""
        try:
            policy = self._policy(mode)
        except UnknownKind:
            return {}
        case, setup = self._case, self._case.setup
        if not case.accounts:
            return {}
        clock = VirtualClock(min(entry.arrived_s for entry in case.accounts))
        caps = Caps(setup.n_host_blocks, setup.copy_s)
        state = EngineState(
            setup.limits,
            # Hits are taken off the prompts; they are not found anew.
            KvPool(setup.n_blocks, setup.block_tokens, prefix_cache=False),
            clock,
            policy,
            cost=self._cost,
            predictor=QuantilePredictor(setup.half_life or 500.0),
            host=HostPool(caps.n_host_blocks, caps.copy_s),
            preempt=setup.preempt,
            async_depth=setup.async_depth,
            is_strict=False,
        )
        client = _Clients(case.accounts, self.n_steps_left)
        with suppress(SimulationStuck, _Enough):
            Simulator(state, Simulated(self._cost, clock.advance, caps), clock).run(client)
        self.n_steps_left -= min(self.n_steps_left, state.counters.steps)
        return {request.id: _timing(request) for request in client.sent if request.state.is_over}

    def _policy(self, mode: str) -> Policy:
        own = self._case.setup.policy
        if mode == own["kind"]:
            return POLICIES.build(own)
        known: Mapping[str, Any] = POLICIES.get(mode).model_fields
        return POLICIES.build(
            {"kind": mode} | {key: own[key] for key in _SHARED if key in own and key in known}
        )


class _Enough(Exception):
    """As many steps as were allowed."""


class _Clients:
    """Sends what was sent and leaves where it was left."""

    is_closed = False  # a live engine never knows

    def __init__(self, accounts: Sequence[Account], max_steps: int) -> None:
        ordered = sorted(accounts, key=lambda entry: (entry.arrived_s, entry.request_id))
        self._left = [
            (entry.arrived_s + entry.e2e_s, entry.request_id)
            for entry in ordered
            if entry.state == "finished_abort" and entry.e2e_s is not None
        ]
        heapify(self._left)
        self._coming = deque(map(_request, ordered))
        self.sent: list[Request] = []
        self._n_steps_left = max_steps

    def next_s(self) -> float | None:
        instants = [self._coming[0].arrived_s] if self._coming else []
        instants += [self._left[0][0]] if self._left else []
        return min(instants, default=None)

    def act(self, engine: Simulator) -> None:
        while self._coming and self._coming[0].arrived_s <= engine.now_s:
            request = self._coming.popleft()
            with suppress(AdmissionError):  # it was served; another mode's budgets may refuse it
                engine.submit(request)
                self.sent.append(request)
        while self._left and self._left[0][0] <= engine.now_s:
            engine.cancel(heappop(self._left)[1])

    def receive(self, events: StepTokens, engine: Simulator) -> None:
        self._n_steps_left -= 1
        if self._n_steps_left <= 0:
            raise _Enough


def _request(entry: Account) -> Request:
    """As it was asked, its prompt without what was cached, and answering as long as it did."""
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


def _timing(request: Request) -> Timing:
    first_s, end_s = request.first_token_s, request.finished_s
    is_whole = end_s is not None and request.state.value in ("stop", "length")
    n_more = request.n_output - 1
    tpot_s = None
    if first_s is not None and end_s is not None and n_more > 0:
        tpot_s = (end_s - first_s) / n_more
    return Timing(
        None if first_s is None else first_s - request.arrived_s,
        tpot_s,
        end_s - request.arrived_s if is_whole and end_s is not None else None,
    )


Numbers = NDArray[np.float64]


def observed_cost(steps: Sequence[StepRecord], prior: CostModel | None) -> StepCost:
    """A cost model whose steps take as long in sum as those of a log, planning included. `prior`
    gives it its shape where it says that steps take time at all; else the coefficients of a step,
    a token, a token of context and prompt attention are fitted, none of them negative, to the sum
    of squares. Without steps that computed something it is the prior, or costs nothing."""
    worked = [step for step in steps if step.n_prefill_tokens or step.n_decode]
    known = prior if isinstance(prior, StepCost) else StepCost()
    if not worked:
        return known
    took_s = np.array([step.duration_s + step.plan_s for step in worked])
    said_s = sum(known.estimate(shape_of(step)) for step in worked)
    if said_s > 0:
        return scaled(known, float(took_s.sum()) / said_s)
    shapes = [shape_of(step) for step in worked]
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
    """What a step's record says of its shape; where it does not name its requests (level "sizes"),
    its prompts count as one."""
    n_prompts = sum(n > 1 for _, n in step.items) if step.items else step.n_prefill_tokens > 0
    padding = NO_PADDING
    if step.padding_tokens:
        is_prompt = step.n_prefill_tokens > 0
        n = step.padding_tokens
        padding = Padding(prefill_tokens=n) if is_prompt else Padding(decode_rows=n)
    return StepShape(
        n_seqs=step.n_decode + int(n_prompts),
        prefill_tokens=step.n_prefill_tokens,
        prefill_attention=step.prefill_attention,
        n_decode=step.n_decode,
        context_tokens=step.context_tokens,
        padding=padding,
    )


def scaled(cost: StepCost, factor: float) -> StepCost:
    """Every step `factor` times as long."""
    seconds = {
        name: getattr(cost, name) * factor
        for name in StepCost.__dataclass_fields__
        if name.endswith("_s")
    }
    return replace(cost, **seconds)


def _non_negative(features: Numbers, target: Numbers) -> list[float]:
    """The least-squares coefficients among those that are not negative: the best of all subsets of
    the columns whose own solution is not, which is exact for so few of them."""
    n_columns = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)  # columns of very different sizes
    best, best_error = np.zeros(n_columns), float(target @ target)
    for n_used in range(1, n_columns + 1):
        for used in combinations(range(n_columns), n_used):
            columns = features[:, used] / scale[list(used)]
            found = np.linalg.lstsq(columns, target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.square(columns @ found - target).sum())
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(n_columns), error
                best[list(used)] = found / scale[list(used)]
    return [float(value) for value in best]
