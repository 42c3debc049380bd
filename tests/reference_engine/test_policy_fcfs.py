"""The first-come-first-served modes by example: continuous, orca, prefill_first, split_fuse, and
chunked with a budget from the TPOT SLO."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Cause, Item, Why
from reference_engine.state.predictor import LengthDist
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_kit import request, rig


class PerToken:
    """Steps of 1 ms plus 0.1 ms a token, for sizes computed by hand."""

    def estimate(self, shape: StepShape) -> float:
        return 1e-3 + 1e-4 * (shape.prefill_tokens + shape.n_decode)


class Short:
    """Every answer is predicted to have 10 tokens, 20 at the 90th percentile."""

    def predict(self, request: Request) -> LengthDist:
        return LengthDist(10.0, 10.0, 20.0)

    def observe(self, request: Request) -> None:
        """Predictions do not depend on observations."""


def test_continuous_prefills_a_whole_prompt_with_the_decodes() -> None:
    engine = rig(policy="continuous")
    engine.admit(request("short", range(5), 10))
    engine.step()
    engine.admit(request("long", range(100, 600), 2))
    assert engine.shares == {"short": 1, "long": 500}


def test_continuous_admits_no_request_past_a_blocked_head() -> None:
    engine = rig(policy="continuous", n_blocks=10, watermark=0.0)
    engine.admit(request("a", range(64), 9))
    engine.step()
    engine.admit(request("big", range(100, 212), 2), request("small", [1], 2))
    plan = engine.plan
    assert plan.items == ()
    assert plan.causes == (("big", Cause(Why.no_kv_blocks)),)
    assert plan.rest == Cause(Why.behind, "big")


def test_a_prompt_longer_than_a_step_is_prefilled_in_several_steps() -> None:
    engine = rig(policy="continuous", max_step_tokens=40)
    engine.admit(request("long", range(100), 1), request("next", range(200, 210), 1))
    shares = [engine.shares]
    while engine.state.has_work:
        engine.step()
        shares.append(engine.shares)
    assert shares[:3] == [{"long": 40}, {"long": 40}, {"long": 20, "next": 10}]


def test_orca_reserves_for_all_a_request_may_generate() -> None:
    """16 prompt tokens and up to 33 new ones are 48 in KV: 3 blocks each, so 3 of 4 run."""
    engine = rig(policy="orca", n_blocks=11)
    engine.admit(*(request(f"r{k}", range(20 * k, 20 * k + 16), 33) for k in range(4)))
    assert [item.request_id for item in engine.plan.items] == ["r0", "r1", "r2"]
    engine.drain()
    assert engine.state.counters.preemptions == 0


def test_continuous_runs_more_requests_than_orca_and_preempts() -> None:
    engine = rig(policy="continuous", n_blocks=11)
    engine.admit(*(request(f"r{k}", range(20 * k, 20 * k + 16), 33) for k in range(4)))
    assert len(engine.plan.items) == 4
    engine.drain()
    assert engine.state.counters.preemptions > 0


@pytest.mark.parametrize(
    ("reserve", "n_admitted"),
    [("watermark", 9), ("prompt", 9), ("predicted", 3), ("max", 2)],
)
def test_the_reserve_of_an_admission_limits_the_running_requests(
    reserve: str, n_admitted: int
) -> None:
    """Prompts of one block; 16 + 20 tokens are 3 blocks, 16 + 49 − 1 are 4; there are 9."""
    engine = rig(policy="continuous", n_blocks=9, reserve=reserve, watermark=0.0, predictor=Short())
    engine.admit(*(request(f"r{k}", range(20 * k, 20 * k + 16), 49) for k in range(9)))
    assert len(engine.plan.items) == n_admitted


def test_prefill_first_stops_all_decodes_for_a_prompt() -> None:
    engine = rig(policy="prefill_first")
    engine.admit(request("a", range(5), 10))
    assert engine.shares == {"a": 5}
    engine.step()
    assert engine.shares == {"a": 1}
    engine.admit(request("b", range(100, 130), 10))
    assert engine.shares == {"b": 30}
    engine.step()
    assert engine.shares == {"a": 1, "b": 1}


def test_prefill_first_decodes_when_no_prompt_can_be_taken() -> None:
    engine = rig(policy="prefill_first", max_num_seqs=1)
    engine.admit(request("a", range(5), 10), request("b", range(5), 10))
    engine.step()
    assert engine.shares == {"a": 1}
    assert engine.plan.rest == Cause(Why.no_seq_slot)


def test_prefill_first_packs_prompts_up_to_its_token_limit() -> None:
    engine = rig(policy="prefill_first", max_num_batched_tokens=64)
    engine.admit(*(request(f"r{k}", range(40 * k, 40 * k + 30), 2) for k in range(3)))
    assert engine.shares == {"r0": 30, "r1": 30}
    assert engine.plan.rest == Cause(Why.no_token_budget)


@settings(max_examples=25)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    budget=st.integers(1, 50),
)
def test_split_fuse_steps_have_exactly_the_budget_while_there_is_work(
    prompts: list[int], budget: int
) -> None:
    engine = rig(policy="split_fuse", token_budget=budget, n_blocks=1000, max_model_len=160)
    engine.admit(*(request(f"r{k}", [k] * n, 8) for k, n in enumerate(prompts)))
    while engine.state.has_work:
        running, waiting = list(engine.state.view().running), list(engine.state.view().waiting)
        left = sum(r.n_remaining for r in running) + sum(r.n_tokens for r in waiting)
        n_planned = sum(engine.shares.values())
        room_for_more = len(running) < min(budget, 64)
        if left >= budget and (room_for_more or not waiting):
            assert n_planned == budget
        assert n_planned <= budget
        engine.step()


def test_split_fuse_can_fill_a_step_with_padding() -> None:
    engine = rig(policy="split_fuse", token_budget=32, pad="budget")
    engine.admit(request("a", range(5), 3))
    assert engine.plan.padding.prefill_tokens == 27
    engine.drain()
    assert engine.state.counters.padding_tokens == 27 + 31 + 31


def test_an_slo_budget_prefills_as_much_as_the_cost_model_allows() -> None:
    """1 ms + 0.1 ms a token within 11 ms: 100 tokens, of which one decodes."""
    engine = rig(token_budget="slo", tpot_slo="11ms", cost=PerToken())
    engine.admit(request("a", range(5), 10))
    engine.step()
    engine.admit(request("long", range(100, 900), 2))
    assert engine.shares == {"a": 1, "long": 99}


def test_an_slo_budget_follows_the_strictest_request() -> None:
    engine = rig(token_budget="slo", cost=PerToken())
    lax, strict = request("lax", range(5), 10), request("strict", range(20, 25), 10)
    lax.tpot_slo_s, strict.tpot_slo_s = 0.021, 0.006
    engine.admit(lax, strict)
    engine.step()
    engine.admit(request("long", range(100, 900), 2))
    assert engine.shares == {"lax": 1, "strict": 1, "long": 48}


def test_an_slo_that_cannot_be_met_still_lets_prompts_progress() -> None:
    engine = rig(token_budget="slo", tpot_slo="1ms", cost=PerToken())
    engine.admit(request("a", range(5), 10))
    engine.step()
    engine.admit(request("long", range(100, 900), 2))
    assert engine.shares == {"a": 1, "long": 16}


def test_a_prompt_without_decodes_is_prefilled_at_once_whatever_the_slo() -> None:
    engine = rig(token_budget="slo", tpot_slo="1ms", cost=PerToken())
    engine.admit(request("long", range(800), 2))
    assert engine.plan.items == (Item("long", 800),)
