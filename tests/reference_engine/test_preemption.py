"""Preemption on purpose: schedules worked out by hand in steps of 1 s, and its invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference_engine.model.zoo import resolve
from reference_engine.policies.base import POLICIES
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import Simulation, simulate
from reference_engine.state.cost_model import model_on_hardware
from reference_engine.state.plan import Item, Limits, Plan, Preemption
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import request, rig
from tests.reference_engine.policy_kit import finish_times, job
from tests.reference_engine.test_core_plans import Scripted, scripted

SRPT: dict[str, Any] = {
    "prompt_weight": 0,
    "kappa": 0,
    "aging": 0,
    "preempt_until": 1,
    "starvation": "1h",
}
FEEDBACK: dict[str, Any] = {"base_quantum": "2s", "starvation": "1h"}
CLASSES_ONLY: dict[str, Any] = {"length_weight": 0, "deadline_weight": 0}


# --- the core


def test_a_planned_preemption_makes_room_in_the_same_step():
    engine = scripted(
        Plan((Item("old", 3),)),
        Plan((Item("new", 5),), preempt=(Preemption("old", by="new"),), decode_all=True),
        max_num_seqs=1,
    )
    engine.admit(old := request("old", [1, 2, 3], 9), request("new", range(5), 2))
    engine.step()
    assert [event.request.id for event in engine.step()] == ["new"]
    assert (list(engine.state.queues.running), old.state) == (["new"], State.preempted)
    engine.drain()


def test_waiting_after_a_preemption_is_charged_to_the_request_it_made_room_for():
    engine = scripted(
        Plan((Item("old", 3),)),
        Plan((Item("new", 5),), preempt=(Preemption("old", by="new"),), decode_all=True),
        max_num_seqs=1,
        executor_args={"step_s": 1.0},
    )
    engine.admit(request("old", [1, 2, 3], 9), request("new", range(5), 1))
    engine.step()
    engine.step()
    engine.drain()
    account = engine.state.explain("old")
    assert account is not None
    assert "1 s preempted by new" in account.sentence()


def test_an_admission_takes_what_a_preemption_adds_to_the_prefix_cache():
    """The victim's blocks are published when it gives way, and the prompt of the other begins with
    them: 32 of its 40 tokens are cached by then, so fewer are left than the plan gave it."""
    prompt = [7] * 16
    engine = scripted(
        Plan((Item("old", 16),)),
        *(Plan(decode_all=True) for _ in range(20)),
        max_num_seqs=1,
    )
    engine.admit(old := request("old", prompt, 40))
    for _ in range(20):
        engine.step()
    shared = [*prompt, *old.output][:32]
    engine.admit(new := request("new", [*shared, *range(8)], 2))
    left = engine.state.view().to_compute(new)
    assert left == 24  # the answer's block is not in the cache while it runs
    plan = Plan((Item("new", left),), preempt=(Preemption("old", by="new"),), decode_all=True)
    assert isinstance(engine.policy, Scripted)
    engine.policy.script.insert(0, plan)
    engine.step()
    assert new.n_cached == 32
    assert new.n_output == 1
    engine.drain()


# --- one slot, steps of 1 s: a has 10 tokens, b 3, c 1 and d 4

JOBS = [job("a", 0, 10), job("b", 2, 3), job("c", 3, 1), job("d", 4, 4)]


@pytest.mark.parametrize(
    ("mode", "knobs", "ends_s"),
    [
        # a until b comes, b until c comes, then b, d and the rest of a
        ("sjf", SRPT, {"c": 4, "b": 6, "d": 10, "a": 18}),
        ("sjf", {**SRPT, "preempt": "never"}, {"a": 10, "c": 11, "b": 14, "d": 18}),
        # b would have to leave after 2 of 3 tokens: it has written more than half of them
        ("sjf", {**SRPT, "preempt_until": 0.3}, {"b": 5, "c": 6, "d": 10, "a": 18}),
        # quanta of 2 and 4 s: a to 2, b to 4, c to 5, d to 7 at the top; then by the order in which
        # they sank: a from 7 to 11, b to 12, d to 14; the rest of a on the third level
        ("mlfq", FEEDBACK, {"c": 5, "b": 12, "d": 14, "a": 18}),
        ("mlfq", {**FEEDBACK, "preempt": "never"}, {"a": 10, "b": 13, "c": 14, "d": 18}),
        ("continuous", {}, {"a": 10, "b": 13, "c": 14, "d": 18}),
    ],
)
def test_one_slot_serves_as_worked_out_by_hand(mode, knobs, ends_s):
    assert finish_times(mode, JOBS, **knobs) == ends_s


@pytest.mark.parametrize(
    ("preemptive", "ends_s"),
    [(True, {"high": 5, "low": 13, "mid": 14}), (False, {"low": 10, "high": 13, "mid": 14})],
)
def test_a_high_class_takes_the_only_slot(preemptive, ends_s):
    """`mid` waits from 3 s on. At 5 s it is older than `low`, whose age stood still while it ran,
    but only by 2 of 100 SLOs: the class decides."""
    jobs = [
        job("low", 0, 10, priority=1), job("high", 2, 3, priority=-9), job("mid", 3, 1, priority=1)
    ]  # fmt: skip
    knobs = {**CLASSES_ONLY, "ttft_slo": "100s", "preemptive": preemptive}
    assert finish_times("priority", jobs, **knobs) == ends_s


def test_age_alone_preempts_nothing():
    """`low` has waited for 6 SLOs, which count 3 points, and `high` runs with one."""
    jobs = [job("high", 0, 20, priority=-9), job("low", 0.5, 2, priority=9)]
    assert finish_times("priority", jobs, **CLASSES_ONLY, preemptive=True) == {
        "high": 20, "low": 22
    }  # fmt: skip


def test_a_preempted_request_keeps_its_place_in_its_level():
    """Quanta of 2 and 4 s: a to 2, b to 4, then a on the second level until c comes at 5. At 6 a is
    before b again, and has a quantum of 4 s; then b, and the rest of a on the third level."""
    jobs = [job("a", 0, 10), job("b", 1, 3), job("c", 5, 1)]
    assert finish_times("mlfq", jobs, **FEEDBACK) == {"c": 6, "b": 11, "a": 14}


def test_age_stands_still_while_a_request_runs():
    """`low` runs for 4 s, gives way, and has waited for 1 s since: its age is 1 SLO, not 5."""
    engine = rig(
        64, 512, 1, policy="priority", preemptive=True, executor_args={"step_s": 1.0},
        **CLASSES_ONLY,
    )  # fmt: skip
    engine.admit(request("low", [1], 40, priority=9))
    for _ in range(4):
        engine.step()
    engine.admit(request("high", [2], 40, arrived_s=4.0, priority=-9))
    engine.step()
    explained = engine.policy.explain("low", engine.state.view())
    assert explained["score"] == pytest.approx(1.0 + 1 / (1 + 2.0**9))
    assert explained["overdue_in_s"] == pytest.approx(59.0)


def test_a_score_of_shortest_first_stands_still_while_the_request_runs():
    engine = rig(64, 512, 1, policy="sjf", executor_args={"step_s": 1.0})
    engine.admit(request("a", [1], 40, arrived_s=0.0))
    engine.step()
    first = engine.policy.explain("a", engine.state.view())
    engine.step()
    second = engine.policy.explain("a", engine.state.view())
    assert (second["score"], second["overdue_in_s"]) == (first["score"], first["overdue_in_s"])
    engine.drain()


def test_a_request_that_has_run_longer_than_starvation_still_gives_way():
    """`long` has never waited, so it is not overdue after 9 s with a starvation of 3 s."""
    jobs = [job("long", 0, 90), job("short", 9, 2)]
    ends_s = finish_times("sjf", jobs, **SRPT | {"starvation": "3s"})
    assert ends_s == {"short": 11, "long": 92}


def test_a_request_that_starved_runs_as_long_as_it_starved_before_it_gives_way():
    """`long` is overdue at 4 s, runs from 5 s on, and gives way to `c` after 4 s."""
    jobs = [job("a", 0, 5), job("long", 0, 50), job("b", 1, 2), job("c", 6, 2)]
    ends_s = finish_times("sjf", jobs, **SRPT | {"starvation": "4s"})
    assert ends_s["a"] == 7  # b has gone before the rest of a
    assert ends_s["c"] == 13
    assert ends_s["long"] == 59


# --- many requests


def classes_under_load(*, preemptive: bool) -> Simulation:
    """400 requests of three classes at more than an 8B model on an H200 serves with 64 slots."""
    rng = np.random.default_rng(0)
    at_s = np.cumsum(rng.exponential(1 / 32, 400))
    requests = [
        request(
            f"r{k}", [k] * int(rng.integers(64, 1024)), int(rng.integers(8, 500)),
            arrived_s=float(t), priority=int(rng.choice([-2, 0, 2])),
        )
        for k, t in enumerate(at_s)
    ]  # fmt: skip
    policy = POLICIES.build({"kind": "priority", "preemptive": preemptive, "max_num_seqs": 64})
    cost = model_on_hardware(resolve("8b"), "h200").cost
    limits = Limits(64, 1 << 16, 1 << 15, 1 << 10)
    return simulate(requests, policy, cost, limits=limits, predictor=QuantilePredictor())


def test_preemptive_priority_helps_the_high_class_and_costs_little_throughput():
    plain, preemptive = classes_under_load(preemptive=False), classes_under_load(preemptive=True)
    n_preemptions = preemptive.state.counters.preemptions
    assert 40 < n_preemptions < 400 * 3

    def high_ttft_s(done: Simulation) -> float:
        high = [r for r in done.finished if r.priority == -2]
        return float(np.mean([(r.first_token_s or 0.0) - r.arrived_s for r in high]))

    def end_s(done: Simulation) -> float:
        return max(r.finished_s or 0.0 for r in done.finished)

    assert high_ttft_s(preemptive) < 0.8 * high_ttft_s(plain)
    assert end_s(preemptive) < 1.03 * end_s(plain)
