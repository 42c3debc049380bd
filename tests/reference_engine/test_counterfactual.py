"""Constructed misses whose fault is known, and the step costs they are judged with."""

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


def behind_a_long_one(**promise):
    """Four long prompts at once, 16 steps of 0.27 s to read, and a short one just behind them."""
    long = [request(f"long-{i}", [10 + i] * 1000, 5) for i in range(4)]
    return [*long, request("short", [2] * 20, 5, arrived_s=0.001, **promise)]


def test_a_short_prompt_behind_long_ones_is_the_policys_fault():
    found = attribute_misses(case(behind_a_long_one(ttft_slo_s=0.6)))
    assert [(m.request_id, m.cause, m.subject) for m in found] == [
        ("short", MissCause.policy, "sjf")
    ]
    assert found[0].evidence.startswith("under sjf it would have been 0.")
    assert [
        m.cause for m in attribute_without_simulation(case(behind_a_long_one(ttft_slo_s=0.6)))
    ] == [MissCause.interference]


def test_under_the_mode_that_keeps_it_nothing_is_missed():
    asked = case(behind_a_long_one(ttft_slo_s=0.6), Sjf(token_budget=256, prompt_weight=1.0))
    assert attribute_misses(asked) == []


def test_what_no_order_can_keep_is_interference():
    """Ten equal prompts at once, of which the last must wait for nine whatever the order."""
    equal = [request(f"r{i}", [i] * 200, 2) for i in range(9)]
    asked = case([*equal, request("last", [9] * 200, 2, ttft_slo_s=1.0)])
    (found,) = attribute_misses(asked)
    assert (found.request_id, found.cause) == ("last", MissCause.interference)


def test_what_not_even_an_idle_engine_keeps_is_the_requests_fault():
    (found,) = attribute_misses(case([request("a", [1] * 1000, 5, ttft_slo_s=0.5)]))
    assert (found.cause, found.subject) == (MissCause.request, "")


def test_too_much_for_any_order_is_the_capacitys_fault():
    flood = [
        request(f"r{i}", [i % 256] * 500, 20, arrived_s=0.1 * i, ttft_slo_s=1.0) for i in range(400)
    ]
    found = attribute_misses(case(flood))
    assert len(found) > 200
    share = sum(miss.cause is MissCause.capacity for miss in found) / len(found)
    assert share > 0.8  # all but the first ones, before the flood was one


def test_a_miss_that_the_model_does_not_show_says_nothing_about_policies():
    """The machine stood still for five seconds: no mode is to blame, though all would do better."""
    asked = case([request("a", [1] * 20, 5, ttft_slo_s=1.0)])
    late = asked.accounts[0]._replace(ttft_s=5.0, e2e_s=5.1, queue_s=5.0)
    (found,) = attribute_misses(replace(asked, accounts=[late]))
    assert found.cause is MissCause.interference


def test_a_client_that_gave_up_waiting_counts_as_a_miss_of_the_policy():
    asked = case(behind_a_long_one(ttft_slo_s=0.6))
    gone = [
        entry._replace(state="finished_abort", ttft_s=None, tpot_s=None, e2e_s=1.0, output_tokens=0)
        if entry.request_id == "short"
        else entry
        for entry in asked.accounts
    ]
    (found,) = attribute_misses(replace(asked, accounts=gone))
    assert (found.was_s, found.cause, found.subject) == (None, MissCause.policy, "sjf")


@pytest.mark.parametrize("max_steps", [3, 25])
def test_what_too_few_steps_cannot_tell_is_unsettled_and_not_others_fault(max_steps):
    """25 are enough for the mode that served them (20 steps), not for any other."""
    asked = case(behind_a_long_one(ttft_slo_s=0.6), max_steps=max_steps)
    (found,) = attribute_misses(asked)
    assert (found.cause, found.subject) == (MissCause.unsettled, "")
    told = f"{max_steps} simulated steps did not tell whether another mode would have kept it"
    assert found.evidence == told


def test_what_does_not_need_other_modes_is_settled_without_steps():
    (found,) = attribute_misses(case([request("a", [1] * 1000, 5, ttft_slo_s=0.5)], max_steps=1))
    assert found.cause is MissCause.request


def test_without_the_mode_itself_nobody_is_blamed():
    asked = case(behind_a_long_one(ttft_slo_s=0.6))
    unknown = replace(asked.setup, policy={**asked.setup.policy, "kind": "of-a-plugin"})
    assert [m.cause for m in attribute_misses(replace(asked, setup=unknown))] == [
        MissCause.interference
    ]
    what_if = Counterfactual(replace(asked, max_steps=30))
    for mode in ("chunked", "sjf", "bucketed"):
        what_if.served(mode)
    assert what_if.n_steps_left == 0


def test_served_again_under_its_own_mode_a_request_is_served_alike():
    asked = case(behind_a_long_one())
    again = Counterfactual(asked).served("chunked")
    for entry in asked.accounts:
        assert again[entry.request_id] == pytest.approx((entry.ttft_s, entry.tpot_s, entry.e2e_s))


def test_one_request_may_be_asked_for_and_a_case_can_travel():
    asked = case(behind_a_long_one(ttft_slo_s=0.6))
    only = pickle.loads(pickle.dumps(replace(asked, only="short")))
    assert attribute_misses(only) == attribute_misses(asked)
    assert attribute_misses(replace(asked, only="long-0")) == []


def test_a_known_model_is_scaled_to_what_steps_took():
    steps = case(behind_a_long_one()).steps
    twice = [step._replace(duration_s=2 * step.duration_s, plan_s=0.0) for step in steps]
    found = observed_cost(twice, COST)
    assert (found.step_s, found.added_token_s) == pytest.approx((0.02, 0.002))
    assert replace(found, step_s=0, added_token_s=0) == StepCost()
    assert observed_cost([], COST) == COST


def test_without_a_model_the_coefficients_are_fitted():
    truth = StepCost(step_s=0.002, added_token_s=30e-6, context_token_s=0.4e-6)
    rng = np.random.default_rng(1)
    steps = [
        step._replace(duration_s=truth.estimate(shape_of(step)) * rng.normal(1, 0.01), plan_s=0.0)
        for step in case(behind_a_long_one()).steps
    ]
    found = observed_cost(steps, StepCost())
    assert found.step_s == pytest.approx(truth.step_s, rel=0.1)
    assert found.added_token_s == pytest.approx(truth.added_token_s, rel=0.1)
    assert min(found.step_s, found.added_token_s, found.context_token_s) >= 0
    # Steps that get faster with more tokens make no token cheaper than nothing.
    odd = [s._replace(duration_s=0.1 - 1e-5 * s.n_prefill_tokens, plan_s=0.0) for s in steps]
    assert observed_cost(odd, None).added_token_s == 0.0
