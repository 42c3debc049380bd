"""What an operator does to a working engine, and what a policy's mistakes do to it."""

from __future__ import annotations

import pytest

from reference_engine.core import interventions
from reference_engine.policies.base import POLICIES
from reference_engine.policies.chunked import Chunked
from reference_engine.state.plan import AdmissionError, Item, NoProgress, Plan
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output


def sentence(engine: Rig, name: str) -> str:
    entry = engine.state.explain(name)
    assert entry is not None
    return entry.sentence()


class Watching(Chunked):
    """Writes down whom it is told of."""

    def on_arrival(self, request, view):
        SEEN.append(("arrival", request.id))

    def on_requeue(self, request, view):
        SEEN.append(("requeue", request.id))


SEEN: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def _nobody_seen():
    SEEN.clear()


def test_a_new_policy_takes_over_without_draining():
    engine = rig(policy=Chunked(max_num_seqs=2), executor_args={"step_s": 1.0})
    engine.admit(*(request(name, [1, 2], 6) for name in "abc"))
    engine.step()
    interventions.switch_policy(
        engine.state, Watching(max_num_seqs=3), actor="ann", reason="a test"
    )
    assert SEEN == [("arrival", "a"), ("arrival", "b"), ("arrival", "c")]
    engine.step()
    assert len(engine.state.queues.running) == 3
    engine.drain()
    assert sentence(engine, "c") == "waited 1 s: 1 s for sequence slots"
    event = next(e for e in engine.state.log.events if e.kind == "switch_policy")
    assert (event.actor, event.step, event.detail["reason"]) == ("ann", 1, "a test")
    before, after = Chunked(max_num_seqs=2), Watching(max_num_seqs=3)
    assert event.detail["before"] == {"kind": "chunked", **before.model_dump(mode="json")}
    assert event.detail["after"] == {"kind": "chunked", **after.model_dump(mode="json")}


@pytest.mark.parametrize("mode", sorted({POLICIES.get(name).kind for name in POLICIES.names()}))
def test_any_mode_can_take_over_from_any_other(mode):
    engine = rig(max_num_seqs=4, n_blocks=20, max_model_len=128)
    requests = [request(f"r{i}", [i] * (10 + 9 * i), 20) for i in range(8)]
    engine.admit(*requests)
    for _ in range(4):
        engine.step()
    interventions.switch_policy(engine.state, POLICIES.build({"kind": mode}))
    for _ in range(500):
        if engine.state.has_work:
            engine.step()
        engine.clock.advance(0.01)
    assert [req.output for req in requests] == [
        toy_output([i] * (10 + 9 * i), 20) for i in range(8)
    ]


def test_a_paused_tenants_requests_wait_for_the_operator():
    engine = rig(policy=Watching(max_num_seqs=1), executor_args={"step_s": 1.0})
    state = engine.state
    engine.admit(
        running := request("a", [1], 9, tenant="red"),
        request("b", [1], 1, tenant="red"),
        request("c", [1], 2, tenant="blue"),
    )
    engine.step()
    assert interventions.pause(state, "red", "ann", "too loud") == 1
    engine.admit(request("d", [1], 1, tenant="red", arrived_s=1.0))
    assert [req.id for req in state.view().waiting] == ["c"]
    for _ in range(10):
        engine.step()
    assert running.finished_s == 9.0  # what runs goes on
    assert not state.has_work
    assert state.log.steps[-1].causes == (("paused_by_operator", 2),)
    engine.clock.advance(5.0)
    SEEN.clear()
    assert interventions.resume(state, "red", "ann") == 2
    assert SEEN == [("requeue", "b"), ("arrival", "d")]
    engine.drain()
    assert sentence(engine, "b") == (
        "waited 16 s: 15 s paused by the operator, 1 s for sequence slots"
    )
    kinds = [(e.kind, e.tenant, e.actor) for e in state.log.events if e.actor]
    assert kinds == [("pause_tenant", "red", "ann"), ("resume_tenant", "red", "ann")]


