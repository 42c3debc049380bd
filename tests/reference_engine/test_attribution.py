"""Missed SLOs are attributed in order: request, capacity, policy, interference."""

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
ENGINE = EngineCapacity(StepCost(step_s=0.01, added_token_s=0.001), 8, 100, 10_000)
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


def sentences(entry: Account, others: tuple[Account, ...] = (), **options: object) -> list[str]:
    return [a.sentence() for a in Attributor([entry, *others], ENGINE, **options).attribute(entry)]  # type: ignore[arg-type]  # any of its options


def test_a_request_alone_takes_its_prompt_steps_and_a_step_per_token():
    # 100 + 50 prompt tokens: 0.11 + 0.06 s; then ten tokens of 11 ms.
    assert timing_alone(BASE, ENGINE) == pytest.approx((0.17, 0.011, 0.28))
    assert timing_alone(BASE._replace(cached_tokens=100), ENGINE).ttft_s == pytest.approx(0.06)
    assert timing_alone(BASE._replace(output_tokens=1), ENGINE).tpot_s is None


def test_prompt_tokens_of_a_request_alone_are_compared_with_the_tokens_before_them():
    # The first 100 tokens have 50 before them on average, the other 50 have 125: 5 000 + 6 250.
    engine = replace(ENGINE, cost=StepCost(prefill_attention_s=1e-6))
    assert timing_alone(BASE, engine).ttft_s == pytest.approx(0.01125)


def test_an_slo_missed_even_alone_is_attributed_to_the_request():
    assert sentences(BASE._replace(ttft_slo_s=0.1)) == [
        "TTFT 1.5 s (SLO 0.1 s): even alone it takes 0.17 s"
    ]
    assert sentences(BASE._replace(deadline_s=100.2)) == [
        "E2E 2 s (SLO 0.2 s): even alone it takes 0.28 s"
    ]


def test_the_estimate_alone_is_at_most_the_time_since_admission():
    """Steps in which the machine stalled make the estimate 1.7 s; its first token took 0.5 s."""
    slow = replace(ENGINE, cost=StepCost(step_s=0.1, added_token_s=0.01))
    entry = BASE._replace(ttft_slo_s=0.4, deadline_s=100.9, tpot_slo_s=0.045)
    misses = Attributor([entry], slow).attribute(entry)
    assert [miss.sentence() for miss in misses] == [
        "TTFT 1.5 s (SLO 0.4 s): even alone it takes 0.5 s",
        "TPOT 0.05 s (SLO 0.045 s): even alone it takes 0.05 s",
        "E2E 2 s (SLO 0.9 s): even alone it takes 1 s",
    ]
    slower = BASE._replace(ttft_slo_s=0.6, deadline_s=101.1)
    misses = Attributor([slower], slow).attribute(slower)
    assert [(miss.slo.metric, miss.cause) for miss in misses] == [
        ("ttft", MissCause.interference),
        ("e2e", MissCause.interference),
    ]


def test_capacity_is_the_fullest_batch_of_such_requests():
    # 150 prompt tokens for 11 of output: 100 tokens a step are 6.83 decodes and 93.2 of prompts,
    # in 10 ms + 7 ms + 93 ms.
    most = capacity_tokens_per_s([BASE], ENGINE)
    assert most == pytest.approx(100 / 0.110, rel=1e-9)
    assert capacity_tokens_per_s([BASE], replace(ENGINE, cost=StepCost())) is None
    # One slot: one decode and 13.6 of prompts in 10 + 1 + 14 ms.
    most = capacity_tokens_per_s([BASE], replace(ENGINE, max_num_seqs=1))
    assert most == pytest.approx((1 + 150 / 11) / 0.025, rel=1e-9)


def test_a_miss_under_more_tokens_than_the_engine_computes_is_attributed_to_capacity():
    entry = BASE._replace(ttft_slo_s=0.5)
    others = tuple(
        BASE._replace(request_id=f"o{i}", arrived_s=100.0 - 0.15 * i) for i in range(1, 201)
    )
    # 201 · 161 tokens in 31 s, and the engine computes 909 a second.
    assert sentences(entry, others) == [
        "TTFT 1.5 s (SLO 0.5 s): 1044 tokens/s arrived, the engine computes 909 at most"
    ]
    assert "big delayed it by" in sentences(entry, others[::2])[0]


def test_an_slo_that_another_mode_meets_is_attributed_to_the_policy():
    simulated = []

    def simulate(mode: str) -> dict[str, Timing]:
        simulated.append(mode)
        return {"a": Timing({"sjf": 0.9, "bucketed": 0.2}[mode], 0.05, 1.0)}

    entry = BASE._replace(ttft_slo_s=0.5)
    attributor = Attributor([entry], ENGINE, simulate, ["sjf", "bucketed"])
    for _ in range(2):
        (miss,) = attributor.attribute(entry)
        assert (miss.cause, miss.subject) == (MissCause.policy, "bucketed")
    assert miss.evidence == "under bucketed it would have been 0.2 s"
    assert simulated == ["sjf", "bucketed"]  # each once


def test_an_slo_that_no_mode_meets_is_attributed_to_the_longest_blocker():
    entry = BASE._replace(ttft_slo_s=0.5)
    assert sentences(
        entry, simulate=lambda mode: {"a": Timing(None, None, None)}, modes=["sjf"]
    ) == ["TTFT 1.5 s (SLO 0.5 s): big delayed it by 0.7 s"]
    unblocked = entry._replace(waits=((Cause(Why.no_seq_slot), 1.0),))
    assert sentences(unblocked) == ["TTFT 1.5 s (SLO 0.5 s): it waited 1 s: 1 s for sequence slots"]


def test_slos_that_were_met_or_not_yet_due_are_not_missed():
    assert missed_slos(BASE._replace(ttft_slo_s=1.5, tpot_slo_s=0.05, deadline_s=102.0)) == []
    assert missed_slos(BASE) == []
    cancelled = BASE._replace(state="finished_abort", ttft_s=None, tpot_s=None, e2e_s=0.4)
    assert missed_slos(cancelled._replace(ttft_slo_s=0.5, deadline_s=100.5, tpot_slo_s=0.01)) == []
    assert missed_slos(cancelled._replace(ttft_slo_s=0.25, deadline_s=100.25)) == [
        SloLimit("ttft", 0.25),
        SloLimit("e2e", 0.25),
    ]
    live = BASE._replace(ttft_s=None, tpot_s=None, e2e_s=None, ttft_slo_s=0.1)
    assert missed_slos(live) == []


def test_a_prompt_in_the_same_steps_slows_a_decode_down():
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
    (miss,) = Attributor([chat], ENGINE, steps=list(log.steps)).attribute(chat)
    assert (miss.slo.metric, miss.cause, miss.subject) == (
        "tpot",
        MissCause.interference,
        "essay",
    )


def test_all_misses_of_a_run_come_in_order_of_arrival():
    entries = [
        BASE._replace(request_id=f"r{i}", arrived_s=100.0 - i, ttft_slo_s=0.1 if i % 2 else 9.0)
        for i in range(4)
    ]
    misses = Attributor(entries, ENGINE).misses()
    assert [a.request_id for a in misses] == ["r3", "r1"]
    assert {a.cause for a in misses} == {MissCause.request}
