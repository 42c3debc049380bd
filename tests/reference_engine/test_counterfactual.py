"""Constructed misses of known cause, and the step costs that the attribution uses."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from reference_engine.attribution.attribution import MissCause
from reference_engine.attribution.counterfactual import (
    Case,
    Counterfactual,
    attribute_misses,
    attribute_without_simulation,
    observed_cost,
    shape_of,
)
from reference_engine.core.setup import Setup
from reference_engine.policies.chunked import Chunked
from reference_engine.policies.sjf import Sjf
from reference_engine.simulator import simulate
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import Limits
from tests.reference_engine.engine_kit import request

# 10 ms a step and 1 ms a token: 1000 tokens of prompt are 4 steps of 256.
COST = StepCost(step_s=0.01, added_token_s=0.001)
LIMITS = Limits(max_num_seqs=8, max_step_tokens=512, max_model_len=4096, vocab_size=320)
CHUNKED = Chunked(token_budget=256)


def case(requests, policy=CHUNKED, max_steps=20_000) -> Case:
    served = simulate(requests, policy, COST, limits=LIMITS, n_blocks=512, level="full")
    setup = replace(Setup.of(served.state), half_life=0.0)
    return Case(setup, served.accounts, served.steps, max_steps)


def behind_a_long_one(**slos):
    """Four long prompts at once, 16 steps of 0.27 s to read, and a short one just behind them."""
    long = [request(f"long-{i}", [10 + i] * 1000, 5) for i in range(4)]
    return [*long, request("short", [2] * 20, 5, arrived_s=0.001, **slos)]


def test_a_short_prompt_behind_long_ones_is_attributed_to_the_policy():
    misses = attribute_misses(case(behind_a_long_one(ttft_slo_s=0.6)))
    assert [(m.request_id, m.cause, m.subject) for m in misses] == [
        ("short", MissCause.policy, "sjf")
    ]
    assert misses[0].evidence.startswith("under sjf it would have been 0.")
    assert [
        m.cause for m in attribute_without_simulation(case(behind_a_long_one(ttft_slo_s=0.6)))
    ] == [MissCause.interference]


def test_the_mode_that_meets_the_slo_has_no_miss():
    served_case = case(behind_a_long_one(ttft_slo_s=0.6), Sjf(token_budget=256, prompt_weight=1.0))
    assert attribute_misses(served_case) == []


def test_an_slo_that_no_order_can_meet_is_attributed_to_interference():
    """Ten equal prompts at once, of which the last must wait for nine whatever the order."""
    equal = [request(f"r{i}", [i] * 200, 2) for i in range(9)]
    served_case = case([*equal, request("last", [9] * 200, 2, ttft_slo_s=1.0)])
    (miss,) = attribute_misses(served_case)
    assert (miss.request_id, miss.cause) == ("last", MissCause.interference)


def test_an_slo_missed_on_an_idle_engine_is_attributed_to_the_request():
    (miss,) = attribute_misses(case([request("a", [1] * 1000, 5, ttft_slo_s=0.5)]))
    assert (miss.cause, miss.subject) == (MissCause.request, "")


def test_overload_is_attributed_to_capacity():
    flood = [
        request(f"r{i}", [i % 256] * 500, 20, arrived_s=0.1 * i, ttft_slo_s=1.0) for i in range(400)
    ]
    misses = attribute_misses(case(flood))
    assert len(misses) > 200
    share = sum(miss.cause is MissCause.capacity for miss in misses) / len(misses)
    assert share > 0.8  # all but those before the queue grew


def test_a_miss_that_the_simulation_does_not_reproduce_is_not_attributed_to_the_policy():
    """The machine stalled for five seconds: no mode is the cause, though all would be faster."""
    served_case = case([request("a", [1] * 20, 5, ttft_slo_s=1.0)])
    late = served_case.accounts[0]._replace(ttft_s=5.0, e2e_s=5.1, queue_s=5.0)
    (miss,) = attribute_misses(replace(served_case, accounts=[late]))
    assert miss.cause is MissCause.interference


def test_a_request_cancelled_while_waiting_is_attributed_to_the_policy():
    served_case = case(behind_a_long_one(ttft_slo_s=0.6))
    cancelled = [
        entry._replace(state="finished_abort", ttft_s=None, tpot_s=None, e2e_s=1.0, output_tokens=0)
        if entry.request_id == "short"
        else entry
        for entry in served_case.accounts
    ]
    (miss,) = attribute_misses(replace(served_case, accounts=cancelled))
    assert (miss.was_s, miss.cause, miss.subject) == (None, MissCause.policy, "sjf")


@pytest.mark.parametrize("max_steps", [3, 25])
def test_too_few_simulated_steps_leave_a_miss_unsettled(max_steps):
    """25 are enough for the mode that served them (20 steps), not for any other."""
    served_case = case(behind_a_long_one(ttft_slo_s=0.6), max_steps=max_steps)
    (miss,) = attribute_misses(served_case)
    assert (miss.cause, miss.subject) == (MissCause.unsettled, "")
    assert miss.evidence == (
        f"{max_steps} simulated steps were too few to show whether another mode would have met it"
    )


def test_a_cause_that_needs_no_other_mode_is_found_without_simulated_steps():
    (miss,) = attribute_misses(case([request("a", [1] * 1000, 5, ttft_slo_s=0.5)], max_steps=1))
    assert miss.cause is MissCause.request


def test_without_the_serving_mode_no_policy_is_the_cause():
    served_case = case(behind_a_long_one(ttft_slo_s=0.6))
    unknown = replace(served_case.setup, policy={**served_case.setup.policy, "kind": "of-a-plugin"})
    assert [m.cause for m in attribute_misses(replace(served_case, setup=unknown))] == [
        MissCause.interference
    ]
    simulation = Counterfactual(replace(served_case, max_steps=30))
    for mode in ("chunked", "sjf", "bucketed"):
        simulation.timings(mode)
    assert simulation.n_steps_left == 0


def test_simulated_under_its_own_mode_a_request_has_the_same_timing():
    served_case = case(behind_a_long_one())
    timings = Counterfactual(served_case).timings("chunked")
    for entry in served_case.accounts:
        assert timings[entry.request_id] == pytest.approx((entry.ttft_s, entry.tpot_s, entry.e2e_s))


def test_a_case_can_be_limited_to_one_request_and_pickled():
    served_case = case(behind_a_long_one(ttft_slo_s=0.6))
    only = pickle.loads(pickle.dumps(replace(served_case, only="short")))
    assert attribute_misses(only) == attribute_misses(served_case)
    assert attribute_misses(replace(served_case, only="long-0")) == []


def test_a_cost_model_is_scaled_to_the_observed_steps():
    steps = case(behind_a_long_one()).steps
    twice = [step._replace(duration_s=2 * step.duration_s, plan_s=0.0) for step in steps]
    cost = observed_cost(twice, COST)
    assert (cost.step_s, cost.added_token_s) == pytest.approx((0.02, 0.002))
    assert replace(cost, step_s=0, added_token_s=0) == StepCost()
    assert observed_cost([], COST) == COST


def test_without_a_model_the_coefficients_are_fitted():
    truth = StepCost(step_s=0.002, added_token_s=30e-6, context_token_s=0.4e-6)
    rng = np.random.default_rng(1)
    steps = [
        step._replace(duration_s=truth.estimate(shape_of(step)) * rng.normal(1, 0.01), plan_s=0.0)
        for step in case(behind_a_long_one()).steps
    ]
    cost = observed_cost(steps, StepCost())
    assert cost.step_s == pytest.approx(truth.step_s, rel=0.1)
    assert cost.added_token_s == pytest.approx(truth.added_token_s, rel=0.1)
    assert min(cost.step_s, cost.added_token_s, cost.context_token_s) >= 0
    # Steps that get faster with more tokens make no token cheaper than nothing.
    odd = [s._replace(duration_s=0.1 - 1e-5 * s.n_prefill_tokens, plan_s=0.0) for s in steps]
    assert observed_cost(odd, None).added_token_s == 0.0
