"""Fair sharing among tenants: the bound of VTC, no credit for idle time, budgets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reference_engine.core import interventions
from reference_engine.policies.base import POLICIES
from reference_engine.policies.budgets import Budget, TokenBucket, WhenOver
from reference_engine.policies.token_fair import TokenFair
from reference_engine.state.plan import AdmissionError, Cause, Why
from reference_engine.state.predictor import LengthDist
from reference_engine.state.sequence import Request, State
from tests.reference_engine.engine_kit import Rig, request, rig
from tests.reference_engine.policy_kit import Arrival, Moment, play, traffic


def fair(n_blocks: int = 64, max_num_seqs: int = 1, **knobs: Any) -> Rig:
    return rig(
        n_blocks, 512, max_num_seqs, policy="token_fair", executor_args={"step_s": 0.01}, **knobs
    )


def of(tenant: str, k: int, n_prompt: int = 10, n_output: int = 10, **fields: Any) -> Request:
    """Request {tenant}{k}, whose prompt is like no other's."""
    start = ord(tenant) * 41 + k * 17
    prompt = [(start + i) % 256 for i in range(n_prompt)]
    return request(f"{tenant}{k}", prompt, n_output, tenant=tenant, **fields)


def served(engine: Rig, name: str) -> dict[str, Any]:
    return engine.policy.explain(name, engine.state.view())


def order(engine: Rig) -> list[str]:
    """The order in which the waiting requests are first scheduled."""
    waiting = list(engine.state.view().waiting)
    engine.drain()
    return [req.id for req in sorted(waiting, key=lambda req: req.scheduled_s or 0.0)]


# --- fairness


def widest_gap(moments: list[Moment], coming: list[Arrival]) -> int:
    """The largest change of the difference in service between tenants a and b while both have
    requests waiting: 1 per prompt token, at first admission, and 2 per token generated."""
    difference, differences, charged = 0, [0], set[str]()
    sign = {f"r{k}": 1 if arrival.tenant == "a" else -1 for k, arrival in enumerate(coming)}
    for moment in moments:
        if len({sign[req.id] for req in moment.waiting}) < 2:
            break
        for name in moment.admitted - charged:
            charged.add(name)
            difference += coming[int(name[1:])].n_prompt * sign[name]
        difference += 2 * sum(sign[name] for name in moment.wrote)
        differences.append(difference)
    return max(differences) - min(differences)


jobs = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=8, max_size=16)


@settings(max_examples=12)
@given(a=jobs, b=jobs, token_budget=st.integers(16, 200), max_num_seqs=st.integers(1, 8))
def test_two_tenants_with_work_are_served_alike(a, b, token_budget, max_num_seqs):
    """VTC's bound: 2 · max(w_p · longest prompt, w_q · tokens the KV memory holds). All requests of
    one tenant arrive before those of the other."""
    n_blocks = 10
    coming = [Arrival(0.0, n, m, "a") for n, m in a] + [Arrival(0.0, n, m, "b") for n, m in b]
    moments = play(
        "token_fair", coming, n_blocks=n_blocks, max_num_seqs=max_num_seqs,
        token_budget=token_budget,
    )  # fmt: skip
    assert widest_gap(moments, coming) <= 2 * max(100, 2 * n_blocks * 16)


def test_first_come_first_served_breaks_that_bound():
    coming = [Arrival(0.0, 50, 30, tenant) for tenant in "ab" for _ in range(25)]
    assert widest_gap(play("chunked", coming, n_blocks=10), coming) > 2 * 2 * 160
    assert widest_gap(play("token_fair", coming, n_blocks=10), coming) < 2 * 160


def test_the_least_served_tenant_goes_first():
    """a is served 10 + 2·10 a request, b 40 + 2·10: a gets two turns for each of b."""
    engine = fair()
    engine.admit(*(of("a", k) for k in range(4)), *(of("b", k, n_prompt=40) for k in range(2)))
    assert order(engine) == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_a_tenant_of_double_weight_is_served_double():
    engine = fair(weights={"b": 2.0})
    engine.admit(*(of(tenant, k) for tenant in "ab" for k in range(4)))
    assert order(engine) == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]