def test_held_requests_can_be_cancelled_and_preempted_ones_are_held():
    engine = rig(n_blocks=6, max_model_len=96, watermark=0)
    engine.admit(request("a", [1] * 40, 50), request("b", [2] * 40, 50, tenant="red"))
    engine.step()
    interventions.pause(engine.state, "red")
    while not engine.state.counters.preemptions:
        engine.step()
    assert list(engine.state.queues.held) == ["b"]
    assert engine.state.end("b", State.finished_abort) is not None
    engine.state.check()
    engine.drain()


def test_resumed_requests_take_their_places_again():
    engine = rig(max_num_seqs=1)
    for i, tenant in enumerate(["red", "blue", "red", "blue"]):
        engine.clock.advance(1.0)
        engine.admit(request(f"r{i}", [1], 3, tenant=tenant, arrived_s=engine.clock.now_s()))
    interventions.pause(engine.state, "red")
    assert [req.id for req in engine.state.view().waiting] == ["r1", "r3"]
    interventions.resume(engine.state, "red")
    assert [req.id for req in engine.state.view().waiting] == ["r0", "r1", "r2", "r3"]


def test_a_new_priority_is_told_to_the_policy_and_logged():
    engine = rig(policy=Watching(max_num_seqs=1))
    engine.admit(request("a", [1], 3), b := request("b", [1], 3))
    engine.step()
    SEEN.clear()
    assert interventions.reprioritise(engine.state, "b", -5, "ann", "urgent")
    assert interventions.reprioritise(engine.state, "a", 3)
    assert not interventions.reprioritise(engine.state, "nobody", 1)
    assert (b.priority, SEEN) == (-5, [("requeue", "b")])
    event = next(e for e in engine.state.log.events if e.kind == "reprioritise")
    assert (event.request_id, dict(event.detail)) == (
        "b",
        {"reason": "urgent", "before": 0, "after": -5},
    )


class Broken(Chunked):
    def plan(self, view):
        return Plan((Item("ghost", 1),)) if view.decoding else Plan()


def test_a_bad_plan_is_an_error_where_that_is_wanted():
    engine = rig(policy=Broken())
    engine.admit(request("a", [1], 3))
    with pytest.raises(NoProgress, match="1 wait, 0 run"):
        engine.step()


def test_a_bad_plan_is_counted_and_replaced_where_service_must_go_on():
    engine = rig(policy=Broken(), is_strict=False, max_num_seqs=2, max_step_tokens=16)
    requests = [request(f"r{i}", [i] * 30, 10) for i in range(5)]
    engine.admit(*requests)
    engine.drain()
    assert [req.output for req in requests] == [toy_output([i] * 30, 10) for i in range(5)]
    assert engine.state.counters.rejected_plans == engine.state.counters.steps
    events = [e for e in engine.state.log.events if e.kind == "rejected_plan"]
    assert "1 wait" not in str(events[0].detail["error"])
    assert "'ghost'" in str(events[-1].detail["error"])
    assert {r.action for r in engine.state.log.steps} == {"fallback"}


class Choosy(Chunked):
    def check_arrival(self, request, view):
        if len(view.waiting) >= 2:
            raise AdmissionError("two wait already", "rate_limit_exceeded", retry_after_s=1.5)


def test_a_policy_may_refuse_for_now():
    engine = rig(policy=Choosy())
    engine.admit(request("a", [1], 1), request("b", [1], 1))
    with pytest.raises(AdmissionError, match="two wait") as caught:
        engine.admit(refused := request("c", [1], 1))
    assert (caught.value.retry_after_s, refused.state) == (1.5, State.rejected)
    assert engine.state.log.events[-1].detail["code"] == "rate_limit_exceeded"
    engine.drain()


def test_a_step_planned_ahead_is_that_of_the_mode_that_planned_it():
    engine = rig(policy="chunked", async_depth=1, executor_args={"step_s": 1.0})
    engine.admit(request("a", [1, 2], 6))
    engine.step()  # and the next one is planned
    interventions.switch_policy(engine.state, POLICIES.build({"kind": "sjf"}))
    engine.drain()
    assert [record.policy for record in engine.state.log.steps][:4] == [
        "chunked", "chunked", "sjf", "sjf",
    ]  # fmt: skip
