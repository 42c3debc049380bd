"""Chunked prefill by example: the tokens of each request in a step."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from loadgen.errors import UnknownKind
from reference_engine.core.interventions import switch_policy
from reference_engine.policies.base import POLICIES
from reference_engine.policies.chunked import Chunked
from reference_engine.state.plan import Cause, Item, Why
from tests.reference_engine.engine_kit import request, rig


def test_a_long_prompt_is_cut_to_the_budget_and_continued():
    engine = rig(token_budget=20)
    engine.admit(request("long", range(50), 2))
    planned = []
    while engine.state.has_work:
        planned.append(engine.shares)
        engine.step()
    assert planned == [{"long": 20}, {"long": 20}, {"long": 10}, {"long": 1}]


def test_decodes_keep_running_during_a_long_prefill():
    engine = rig(token_budget=20)
    engine.admit(request("short", range(5), 10))
    engine.step()
    engine.admit(request("long", range(100, 150), 2))
    assert engine.shares == {"short": 1, "long": 19}


def test_requests_are_served_first_come_first_served_within_a_step():
    engine = rig(token_budget=20)
    engine.admit(*(request(name, range(i, i + 8), 2) for i, name in enumerate("abc")))
    plan = engine.plan
    assert plan.items == (Item("a", 8), Item("b", 8), Item("c", 4))


def test_a_cached_prefix_costs_no_budget():
    engine = rig(token_budget=64)
    engine.admit(request("first", range(60), 1))
    engine.drain()
    engine.admit(request("again", range(60), 1))
    assert engine.plan.items == (Item("again", 60 - 48),)


def test_at_most_max_num_seqs_requests_run():
    engine = rig(max_num_seqs=2)
    engine.admit(*(request(name, range(5), 3) for name in "abc"))
    plan = engine.plan
    assert len(plan.items) == 2
    assert plan.rest == Cause(Why.no_seq_slot)


def test_a_step_always_has_a_token_for_each_running_sequence():
    engine = rig(token_budget=3, max_num_seqs=64)
    engine.admit(*(request(f"r{i}", [i], 9) for i in range(8)))
    engine.step()
    assert len(engine.step()) == 3


def test_an_admission_leaves_the_watermark_free():
    engine = rig(n_blocks=10, watermark=0.3)
    engine.admit(request("a", range(16), 2), request("b", range(100, 196), 2))
    plan = engine.plan
    assert plan.items == (Item("a", 16), Item("b", 96))  # 1 + 6 + 3 spare = 10 blocks
    engine = rig(n_blocks=10, watermark=0.4)
    engine.admit(request("a", range(16), 2), request("b", range(100, 196), 2))
    plan = engine.plan
    assert plan.items == (Item("a", 16),)
    assert plan.causes == (("b", Cause(Why.no_kv_blocks)),)
    assert plan.rest == Cause(Why.behind, "b")


def test_no_request_is_admitted_in_a_step_that_must_preempt():
    engine = rig(n_blocks=4, max_model_len=64)
    engine.admit(request("a", range(16), 30), request("b", range(50, 82), 9))
    engine.step()  # a grows into its second block next, and all four are taken by then
    engine.admit(request("c", [1], 2))
    assert engine.shares == {"a": 1, "b": 1}
    assert engine.plan.rest == Cause(Why.no_kv_blocks)


def test_a_prompt_can_be_capped_per_step():
    engine = rig(long_prefill_tokens=4)
    engine.admit(request("a", range(9), 1), request("b", range(20, 23), 1))
    assert engine.plan.items == (Item("a", 4), Item("b", 3))


def test_the_mode_has_aliases():
    assert {POLICIES.get(name) for name in ("chunked", "vllm_v1", "sarathi")} == {Chunked}
    with pytest.raises(UnknownKind, match="did you mean 'chunked'"):
        POLICIES.get("chunkd")


def test_unknown_parameters_and_values_out_of_range_are_rejected():
    with pytest.raises(ValidationError, match="token_budget"):
        POLICIES.build({"kind": "chunked", "token_budget": 0})
    with pytest.raises(ValidationError, match="budget_tokens"):
        POLICIES.build({"kind": "chunked", "budget_tokens": 5})


# --- order by cached prefix


def with_cached_prefixes(**knobs):
    """One slot, steps of 1 s; `warm` leaves 48 tokens in the cache, and `one` shares 16 of them."""
    engine = rig(
        max_num_seqs=1, policy="chunked", order="longest_prefix", executor_args={"step_s": 1.0},
        **knobs,
    )  # fmt: skip
    shared = list(range(48))
    engine.admit(request("warm", shared, 2))
    for _ in range(2):
        engine.step()
    engine.admit(
        request("none", [9] * 60, 1, arrived_s=2.0),
        request("one", [*shared[:16], *[8] * 44], 1, arrived_s=2.0),
        request("none_2", [7] * 60, 1, arrived_s=2.0),
        request("three", [*shared, *[6] * 12], 1, arrived_s=2.0),
    )
    return engine


def test_the_longest_cached_prefix_is_admitted_first():
    engine = with_cached_prefixes()
    assert not engine.policy.keeps_order
    assert [e.request.id for e in engine.drain()] == ["three", "one", "none", "none_2"]


def test_a_request_that_has_starved_goes_before_a_cached_prefix():
    """At 4 s, when two requests are done, all others have waited for 2 s: order of arrival."""
    engine = with_cached_prefixes(starvation="1500ms")
    assert [e.request.id for e in engine.drain()] == ["three", "one", "none", "none_2"]
    engine = with_cached_prefixes(starvation="1ms")
    engine.clock.advance(0.1)
    assert [e.request.id for e in engine.drain()] == ["none", "one", "none_2", "three"]


def test_the_order_of_arrival_remains_without_the_option():
    engine = with_cached_prefixes()
    switch_policy(engine.state, Chunked())
    assert engine.policy.keeps_order
    assert [e.request.id for e in engine.drain()] == ["none", "one", "none_2", "three"]
