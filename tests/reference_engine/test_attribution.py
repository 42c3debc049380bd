"""Missed promises are blamed in order: request, capacity, policy, interference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference_engine.accounting.explain import Account
from reference_engine.attribution.attribution import (
    Attributor,
    EngineCapacity,
    MissCause,
    SloLimit,
    Timing,
    capacity_tokens_per_s,
    missed_slos,
    slowed_by,
    timing_alone,
)
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import Cause, Why
from reference_engine.state.steps import StepLog
from tests.reference_engine.engine_kit import request, rig

# A step takes 10 ms and 1 ms for each of its tokens.
PLANT = EngineCapacity(StepCost(step_s=0.01, added_token_s=0.001), 8, 100, 10_000)
BASE = Account(
    request_id="a",
    tenant="red",
    state="finished_length",
    input_tokens=150,
    cached_tokens=0,
    output_tokens=11,
    max_tokens=11,
    priority=0,
    n_preemptions=0,
    arrived_s=100.0,
    queue_s=1.0,
    ttft_s=1.5,
    tpot_s=0.05,
    e2e_s=2.0,
    ttft_slo_s=None,
    tpot_slo_s=None,
    deadline_s=None,
    tokens_ahead=None,
    predicted_start_s=None,
    start_error_s=None,
    n_displaced=0,
    displaced_s=0.0,
    pushed_back_s=0.0,
    waits=((Cause(Why.behind, "big"), 0.7), (Cause(Why.no_token_budget), 0.3)),
    blockers=(),
)


def blames(entry: Account, others: tuple[Account, ...] = (), **options: object) -> list[str]:
    return [a.sentence() for a in Attributor([entry, *others], PLANT, **options).attribute(entry)]  # type: ignore[arg-type]  # any of its options


def test_alone_a_prompt_takes_steps_of_its_own():
    # 100 + 50 prompt tokens: 0.11 + 0.06 s; then ten tokens of 11 ms.
    assert timing_alone(BASE, PLANT) == pytest.approx((0.17, 0.011, 0.28))
    assert timing_alone(BASE._replace(cached_tokens=100), PLANT).ttft_s == pytest.approx(0.06)
    assert timing_alone(BASE._replace(output_tokens=1), PLANT).tpot_s is None


def test_what_could_not_be_kept_alone_is_the_requests_own_fault():
    assert blames(BASE._replace(ttft_slo_s=0.1)) == [
        "TTFT 1.5 s, 0.1 s promised: even alone it takes 0.17 s"
    ]
    assert blames(BASE._replace(deadline_s=100.2)) == [
        "E2E 2 s, 0.2 s promised: even alone it takes 0.28 s"
    ]


def test_alone_a_request_takes_no_longer_than_it_took_in_company_once_it_was_let_in():
    """Steps that the machine stood still in make the estimate 1.7 s; it had its token in 0.5 s."""
    slow = replace(PLANT, cost=StepCost(step_s=0.1, added_token_s=0.01))
    entry = BASE._replace(ttft_slo_s=0.4, deadline_s=100.9, tpot_slo_s=0.045)
    found = Attributor([entry], slow).attribute(entry)
    assert [miss.sentence() for miss in found] == [
        "TTFT 1.5 s, 0.4 s promised: even alone it takes 0.5 s",
        "TPOT 0.05 s, 0.045 s promised: even alone it takes 0.05 s",
        "E2E 2 s, 0.9 s promised: even alone it takes 1 s",
    ]
    kept = BASE._replace(ttft_slo_s=0.6, deadline_s=101.1)
    found = Attributor([kept], slow).attribute(kept)
    assert [(miss.slo.metric, miss.cause) for miss in found] == [
        ("ttft", MissCause.interference),
        ("e2e", MissCause.interference),
    ]


def test_capacity_is_the_fullest_batch_of_such_requests():
    # 150 prompt tokens for 11 of output: 100 tokens a step are 6.83 decodes and 93.2 of prompts,
    # in 10 ms + 7 ms + 93 ms.
    most = capacity_tokens_per_s([BASE], PLANT)
    assert most == pytest.approx(100 / 0.110, rel=1e-9)
    assert capacity_tokens_per_s([BASE], replace(PLANT, cost=StepCost())) is None
    # One slot: one decode and 13.6 of prompts in 10 + 1 + 14 ms.
    most = capacity_tokens_per_s([BASE], replace(PLANT, max_num_seqs=1))
    assert most == pytest.approx((1 + 150 / 11) / 0.025, rel=1e-9)


def test_more_than_can_be_done_is_the_capacitys_fault():
    entry = BASE._replace(ttft_slo_s=0.5)
    others = tuple(
        BASE._replace(request_id=f"o{i}", arrived_s=100.0 - 0.15 * i) for i in range(1, 201)
    )
    # 201 · 161 tokens in 31 s, of 909 that can be done.
    assert blames(entry, others) == [
        "TTFT 1.5 s, 0.5 s promised: 1.04e+03 tokens/s were offered, the engine does 909 at most"
    ]
    assert "because of big" in blames(entry, others[::2])[0]


def test_what_another_policy_keeps_is_the_policys_fault():
    asked = []

    def replay(mode: str) -> dict[str, Timing]:
        asked.append(mode)
        return {"a": Timing({"sjf": 0.9, "bucketed": 0.2}[mode], 0.05, 1.0)}

    entry = BASE._replace(ttft_slo_s=0.5)
    attributor = Attributor([entry], PLANT, replay, ["sjf", "bucketed"])
    for _ in range(2):
        (found,) = attributor.attribute(entry)
        assert (found.cause, found.subject) == (MissCause.policy, "bucketed")
    assert found.evidence == "under bucketed it would have been 0.2 s"
    assert asked == ["sjf", "bucketed"]  # each once


def test_what_no_policy_keeps_is_interference_by_the_top_blocker():
    entry = BASE._replace(ttft_slo_s=0.5)
    assert blames(entry, replay=lambda mode: {"a": Timing(None, None, None)}, modes=["sjf"]) == [
        "TTFT 1.5 s, 0.5 s promised: 0.7 s because of big"
    ]
    nobody = entry._replace(waits=((Cause(Why.no_seq_slot), 1.0),))
    assert blames(nobody) == ["TTFT 1.5 s, 0.5 s promised: it waited 1 s: 1 s for sequence slots"]


def test_promises_that_were_kept_or_never_due_are_not_missed():
    assert missed_slos(BASE._replace(ttft_slo_s=1.5, tpot_slo_s=0.05, deadline_s=102.0)) == []
    assert missed_slos(BASE) == []
    gone = BASE._replace(state="finished_abort", ttft_s=None, tpot_s=None, e2e_s=0.4)
    assert missed_slos(gone._replace(ttft_slo_s=0.5, deadline_s=100.5, tpot_slo_s=0.01)) == []
    assert missed_slos(gone._replace(ttft_slo_s=0.25, deadline_s=100.25)) == [
        SloLimit("ttft", 0.25),
        SloLimit("e2e", 0.25),
    ]
    live = BASE._replace(ttft_s=None, tpot_s=None, e2e_s=None, ttft_slo_s=0.1)
    assert missed_slos(live) == []


def test_a_prompt_read_beside_a_decode_slows_it_down():
    log = StepLog(level="full")
    cost = StepCost(step_s=0.01, added_token_s=0.001)
    engine = rig(log=log, cost=cost, token_budget=101, executor_args={"step_s": 0.11})
    state = engine.state
    engine.admit(request("chat", [1, 2], 6, tpot_slo_s=0.05))
    engine.step()
    engine.admit(request("essay", range(300), 1, arrived_s=0.11))
    engine.drain()
    chat = state.explain("chat")
    assert chat is not None
    slowed = slowed_by(chat, list(log.steps))
    assert slowed == pytest.approx({"essay": 3 * 0.11 * 100 / 101})
    (found,) = Attributor([chat], PLANT, steps=list(log.steps)).attribute(chat)
    assert (found.slo.metric, found.cause, found.subject) == (
        "tpot",
        MissCause.interference,
        "essay",
    )


def test_all_misses_of_a_run_come_in_order_of_arrival():
    entries = [
        BASE._replace(request_id=f"r{i}", arrived_s=100.0 - i, ttft_slo_s=0.1 if i % 2 else 9.0)
        for i in range(4)
    ]
    found = Attributor(entries, PLANT).misses()
    assert [a.request_id for a in found] == ["r3", "r1"]
    assert {a.cause for a in found} == {MissCause.request}