def test_time_without_work_earns_no_credit():
    engine = fair(max_num_seqs=2)
    engine.admit(*(of("a", k, n_output=40) for k in range(5)))
    for _ in range(60):
        engine.step()
    engine.admit(of("z", 0))
    assert served(engine, "z0")["ahead_of_least"] == 0.0
    assert served(engine, "z0")["served"] == served(engine, "a4")["served"] > 100


def test_a_tenant_in_an_empty_queue_starts_at_the_counter_of_the_last_tenant():
    engine = fair()
    engine.admit(of("a", 0))
    engine.drain()
    engine.admit(of("b", 0), of("a", 1))
    assert served(engine, "b0")["served"] == 10  # a's prompt, when it left the queue
    assert order(engine) == ["b0", "a1"]


@settings(max_examples=15)
@given(coming=traffic, token_budget=st.integers(4, 64), max_num_seqs=st.integers(1, 6))
def test_service_counts_tokens_once_whatever_was_preempted(coming, token_budget, max_num_seqs):
    """Recomputation after a preemption is charged to no tenant."""
    engine = rig(
        12, 160, max_num_seqs, policy="token_fair", token_budget=token_budget, watermark=0,
        prefix_cache=False,
    )  # fmt: skip
    reqs = [of("a", k, arrival.n_prompt, arrival.n_output) for k, arrival in enumerate(coming)]
    engine.admit(*reqs)
    for k in range(0, len(reqs), 5):  # some are cancelled half-way
        for _ in range(3):
            engine.step()
        engine.state.end(f"a{k}", State.finished_abort)
    engine.drain()
    engine.admit(of("a", 99))
    read = sum(req.n_prompt for req in reqs if req.scheduled_s is not None)
    assert served(engine, "a99")["served"] == read + 2 * sum(req.n_output for req in reqs)


def test_a_plan_that_is_not_carried_out_charges_no_tenant():
    engine = fair(max_num_seqs=8, budgets="b=10/s:90")
    engine.admit(*(of(tenant, k) for tenant in "ab" for k in range(3)))
    first = engine.plan
    assert (served(engine, "a0")["served"], served(engine, "b0")["budget_left"]) == (30, 0)
    assert engine.plan == first
    assert (served(engine, "a0")["served"], served(engine, "b0")["budget_left"]) == (30, 0)
    engine.drain()


@settings(max_examples=20)
@given(
    coming=traffic,
    token_budget=st.integers(4, 64),
    max_num_seqs=st.integers(1, 6),
    n_blocks=st.integers(10, 40),
)
def test_step_budgets_hold_and_nothing_idles(coming, token_budget, max_num_seqs, n_blocks):
    for moment in play(
        "token_fair", coming, n_blocks=n_blocks, max_num_seqs=max_num_seqs,
        token_budget=token_budget,
    ):  # fmt: skip
        assert 1 <= moment.n_tokens <= token_budget
        assert moment.n_running + len(moment.admitted) <= max_num_seqs
        assert moment.admitted or moment.n_running


# --- budgets


@given(
    rate=st.floats(0.1, 1000),
    burst=st.floats(1, 10_000),
    spending=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), max_size=20),
)
def test_a_bucket_pays_at_most_its_burst_its_rate_and_one_cost_more(rate, burst, spending):
    """A payer as early as possible gets at most burst + rate · time + its largest cost."""
    bucket, now_s, total = TokenBucket(rate, burst, 0.0), 0.0, 0.0
    for gap_s, cost in spending:
        now_s = bucket.due_s(cost, now_s + gap_s)
        assert bucket.due_s(cost, now_s) == now_s  # payable at the instant it named
        bucket.take(cost, now_s)
        total += cost
        largest = max(cost for _, cost in spending)
        assert total <= burst + rate * now_s + largest + 1e-6 * total


def test_a_bucket_in_literals():
    bucket = TokenBucket(rate=10, burst=100, now_s=0.0)
    assert bucket.due_s(100, 5.0) == 5.0
    bucket.take(100, 5.0)
    assert (bucket.level(5.0), bucket.due_s(30, 5.0)) == (0, 8.0)
    assert bucket.due_s(1000, 5.0) == 15.0  # more than it can hold: when it is full
    bucket.take(-500, 5.0)
    assert bucket.level(5.0) == 100


