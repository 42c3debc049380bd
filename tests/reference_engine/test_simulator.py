"""The simulator against queueing theory, an independent recursion and known throughputs."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loadgen.system.clock import VirtualClock
from reference_engine.core.core import EngineState
from reference_engine.executors.simulated import Simulated
from reference_engine.model.zoo import SHAPES, resolve
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.simulator import Replica, SimulationStuck, Simulator, simulate
from reference_engine.state.cost_model import HARDWARE, StepCost, model_on_hardware, roofline_s
from reference_engine.state.kv import KvPool
from reference_engine.state.model_config import ModelConfig
from reference_engine.state.plan import Cause, Limits, Plan, Why
from reference_engine.state.sequence import Request, State

WIDE = Limits(100_000, 1 << 20, 1 << 17, 1 << 17)
ALPHA_MS, TAU_MS = 0.1438, 1.8874  # a V100's batch service l(b) = alpha·b + tau


def greedy(batch_size):
    """Serves all waiting requests, up to a batch, whenever the server is free."""
    return POLICIES.build(
        {"kind": "chunked", "max_num_seqs": batch_size, "token_budget": max(2048, batch_size)}
    )


def one_step_requests(arrived_s):
    """Each needs exactly one step: a prompt of one token, an answer of one."""
    return [Request(f"r{k}", [0], 1, float(at_s)) for k, at_s in enumerate(arrived_s)]


def poisson(rate, n, seed):
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))


def mean_response(arrived_s, batch_size, cost):
    done = simulate(one_step_requests(arrived_s), greedy(batch_size), cost, limits=WIDE).finished
    return float(np.mean([left_s(request) - request.arrived_s for request in done]))


def left_s(request):
    assert request.finished_s is not None
    return request.finished_s


def bulk_service(arrived_s, batch_size, tau_s, alpha_s):
    """When each arrival of a bulk-service queue leaves, by recursion without an engine."""
    leaves, free_s, k = [], 0.0, 0
    while k < len(arrived_s):
        start_s = max(free_s, arrived_s[k])
        n = sum(1 for at_s in arrived_s[k : k + batch_size] if at_s <= start_s)
        free_s = start_s + tau_s + alpha_s * n
        leaves += [free_s] * n
        k += n
    return leaves


# W = τ + λτ²/(2(1 − λτ)); the mean of 4 000 arrivals has a standard error of 1.0 and 2.2 %
@pytest.mark.parametrize(("rho", "response"), [(0.3, 1.2143), (0.5, 1.5)])
def test_one_request_at_a_time_is_an_m_d_1_queue(rho, response):
    arrived_s = poisson(rho, 4_000, seed=1)
    assert mean_response(arrived_s, 1, StepCost(step_s=1.0)) == pytest.approx(response, rel=0.04)


# Inoue, "Queueing analysis of GPU-based inference servers with dynamic batching" (2021): exact
# values of the embedded chain, in ms; 4 000 arrivals have a standard error of 0.7, 1.5 and 3.2 %
@pytest.mark.parametrize(("rho", "response_ms"), [(0.3, 4.2248), (0.5, 5.9019), (0.7, 9.8176)])
def test_taking_all_waiting_requests_is_the_bulk_service_queue(rho, response_ms):
    arrived_ms = poisson(rho / ALPHA_MS, 4_000, seed=1)
    cost = StepCost(step_s=TAU_MS, seq_s=ALPHA_MS)
    assert mean_response(arrived_ms, 100_000, cost) == pytest.approx(response_ms, rel=0.04)


@settings(max_examples=40)
@given(
    st.lists(st.floats(0, 3, allow_subnormal=False), min_size=1, max_size=20),
    st.integers(1, 5),
    st.floats(0.01, 2),
    st.floats(0, 1),
)
def test_every_request_leaves_when_the_recursion_says(gaps_s, batch_size, tau_s, alpha_s):
    arrived_s = np.cumsum(gaps_s).tolist()
    cost = StepCost(step_s=tau_s, seq_s=alpha_s)
    leaves_s = bulk_service(arrived_s, batch_size, tau_s, alpha_s)
    gap_s = np.abs(np.subtract.outer(arrived_s, leaves_s))
    assume(
        not gap_s.size or gap_s.min() > 1e-9
    )  # else rounding decides whether an arrival was in time
    simulation = simulate(one_step_requests(arrived_s), greedy(batch_size), cost, limits=WIDE)
    left_s = [request.finished_s for request in simulation.finished]
    assert left_s == pytest.approx(leaves_s, abs=1e-9)


@dataclass
class Roofline:
    """The fastest a step can be, plus a fixed overhead."""

    model: ModelConfig
    overhead_s: float = 0.0

    def estimate(self, shape):
        return roofline_s(self.model, HARDWARE["h200"], shape) + self.overhead_s


# nano-vllm's benchmark (256 requests at once, lengths uniform on 100-1024, seed 0) at the roofline
# of a measured H200, simulated elsewhere: output tokens per second
@pytest.mark.parametrize(
    ("shape", "overhead_s", "tokens_per_s"),
    [("0.6b", 0.0, 35.8e3), ("0.6b", 1.5e-3, 25.9e3), ("1b", 0.0, 70e3), ("8b", 0.0, 13.9e3)],
)
def test_a_known_benchmark_at_the_roofline(shape, overhead_s, tokens_per_s):
    rng = random.Random(0)
    inputs = [
        len([rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))]) for _ in range(256)
    ]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    assert sum(outputs) == 133_966
    requests = [
        Request(f"r{k}", [k] * n_in, n_out, 0.0)
        for k, (n_in, n_out) in enumerate(zip(inputs, outputs, strict=True))
    ]
    policy = POLICIES.build({"kind": "chunked", "token_budget": 16_384, "max_num_seqs": 512})
    simulation = simulate(
        requests, policy, Roofline(SHAPES[shape], overhead_s), limits=WIDE, prefix_cache=False
    )
    seconds = max(left_s(request) for request in simulation.finished)
    assert 133_966 / seconds == pytest.approx(tokens_per_s, rel=0.04)


def chat(n=60, seed=1):
    rng = np.random.default_rng(seed)
    return [
        Request(f"r{k}", [k] * int(rng.integers(1, 900)), int(rng.integers(1, 200)), float(at_s))
        for k, at_s in enumerate(np.cumsum(rng.exponential(0.03, n)))
    ]


def test_the_same_requests_make_the_same_steps():
    cost = model_on_hardware(resolve("8b"), "h200").cost
    policy = POLICIES.build({"kind": "chunked", "token_budget": 512})
    first, second = (simulate(chat(), policy, cost, n_blocks=300, level="full") for _ in range(2))
    assert first.steps == second.steps
    assert sum(step.n_preempted for step in first.steps) > 0
    assert [a.waits for a in first.accounts] == [a.waits for a in second.accounts]


def test_every_second_of_the_queue_has_a_cause():
    simulation = simulate(chat(), POLICIES.build({"kind": "chunked"}), StepCost(step_s=0.05))
    assert sum(account.queue_s for account in simulation.accounts) > 1
    for account in simulation.accounts:
        assert sum(seconds for _, seconds in account.waits) == pytest.approx(
            account.queue_s, abs=1e-9
        )


def test_a_request_that_can_never_run_is_rejected_and_the_others_go_on():
    requests = [Request("small", [1] * 10, 4, 0.0), Request("large", [1] * 4000, 4, 0.0)]
    simulation = simulate(requests, POLICIES.build({"kind": "chunked"}), n_blocks=100)
    assert [request.id for request in simulation.rejected] == ["large"]
    assert [(request.id, request.n_output) for request in simulation.finished] == [("small", 4)]


class Waits(Policy):
    """Waits for a second request, at most `patience_s`."""

    kind = "waits"
    patience_s: float = 5.0

    def plan(self, view):
        if len(view.waiting) >= 2 or view.running:
            return POLICIES.build({"kind": "chunked"}).plan(view)
        since_s = next(iter(view.waiting)).arrived_s
        if view.now_s >= since_s + self.patience_s:
            return POLICIES.build({"kind": "chunked"}).plan(view)
        return Plan(wait_until_s=since_s + self.patience_s, rest=Cause(Why.window_open))


def test_a_policy_that_waits_is_woken_by_an_arrival_or_by_its_own_clock():
    requests = one_step_requests([1.0, 3.0, 20.0])
    simulation = simulate(requests, Waits(), StepCost(step_s=0.5))
    assert [request.finished_s for request in simulation.finished] == [3.5, 3.5, 25.5]
    assert dict(simulation.accounts[2].waits) == {Cause(Why.window_open): 5.0}


class WaitsForever(Policy):
    """Waits for an instant that never comes."""

    kind = "for_ever"

    def plan(self, view):
        return Plan(wait_until_s=float("inf"), rest=Cause(Why.window_open))


def test_waiting_for_ever_is_an_error_that_names_policy_and_requests():
    message = "policy 'for_ever' waits for ever at 1 s: r0 wait"
    with pytest.raises(SimulationStuck, match=message):
        simulate(one_step_requests([1.0]), WaitsForever())


class Impatient:
    """Submits two requests and cancels the first in the middle of a step."""

    def __init__(self):
        self.todo = [(0.0, "a"), (0.0, "b"), (2.5, "")]
        self.received = []

    @property
    def is_closed(self):
        return True

    def next_s(self):
        return self.todo[0][0] if self.todo else None

    def act(self, engine):
        while self.todo and self.todo[0][0] <= engine.now_s:
            at_s, name = self.todo.pop(0)
            if name:
                engine.submit(Request(name, [1] * 4, 6, at_s))
            else:
                engine.cancel("a")

    def refuse(self, request, error):
        raise error

    def receive(self, events, engine):
        self.received += [(engine.now_s, event.request.id) for event in events]


def test_a_step_that_only_preempts_is_followed_by_another():
    # 7 blocks of 16 tokens: "b" decodes while "c" has 48 of 50 prompt tokens, and all blocks are
    # taken. "b", admitted later, is preempted for its own token, and the step computes nothing.
    policy = POLICIES.build({"kind": "deadline", "token_budget": 16})
    shapes = {"a": (29, 37, 0.0), "b": (50, 16, 10.0), "c": (50, 1, 10.0)}
    requests = [
        Request(name, [ord(name)] * n_prompt, n_output, at_s)
        for name, (n_prompt, n_output, at_s) in shapes.items()
    ]
    cost = StepCost(step_s=0.5, added_token_s=0.03)
    limits = Limits(2, 1 << 20, 1 << 17, 1 << 17)
    done = simulate(requests, policy, cost, limits=limits, n_blocks=7)
    assert {request.id: request.n_output for request in done.finished} == {"a": 37, "b": 16, "c": 1}
    assert done.state.kv.n_free == 7


def test_a_cancelled_request_leaves_at_the_end_of_the_step_with_its_blocks():
    clock, cost = VirtualClock(), StepCost(step_s=1.0)
    state = EngineState(WIDE, KvPool(8), clock, POLICIES.build({"kind": "chunked"}))
    client = Impatient()
    Simulator([Replica(state, Simulated(cost))], clock).run(client)
    assert [name for _, name in client.received] == ["a", "b"] * 3 + ["b"] * 3
    assert state.kv.n_free == 8
    account = state.explain("a")
    assert account is not None
    assert account.state == State.finished_abort.name


def two_replicas(cost, clock):
    for _ in range(2):
        state = EngineState(WIDE, KvPool(8), clock, greedy(1))
        yield Replica(state, Simulated(cost))


class Sends:
    """Submits requests at their arrivals; keeps (instant, id) of tokens and refusals."""

    def __init__(self, requests):
        self.todo, self.tokens, self.refused = list(requests), [], []

    @property
    def is_closed(self):
        return not self.todo

    def next_s(self):
        return self.todo[0].arrived_s if self.todo else None

    def act(self, engine):
        while self.todo and self.todo[0].arrived_s <= engine.now_s:
            engine.submit(self.todo.pop(0))

    def receive(self, events, engine):
        self.tokens += [(engine.now_s, event.request.id) for event in events]

    def refuse(self, request, error):
        self.refused.append((request.id, error.code))


def test_steps_of_two_replicas_overlap():
    clock = VirtualClock()
    replicas = list(two_replicas(StepCost(step_s=1.0), clock))
    client = Sends([Request("a", [1], 3, 0.0), Request("b", [1], 2, 0.25)])
    Simulator(replicas, clock, lambda request: "ab".index(request.id)).run(client)
    assert client.tokens == [(1.0, "a"), (1.25, "b"), (2.0, "a"), (2.25, "b"), (3.0, "a")]
    assert [replica.busy_s for replica in replicas] == [3.0, 2.0]


def test_a_request_that_arrives_during_a_step_is_refused_at_its_end():
    clock = VirtualClock()
    client = Sends([Request("a", [1], 3, 0.0), Request("large", [1] * 999, 3, 0.5)])
    Simulator(list(two_replicas(StepCost(step_s=1.0), clock)), clock, lambda r: 0).run(client)
    assert [name for name, _ in client.refused] == ["large"]
    assert [name for _, name in client.tokens] == ["a"] * 3


def test_a_request_that_continues_elsewhere_counts_its_output_as_output():
    continued = Request("a", [1, 1, 1, 7, 7], 4, 0.0, n_prompt=3)
    assert (continued.n_output, continued.output) == (2, [7, 7])
    simulation = simulate([continued], POLICIES.build({"kind": "chunked"}), level="full")
    assert [step.n_prefill_tokens for step in simulation.steps] == [5, 0]
    assert (continued.n_output, len(continued.tokens)) == (4, 7)
    assert continued.state is State.finished_length
