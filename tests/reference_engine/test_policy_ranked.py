"""Modes that rank requests: priority, weighted_naive, sjf, mlfq, deadline."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reference_engine.policies.mlfq import Mlfq
from reference_engine.state.cost_model import StepCost
from reference_engine.state.predictor import LengthDist
from tests.reference_engine.engine_kit import Rig, request, rig
from tests.reference_engine.policy_kit import Arrival, KnownLengths, play, traffic

RANKED = ["priority", "weighted_naive", "sjf", "mlfq", "deadline"]


def prompt(n: int) -> list[int]:
    return [n % 256] * n


def admitted_order(engine: Rig) -> list[str]:
    """The order in which the waiting requests get their first tokens computed."""
    waiting = list(engine.state.view().waiting)
    engine.drain()
    return [req.id for req in sorted(waiting, key=lambda req: req.scheduled_s or 0.0)]


# --- properties of each of them


@pytest.mark.parametrize("mode", RANKED)
@settings(max_examples=8)
@given(
    coming=traffic,
    token_budget=st.integers(4, 64),
    max_num_seqs=st.integers(1, 6),
    n_blocks=st.integers(10, 40),
)
def test_budgets_hold_and_nothing_idles(mode, coming, token_budget, max_num_seqs, n_blocks):
    """No step computes more than its budget, and none leaves both slots and blocks unused while a
    request waits: with nothing running, a request is always admitted."""
    for moment in play(
        mode, coming, n_blocks=n_blocks, max_num_seqs=max_num_seqs, token_budget=token_budget
    ):
        assert 1 <= moment.n_tokens <= token_budget
        n_running = moment.n_running - len(moment.plan.preempt) + len(moment.admitted)
        assert n_running <= max_num_seqs
        assert moment.admitted or moment.n_running


@pytest.mark.parametrize("mode", RANKED)
@settings(max_examples=3)
@given(coming=traffic)
def test_the_same_traffic_gives_the_same_plans(mode, coming):
    first, second = play(mode, coming), play(mode, coming)
    assert [moment.plan for moment in first] == [moment.plan for moment in second]


@pytest.mark.parametrize("mode", ["priority", "sjf", "mlfq", "deadline"])
@settings(max_examples=8)
@given(coming=traffic, starvation_ms=st.integers(10, 200))
def test_no_later_arrival_overtakes_an_overdue_request(mode, coming, starvation_ms):
    """The bound on waiting: after `starvation`, a request waits for those only that were overdue
    before it. (In sjf, requests with a TTFT SLO have another instant.)"""
    starvation_s = starvation_ms / 1e3
    coming = [Arrival(a.at_s, a.n_prompt, a.n_output, a.tenant, a.priority) for a in coming]
    since: dict[str, float] = {}
    for moment in play(
        mode, coming, n_blocks=12, max_num_seqs=2, token_budget=48, starvation=f"{starvation_ms}ms"
    ):
        for req in moment.waiting:  # since the arrival, or else the last preemption
            since.setdefault(req.id, moment.now_s if req.n_preemptions else req.arrived_s)
        overdue = {
            req.id for req in moment.waiting if since[req.id] + starvation_s + 1e-9 < moment.now_s
        }
        planned = moment.planned
        if overdue and planned:
            n_first = sum(name in overdue for name in planned)
            assert set(planned[:n_first]) <= overdue, "a request was planned before an overdue one"
            if len(planned) > n_first:
                assert overdue <= set(planned), "an overdue request was left out for another"
        for name in moment.admitted:
            since.pop(name, None)


# --- sjf


def sjf(predictor: KnownLengths, n_blocks: int = 64, max_num_seqs: int = 1, **knobs: Any) -> Rig:
    return rig(
        n_blocks, 512, max_num_seqs, policy="sjf", predictor=predictor,
        executor_args={"step_s": 0.01}, **knobs,
    )  # fmt: skip


def test_sjf_takes_the_shortest_answer_first():
    engine = sjf(KnownLengths(a=30, b=10, c=20))
    engine.admit(*(request(name, prompt(5), 40) for name in "abc"))
    assert admitted_order(engine) == ["b", "c", "a"]


@pytest.mark.parametrize(("kappa", "order"), [(0.0, ["wild", "tame"]), (1.0, ["tame", "wild"])])
def test_sjf_counts_an_uncertain_job_as_longer(kappa, order):
    class Unsure(KnownLengths):
        def predict(self, request):
            return LengthDist(20, 20, 60 if request.id == "wild" else 25)

    engine = sjf(Unsure(), kappa=kappa)
    engine.admit(request("wild", prompt(5), 20), request("tame", prompt(5), 20))
    assert admitted_order(engine) == order


def test_sjf_counts_prompt_tokens_as_work():
    engine = sjf(KnownLengths(long=10, short=20))
    engine.admit(request("long", prompt(400), 10), request("short", prompt(5), 20))
    assert admitted_order(engine) == ["short", "long"]  # 10 + 400 / 5 > 20 + 5 / 5
    engine = sjf(KnownLengths(long=10, short=20), prompt_weight=0)
    engine.admit(request("long", prompt(400), 10), request("short", prompt(5), 20))
    assert admitted_order(engine) == ["long", "short"]


def test_sjf_ages_by_tokens_per_second():
    """With 20 tokens a second, a second of waiting makes up for 20 tokens and no more."""
    for n_later, first in [(11, "later"), (13, "early")]:
        engine = sjf(KnownLengths(early=32, later=n_later), prompt_weight=0, starvation="1h")
        engine.clock.advance(1.0)
        engine.admit(
            request("early", prompt(5), 40, arrived_s=0.0),
            request("later", prompt(5), 40, arrived_s=1.0),
        )
        assert admitted_order(engine)[0] == first


@pytest.mark.parametrize(("n_written", "gives_way"), [(70, ["long"]), (81, [])])
def test_a_long_job_is_preempted_until_most_of_it_is_generated(n_written, gives_way):
    engine = sjf(KnownLengths(long=100, peer=99, short=2), max_num_seqs=2, starvation="1h")
    long = request("long", prompt(5), 100)
    engine.admit(long, request("peer", prompt(5), 99))
    while long.n_output < n_written:
        engine.step()
    engine.admit(request("short", prompt(5), 2))
    assert [entry.request_id for entry in engine.plan.preempt] == gives_way
    assert all(entry.by == "short" for entry in engine.plan.preempt)
    engine.drain()


def test_a_job_is_not_preempted_for_less_than_its_recomputation_costs():
    predictor = KnownLengths(long=30, peer=30, short=2)
    for n_prompt, gives_way in [(20, ["long"]), (200, [])]:
        engine = sjf(predictor, max_num_seqs=2, starvation="1h")
        engine.admit(request("long", prompt(n_prompt), 30), request("peer", prompt(300), 30))
        engine.step()
        engine.admit(request("short", prompt(5), 2))
        assert [entry.request_id for entry in engine.plan.preempt] == gives_way


def test_an_answer_longer_than_predicted_is_predicted_again():
    """`long` writes 60 tokens instead of the predicted 10: the prediction moves with its output."""

    class Learning(KnownLengths):
        def predict(self, request):
            left = 10.0 if request.n_output < 10 else 50.0
            return LengthDist(left, left, left)

    engine = sjf(Learning(), max_num_seqs=2, starvation="1h", preempt_until=1.0)
    engine.admit(request("long", prompt(5), 60), request("peer", prompt(5), 60))
    for _ in range(10):
        engine.step()
    engine.admit(request("new", prompt(5), 60))
    assert [entry.request_id for entry in engine.plan.preempt] == ["peer"]
    assert engine.policy.explain("long", engine.state.view())["predicted_output_left"] == 50


def with_slo(n_running: int = 3, **knobs: Any) -> Rig:
    """One slot, taken by `running` for another `n_running` steps of 10 ms or less. Reading 100
    tokens takes 1 s by the cost model, so 20 times the prefill is 0.2 s per token."""
    lengths = dict.fromkeys(("hopeless", "large", "no_slo", "small", "waiting", "shorter"), 1)
    predictor = KnownLengths(running=n_running, **lengths)
    engine = sjf(predictor, cost=StepCost(token_s=0.01), prompt_weight=1, aging=0, **knobs)
    engine.admit(request("running", prompt(1), n_running))
    engine.step()
    return engine


def test_sjf_puts_requests_that_can_no_longer_meet_their_slo_last():
    engine = with_slo(preempt="never")
    engine.admit(
        request("hopeless", prompt(50), 1, ttft_slo_s=0.3),  # 0.5 s to read
        request("large", prompt(100), 1, ttft_slo_s=5.0),
        request("no_slo", prompt(120), 1),
    )
    hopeless = engine.policy.explain("hopeless", engine.state.view())["hopeless"]
    assert not hopeless  # it has not been planned yet
    assert admitted_order(engine) == ["large", "no_slo", "hopeless"]


def test_a_hopeless_request_preempts_no_other():
    for slo_s, gives_way in [(3.0, ["running"]), (0.3, [])]:
        engine = with_slo(n_running=90)
        engine.admit(request("small", prompt(50), 1, ttft_slo_s=slo_s))
        assert [entry.request_id for entry in engine.plan.preempt] == gives_way
        hopeless = engine.policy.explain("small", engine.state.view())["hopeless"]
        assert hopeless is not gives_way


@pytest.mark.parametrize(("waited_s", "first"), [(29.9, "small"), (30.1, "large")])
def test_a_hopeless_request_is_overdue_after_ten_times_starvation(waited_s, first):
    engine = with_slo(preempt="never")
    engine.admit(request("large", prompt(100), 1, arrived_s=0.0, ttft_slo_s=0.1))
    assert engine.plan.items == ()
    engine.clock.advance(waited_s - engine.clock.now_s())
    engine.admit(request("small", prompt(5), 1, arrived_s=waited_s))
    assert admitted_order(engine)[0] == first


@pytest.mark.parametrize(
    ("tokens", "waited_s", "first"),
    [
        (10, 1.9, "shorter"),
        (10, 2.1, "waiting"),  # 20 times 0.1 s
        (100, 2.9, "shorter"),  # half of its SLO is no reason
        (100, 3.1, "waiting"),  # `starvation` is: 20 times 1 s would be later
    ],
)
def test_with_an_slo_a_request_is_overdue_by_its_own_prefill(tokens, waited_s, first):
    engine = with_slo(preempt="never")
    engine.admit(request("waiting", prompt(tokens), 1, arrived_s=0.0, ttft_slo_s=5.0))
    engine.clock.advance(waited_s - engine.clock.now_s())
    engine.admit(request("shorter", prompt(5), 1, arrived_s=waited_s))
    assert admitted_order(engine)[0] == first


# --- priority


def priority(**knobs: Any) -> Rig:
    return rig(64, 512, 2, policy="priority", executor_args={"step_s": 0.01}, **knobs)


def score(engine: Rig, name: str) -> float:
    value: float = engine.policy.explain(name, engine.state.view())["score"]
    return value


def test_the_score_is_the_sum_of_its_terms():
    engine = priority()
    engine.admit(request("first", prompt(5), 40, arrived_s=0.0, deadline_s=20.0))
    assert score(engine, "first") == pytest.approx(0 + 0.5 + 0.5 + 0)  # no history: the middle
    engine.clock.advance(2.0)
    assert score(engine, "first") == pytest.approx(2 + 0.5 + 0.5 + 0)
    engine.clock.advance(2.0)
    assert score(engine, "first") == pytest.approx(3 + 0.5 + 0.5 + 0)  # capped at three SLOs
    engine.clock.advance(11.0)
    assert score(engine, "first") == pytest.approx(3 + 0.5 + 0.5 + 0.5)  # 5 of 10 s to go
    engine.clock.advance(100.0)
    assert score(engine, "first") == pytest.approx(3 + 0.5 + 0.5 + 1)
    engine.admit(request("urgent", prompt(5), 20, arrived_s=115.0, priority=-1))
    assert score(engine, "urgent") == pytest.approx(0 + 1 + 2 / 3 + 0)  # shorter than all so far
    engine.admit(request("casual", prompt(5), 41, arrived_s=115.0, priority=1))
    assert score(engine, "casual") == pytest.approx(0 + 0 + 1 / 3 + 0)  # longer than all so far


def test_waiting_is_measured_in_the_slo_of_the_request():
    engine = priority(length_weight=0)
    engine.admit(
        request("patient", prompt(5), 4, arrived_s=0.0, ttft_slo_s=10.0),
        request("hasty", prompt(5), 4, arrived_s=0.0, ttft_slo_s=0.1),
    )
    engine.clock.advance(0.2)
    assert score(engine, "hasty") - score(engine, "patient") == pytest.approx(2.0 - 0.02)


@pytest.mark.parametrize(("step_s", "displaced"), [(1e-4, ["low"]), (5.0, [])])
def test_preemption_must_be_worth_the_recomputation(step_s, displaced):
    """Half a point of class is worth half a second of waiting at an SLO of 1 s."""
    engine = rig(
        64, 512, 2, policy="priority", preemptive=True, length_weight=0,
        executor_args={"step_s": 0.01}, cost=StepCost(step_s=step_s),
    )  # fmt: skip
    engine.admit(
        request("low", prompt(5), 40, priority=9), request("high", prompt(5), 40, priority=-9)
    )
    engine.step()
    engine.admit(request("mid", prompt(5), 4))
    plan = engine.plan
    assert [entry.request_id for entry in plan.preempt] == displaced
    engine.step()
    assert engine.policy.explain("mid", engine.state.view())["displaced"] == displaced * 2
    engine.drain()


def test_without_preemptive_no_request_is_preempted():
    engine = priority(length_weight=0)
    engine.admit(*(request(f"low{k}", prompt(5), 9, priority=9) for k in range(2)))
    engine.step()
    engine.admit(request("high", prompt(5), 9, priority=-9))
    engine.drain()
    assert engine.state.counters.preemptions == 0


# --- weighted_naive


def test_the_naive_sum_is_arrival_order_with_two_seconds_per_priority():
    engine = rig(policy="weighted_naive", max_num_seqs=1, executor_args={"step_s": 0.01})
    engine.clock.advance(5.0)
    engine.admit(
        request("early", prompt(5), 400, arrived_s=0.0),
        request("short", prompt(5), 1, arrived_s=0.6),  # 0.5 for its length is not 0.6
        request("vip", prompt(5), 400, arrived_s=1.9, priority=-1),
        request("late_vip", prompt(5), 400, arrived_s=2.7, priority=-1),
    )
    assert score(engine, "early") == pytest.approx(5 + 0.5 / 400)
    assert admitted_order(engine) == ["vip", "early", "short", "late_vip"]


# --- deadline


def deadline(cost: StepCost, max_num_seqs: int = 1, **knobs: Any) -> Rig:
    return rig(
        64, 512, max_num_seqs, policy="deadline", cost=cost, executor_args={"step_s": 0.1}, **knobs
    )


def test_the_earliest_deadline_goes_first():
    engine = deadline(StepCost(step_s=0.1), ttft_slo="3s")
    engine.admit(
        request("slo", prompt(5), 2, ttft_slo_s=2.0),
        request("none", prompt(5), 2),  # the mode's own 3 s
        request("last_token", prompt(5), 2, deadline_s=1.0),
    )
    assert admitted_order(engine) == ["last_token", "slo", "none"]


def test_requests_that_cannot_meet_their_deadline_go_behind_those_that_can():
    """A prefill takes 1 s per 100 tokens: `lost` can never meet its SLO, `hopeful` until 0.5 s."""
    engine = deadline(StepCost(token_s=0.01), max_num_seqs=1)
    engine.admit(
        request("lost", prompt(300), 1, ttft_slo_s=2.0),
        request("hopeful", prompt(50), 1, ttft_slo_s=1.0),
        request("calm", prompt(50), 1, ttft_slo_s=9.0),
    )
    explained = engine.policy.explain("lost", engine.state.view())
    assert explained == {"due_in_s": 2.0, "can_be_kept": True, "overdue_in_s": 30.0}
    assert engine.plan.items[0].request_id == "hopeful"
    assert not engine.policy.explain("lost", engine.state.view())["can_be_kept"]
    engine.clock.advance(0.6)
    assert engine.plan.items[0].request_id == "calm"
    assert admitted_order(engine) == ["calm", "lost", "hopeful"]  # then in order of arrival


def test_prompts_in_prefill_delay_the_start():
    """`big` takes another 2 s, so an SLO of 1.5 s behind it cannot be met."""
    engine = rig(
        64, 512, 4, policy="deadline", cost=StepCost(token_s=0.01), token_budget=100,
        executor_args={"step_s": 1.0},
    )  # fmt: skip
    engine.admit(request("big", prompt(300), 1, ttft_slo_s=10.0))
    engine.step()
    engine.admit(request("small", prompt(10), 1, arrived_s=1.0, ttft_slo_s=1.5))
    assert [item.request_id for item in engine.plan.items] == ["big"]
    assert not engine.policy.explain("small", engine.state.view())["can_be_kept"]


def test_a_deadline_for_the_last_token_includes_the_decodes():
    """9 tokens after the first at 0.1 s a step: a start after 1 s misses the 2 s deadline."""
    engine = deadline(StepCost(step_s=0.1))
    engine.admit(request("a", prompt(5), 9, deadline_s=2.05))
    engine.clock.advance(1.0)
    _ = engine.plan
    assert engine.policy.explain("a", engine.state.view())["can_be_kept"]
    engine.clock.advance(0.1)
    _ = engine.plan
    assert not engine.policy.explain("a", engine.state.view())["can_be_kept"]


# --- mlfq


def mlfq(max_num_seqs: int = 2, cost: StepCost | None = None, **knobs: Any) -> Rig:
    return rig(
        64, 512, max_num_seqs, policy="mlfq", cost=cost, executor_args={"step_s": 0.01}, **knobs
    )


def level(engine: Rig, name: str) -> int:
    value: int = engine.policy.explain(name, engine.state.view())["level"]
    return value


def test_a_long_prompt_skips_levels_with_too_short_a_quantum():
    engine = mlfq(cost=StepCost(token_s=1e-3))  # quanta 10, 20, 40, 80 ms
    engine.admit(*(request(f"p{n}", prompt(n), 1) for n in (5, 10, 11, 40, 41, 80)))
    assert [level(engine, f"p{n}") for n in (5, 10, 11, 40, 41, 80)] == [0, 0, 1, 2, 3, 3]


def test_a_request_goes_down_a_level_as_it_uses_up_its_quanta():
    """Steps of 10 ms: quanta 35, 70, 140 ms are up after 4, 11 and 25 steps; the last stays."""
    engine = mlfq(base_quantum="35ms", n_levels=4)
    engine.admit(request("a", prompt(5), 200))
    seen = []
    for _ in range(100):
        engine.step()
        seen.append(level(engine, "a"))
    assert [seen.index(lowest) + 1 for lowest in (1, 2, 3)] == [4, 11, 25]
    assert seen[-1] == 3


def test_new_requests_preempt_lower_levels_and_wait_for_equal_ones():
    engine = mlfq(base_quantum="30ms", starvation="1h")
    engine.admit(request("old", prompt(5), 90), request("older", prompt(5), 90))
    engine.step()
    engine.admit(request("equal", prompt(5), 3))
    assert not engine.plan.preempt
    for _ in range(2):
        engine.step()
    assert (level(engine, "old"), level(engine, "equal")) == (1, 0)
    assert [(entry.request_id, entry.by) for entry in engine.plan.preempt] == [("older", "equal")]


def test_without_preempt_levels_only_order_the_queue():
    engine = mlfq(base_quantum="10ms", preempt=False)
    engine.admit(*(request(f"r{k}", prompt(5), 20) for k in range(6)))
    engine.drain()
    assert engine.state.counters.preemptions == 0


def test_a_starved_request_starts_again_at_the_top():
    engine = mlfq(max_num_seqs=1, cost=StepCost(token_s=1e-3), starvation="500ms", preempt="never")
    engine.admit(request("runs", prompt(4), 60), request("big", prompt(100), 20))
    assert level(engine, "big") == 4
    for _ in range(61):
        engine.step()
    assert engine.state.view().is_running("big")
    assert level(engine, "big") == 0
    engine.drain()


def test_quanta_beyond_the_range_of_floats_are_rejected():
    with pytest.raises(ValidationError):
        Mlfq(ratio=1e308)