def test_budgets_read_as_text():
    policy = POLICIES.build(
        {"kind": "vtc", "weights": "a=2 b=1", "budgets": "a=500/s a/1=10/s:40:refuse *=60/min:9"}
    )
    assert policy.model_dump()["weights"] == {"a": 2.0, "b": 1.0}
    hard = Budget.model_validate("10/s:40:refuse")
    assert (hard.rate, hard.burst, hard.when_over) == (10.0, 40.0, WhenOver.refuse)
    assert policy.fresh().model_dump() == policy.model_dump()
    with pytest.raises(ValidationError, match="500"):
        POLICIES.build({"kind": "token_fair", "budgets": "a=500"})


def test_over_budget_a_tenant_waits_while_others_go_on():
    """10 + 2·10 a request; a may spend 30 at once and 10 a second."""
    engine = fair(max_num_seqs=8, budgets="a=10/s:30")
    engine.admit(of("a", 0), of("a", 1), of("b", 0), of("b", 1))
    engine.step()
    assert list(engine.state.queues.running) == ["a0", "b0", "b1"]
    ((flow, cause),) = engine.plan.segments
    assert (flow, cause.why) == ("a", Why.tenant_budget)
    while len(engine.state.view().running):
        engine.step()
    engine.step()
    assert engine.state.wait_until_s == pytest.approx(3.0)
    engine.clock.advance(3.0 - engine.clock.now_s())
    engine.drain()
    account = engine.state.accounting.accounts.get("a1")
    assert account is not None
    assert dict(account.waits)[Cause(Why.tenant_budget)] == pytest.approx(3.0)


def test_unused_reservations_are_paid_back():
    """a0 is predicted to write 10 tokens and stops after one: 18 of its 30 come back."""

    class Ten:
        def predict(self, request: Request) -> LengthDist:
            return LengthDist(10.0, 10.0, 10.0)

        def observe(self, request: Request) -> None:
            """Predictions do not depend on observations."""

    engine = fair(budgets="a=1/s:100", predictor=Ten())
    engine.admit(of("a", 0, n_output=1), of("a", 1, n_output=1))
    assert served(engine, "a0")["budget_left"] == 100
    engine.step()
    assert served(engine, "a1")["budget_left"] == pytest.approx(100 - 12, abs=0.1)
    engine.drain()


def test_a_refusing_budget_names_the_seconds_to_wait():
    engine = fair(budgets="a=10/s:45:refuse")
    engine.admit(of("a", 0))
    with pytest.raises(AdmissionError) as caught:
        engine.admit(refused := of("a", 1))
    assert (caught.value.code, caught.value.retry_after_s) == ("tenant_budget", 1.5)
    assert refused.state is State.rejected
    engine.admit(of("b", 0))  # others have no budget
    engine.clock.advance(1.5)
    engine.admit(of("a", 1))
    engine.drain()


def test_a_cancelled_request_gets_its_reservation_back():
    engine = fair(budgets="a=10/s:30:refuse")
    engine.admit(of("a", 0))
    engine.state.end("a0", State.finished_abort)
    engine.admit(again := of("a", 1))
    engine.drain()
    assert again.state is State.finished_length


def test_a_class_has_a_budget_of_its_own():
    engine = fair(max_num_seqs=8, budgets="a/1=10/s:30 *=1000/s")
    engine.admit(of("a", 0, priority=1), of("a", 1, priority=1), of("a", 2), of("c", 0))
    engine.step()
    assert list(engine.state.queues.running) == ["a0", "c0", "a2"]
    assert [name for name, _ in engine.plan.segments] == ["a/1"]
    engine.state.end("a1", State.finished_abort)
    engine.drain()


def test_token_fair_takes_over_running_and_waiting_requests():
    engine = rig(64, 512, 2, policy="chunked", executor_args={"step_s": 0.01})
    engine.admit(*(of(tenant, k) for tenant in "ab" for k in range(3)))
    engine.step()
    interventions.switch_policy(engine.state, POLICIES.build({"kind": "token_fair"}))
    engine.drain()
    assert engine.state.counters.finished == 6


@pytest.mark.parametrize(
    "knobs",
    [
        {"output_cost": float("inf")},
        {"weights": {"a": float("inf")}},
        {"input_cost": float("nan")},
        {"budgets": {"a": {"rate": "1/s", "burst": float("inf")}}},
    ],
)
def test_costs_that_cannot_be_compared_are_rejected(knobs):
    """A counter of NaN is never the least, so the search for the least would not end."""
    with pytest.raises(ValidationError):
        TokenFair(**knobs)
