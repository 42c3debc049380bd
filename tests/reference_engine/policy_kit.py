"""Random traffic on an engine of a given mode, with a record of every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from reference_engine.policies.base import POLICIES, Policy
from reference_engine.simulator import simulate
from reference_engine.state.batch import StepResult
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import Limits, Plan, check_plan
from reference_engine.state.predictor import LengthDist
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output

STEP_S = 0.01
COST = StepCost(step_s=STEP_S, token_s=1e-4)


@dataclass(frozen=True)
class Arrival:
    """A request and the instant of its arrival."""

    at_s: float
    n_prompt: int
    n_output: int
    tenant: str = "a"
    priority: int = 0
    ttft_slo_s: float | None = None
    deadline_in_s: float | None = None


class KnownLengths:
    """A predictor with the true output lengths; `spread` is q90 − q50."""

    def __init__(self, spread: float = 0.0, **n_output: int) -> None:
        self.spread, self.n_output = spread, n_output

    def predict(self, request: Request) -> LengthDist:
        left = float(max(1, self.n_output[request.id] - request.n_output))
        return LengthDist(left, left, left + self.spread)

    def observe(self, request: Request) -> None:
        """Nothing to learn."""


def job(name: str, at_s: float, n_output: int, n_prompt: int = 1, **fields: Any) -> Request:
    """A request with a prompt unlike all others."""
    own = sum(map(ord, name)) * 7
    prompt = [(own + i) % 256 for i in range(n_prompt)]
    return request(name, prompt, n_output, arrived_s=at_s, **fields)


def finish_times(
    mode: str, jobs: Sequence[Request], *, max_num_seqs: int = 1, **knobs: Any
) -> dict[str, float]:
    """The end of each job (s) in steps of 1 s, in order of their ends. The predictor knows the
    output lengths."""
    fresh = [
        job(
            req.id, req.arrived_s, req.max_tokens, req.n_prompt, priority=req.priority,
            tenant=req.tenant, ttft_slo_s=req.ttft_slo_s, deadline_s=req.deadline_s,
        )
        for req in jobs
    ]  # fmt: skip
    done = simulate(
        fresh,
        POLICIES.build({"kind": mode, **knobs}),
        limits=Limits(max_num_seqs, 1 << 20, 1 << 17, 320),
        predictor=KnownLengths(**{req.id: req.max_tokens for req in jobs}),
    )
    return {req.id: req.finished_s or 0.0 for req in done.finished}


arrivals = st.builds(
    Arrival,
    at_s=st.integers(0, 60).map(lambda n: n / 20),
    n_prompt=st.integers(1, 120),
    n_output=st.integers(1, 30),
    tenant=st.sampled_from("abc"),
    priority=st.integers(-2, 2),
    ttft_slo_s=st.none() | st.sampled_from([0.05, 0.2, 1.0]),
    deadline_in_s=st.none() | st.sampled_from([0.1, 0.5, 2.0]),
)
traffic = st.lists(arrivals, min_size=1, max_size=16).map(lambda a: sorted(a, key=lambda r: r.at_s))


@dataclass
class Moment:
    """A plan, the state it was made for, and its outcome."""

    now_s: float
    plan: Plan
    waiting: list[Request]  # before the step
    n_running: int
    shares: dict[str, int]  # tokens per request, as planned
    admitted: set[str]  # by the core
    wrote: list[str]  # ids of the requests that got a token
    n_preempted: int

    @property
    def n_tokens(self) -> int:
        return sum(self.shares.values())

    @property
    def planned(self) -> list[str]:
        """Ids of the admissions, in the plan's order."""
        waiting = {req.id for req in self.waiting}
        return [item.request_id for item in self.plan.items if item.request_id in waiting]


def submit(engine: Rig, k: int, arrival: Arrival) -> Request:
    """Admit request `r{k}`, with a prompt unlike all others."""
    arrived_s = engine.clock.now_s()
    req = request(
        f"r{k}",
        [(37 * k + i) % 256 for i in range(arrival.n_prompt)],
        arrival.n_output,
        arrived_s=arrived_s,
        tenant=arrival.tenant,
        priority=arrival.priority,
        ttft_slo_s=arrival.ttft_slo_s,
        deadline_s=None if arrival.deadline_in_s is None else arrived_s + arrival.deadline_in_s,
    )
    engine.admit(req)
    return req


def play(
    policy: str | Policy, coming: Sequence[Arrival], *, n_blocks: int = 24, max_num_seqs: int = 6,
    **knobs: Any,
) -> list[Moment]:  # fmt: skip
    """Run the traffic to its end in virtual time and check each answer."""
    engine = rig(
        n_blocks, 160, max_num_seqs, policy=policy, cost=COST,
        executor_args={"step_s": STEP_S}, **knobs,
    )  # fmt: skip
    requests: list[Request] = []
    moments: list[Moment] = []
    for _ in range(10_000):
        while len(requests) < len(coming) and coming[len(requests)].at_s <= engine.clock.now_s():
            requests.append(submit(engine, len(requests), coming[len(requests)]))
        if engine.state.has_work:
            moments.append(_step(engine))
        elif len(requests) < len(coming):
            engine.clock.advance(coming[len(requests)].at_s - engine.clock.now_s())
        else:
            for req in requests:
                assert req.output == toy_output(req.tokens[: req.n_prompt], req.max_tokens)
            assert engine.state.kv.n_free == n_blocks
            return moments
    raise AssertionError(f"{policy}: still work after {len(moments)} steps")


def _step(engine: Rig) -> Moment:
    """As `core.step`, with a record of the plan."""
    state = engine.state
    view = state.view()
    before_s, n_before = view.now_s, state.counters.preemptions
    waiting, n_running = list(view.waiting), len(view.running)
    plan = check_plan(state.policy.plan(view), view)
    named = {item.request_id: item.n_tokens for item in plan.items}
    left_out = {*named, *plan.hold, *(entry.request_id for entry in plan.preempt)}
    decoding = view.decoding if plan.decode_all else ()
    shares = {req.id: 1 for req in decoding if req.id not in left_out} | named
    planned = state.place(plan)
    admitted = {req.id for req in waiting if view.is_running(req.id)}
    result = engine.executor.execute(planned.batch) if planned.batch.has_work else StepResult()
    wrote = [event.request.id for event in state.commit(planned, result)]
    state.check()
    until_s = state.wait_until_s
    if until_s is not None and engine.clock.now_s() == before_s:
        assert until_s > before_s
        engine.clock.advance(min(until_s - before_s, STEP_S))
    n_preempted = state.counters.preemptions - n_before
    return Moment(before_s, plan, waiting, n_running, shares, admitted, wrote, n_preempted)
