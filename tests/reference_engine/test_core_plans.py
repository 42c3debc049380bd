"""What the core makes of each field of a plan, and what it writes down about it."""

from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import PrivateAttr

from reference_engine.policies.chunked import Chunked
from reference_engine.state.batch import Logprob, StepResult
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import AdmissionError, Cause, Item, Plan, Preemption, Why
from reference_engine.state.sequence import Sampling, State
from reference_engine.state.steps import StepLog
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output


class Scripted(Chunked):
    """Chunked, except for the steps a test has plans for."""

    script: ClassVar[list[Plan]]

    def plan(self, view):
        return self.script.pop(0) if self.script else super().plan(view)


def scripted(*plans: Plan, **options) -> Rig:
    policy = type("Scripted", (Scripted,), {"script": list(plans), "__module__": __name__})()
    return rig(policy=policy, **options)


def tokens_of(events) -> list[str]:
    return [event.request.id for event in events]


def test_decode_all_gives_one_token_to_each_decode_that_is_not_named():
    engine = scripted(
        Plan(tuple(Item(name, 3) for name in "abcd")),
        Plan((Item("b", 1),), hold=("c",), preempt=(Preemption("d"),), decode_all=True),
        Plan((Item("c", 1),)),
    )
    engine.admit(*(request(name, [1, 2, 3], 21) for name in "abcd"))
    engine.step()
    assert tokens_of(engine.step()) == ["b", "a"]
    assert engine.state.queues.waiting["d"].state is State.preempted
    assert tokens_of(engine.step()) == ["c"]
    outputs = {event.request.id: event.request.output for event in engine.drain()}
    assert outputs == dict.fromkeys("abcd", toy_output([1, 2, 3], 21))


def test_a_request_with_one_prompt_token_left_decodes_and_gets_its_first_token():
    engine = rig(token_budget=15, executor_args={"step_s": 1.0})
    engine.admit(req := request("a", range(16), 3))
    assert engine.step() == []
    assert engine.state.queues.decoding == {"a": req}
    engine.drain()
    assert (req.first_token_s, req.finished_s) == (2.0, 4.0)
    assert req.output == toy_output(range(16), 3)
    assert engine.state.counters.prompt_tokens == 16


def test_a_reservation_is_taken_at_once_and_never_grown():
    engine = scripted(Plan((Item("a", 3, reserve_tokens=100),)), n_blocks=8)
    engine.admit(req := request("a", [1, 2, 3], 50))
    engine.step()
    assert len(req.blocks) == 4  # 3 + 50 - 1 tokens can ever be in KV
    engine.drain()
    assert req.output == toy_output([1, 2, 3], 50)


def test_an_admission_whose_reservation_does_not_fit_waits_for_blocks():
    engine = scripted(Plan((Item("a", 3), Item("b", 3, reserve_tokens=64))), n_blocks=4)
    engine.admit(request("a", [1, 2, 3], 9), b := request("b", [1, 2, 3], 60))
    engine.step()
    assert list(engine.state.queues.waiting) == ["b"]
    assert engine.state.log.steps[-1].causes == (("no_kv_blocks", 1),)
    engine.drain()
    assert b.n_output == 60


class Eldest(Chunked):
    """Wants to preempt the first admitted, then those in the middle."""

    def victims(self, view, request, need_blocks):
        assert need_blocks >= 1
        return ["nobody", *(running.id for running in view.running)]


def test_the_policys_victims_go_first_but_never_the_first_admitted():
    engine = rig(n_blocks=8, max_model_len=128, policy=Eldest(watermark=0))
    engine.admit(*(request(name, [i] * 30, 60) for i, name in enumerate("abcd")))
    while not engine.state.counters.preemptions:
        engine.step()
    # b made room for a and c, then c for d; by default d would have gone first.
    assert list(engine.state.queues.running) == ["a", "d"]
    engine.drain()


def test_an_oracle_decides_when_an_answer_stops():
    engine = rig()
    short = request("a", [1], 9, oracle_output_tokens=4)
    long = request("b", [1], 9, oracle_output_tokens=40)
    engine.admit(short, long)
    engine.drain()
    assert (short.n_output, short.state) == (4, State.finished_stop)
    assert (long.n_output, long.state) == (9, State.finished_length)


def test_logprobs_reach_those_who_asked():
    engine = rig()

    class Certain:
        caps = engine.executor.caps

        def execute(self, batch):
            result = inner.execute(batch)
            return StepResult(result.tokens, [Logprob(-0.5)] * len(result.tokens))

    inner, engine.executor = engine.executor, Certain()
    engine.admit(
        request("a", [1], 2, sampling=Sampling(logprobs=True)),
        request("b", [1], 2),
    )
    events = engine.drain()
    assert [(e.request.id, e.logprob) for e in events] == [("a", Logprob(-0.5)), ("b", None)] * 2


class Bucketing(Chunked):
    """One request at a time; long ones wait in a segment of their own."""

    _seen: list[str] = PrivateAttr(default_factory=list)

    def on_arrival(self, request, view):
        self._seen.append(request.id)
        if request.n_prompt > 4:
            view.assign(request.id, "long")

    def plan(self, view):
        plan = super().plan(view)
        return plan._replace(segments=(("long", Cause(Why.bucket_not_ready, have=1, want=2)),))

    def explain(self, request_id, view):
        return {"seen": len(self._seen)}


def sentence(engine: Rig, name: str) -> str:
    entry = engine.state.explain(name)
    assert entry is not None
    return entry.sentence()


def test_a_policy_names_one_cause_per_queue_segment():
    policy = Bucketing(max_num_seqs=1)
    engine = rig(policy=policy, executor_args={"step_s": 1.0})
    engine.admit(request("run", [1], 3), request("short", [1], 1), request("long", range(9), 1))
    engine.step()
    assert engine.state.log.steps[-1].causes == (("no_seq_slot", 1), ("bucket_not_ready", 1))
    engine.drain()
    assert sentence(engine, "short") == "waited 3 s: 3 s for sequence slots"
    assert sentence(engine, "long") == "waited 4 s: 4 s bucket not full"
    assert engine.policy.explain("long", engine.state.view()) == {"seen": 3}
    assert policy._seen == []  # an engine works with a copy


def test_each_step_leaves_a_record():
    log = StepLog(level="full")
    engine = rig(log=log, token_budget=20, executor_args={"step_s": 0.5})
    engine.admit(request("a", range(40), 2), request("b", range(100, 110), 2))
    engine.drain()
    assert [(r.step, r.t_s, r.duration_s, r.plan_s) for r in log.steps] == [
        (i, 0.5 * i, 0.5, 0.0) for i in range(4)
    ]
    assert [r.items for r in log.steps] == [
        (("a", 20),),
        (("a", 20),),
        (("b", 10), ("a", 1)),
        (("b", 1),),
    ]
    sizes = [(r.n_prefill_tokens, r.n_decode, r.context_tokens) for r in log.steps]
    assert sizes == [(20, 0, 0), (20, 0, 0), (10, 1, 40), (0, 1, 10)]
    assert [(r.n_running, r.n_waiting, r.kv_used_blocks) for r in log.steps] == [
        (1, 1, 2),
        (1, 1, 3),
        (2, 0, 4),
        (1, 0, 1),
    ]
    assert {r.policy for r in log.steps} == {"chunked"}
    assert [r.step for r in log.last(2)] == [2, 3]


def test_padding_action_and_group_are_recorded():
    padding = Padding(prefill_tokens=7, decode_rows=2, decode_context_tokens=50)
    engine = scripted(Plan((Item("a", 3),), padding=padding, action="go", group=4))
    engine.admit(request("a", [1, 2, 3], 1))
    engine.step()
    record = engine.state.log.steps[-1]
    assert (record.padding_tokens, record.action, record.group) == (9, "go", 4)
    assert record.padding_context_tokens == 50
    assert engine.state.counters.padding_tokens == 9


def test_arrivals_ends_and_refusals_are_events_with_the_step_they_precede():
    engine = rig(n_blocks=4)
    engine.admit(request("a", [1], 2), request("b", [1], 9, tenant="blue"))
    with pytest.raises(AdmissionError):
        engine.admit(request("huge", range(900), 9))
    engine.step()
    engine.step()
    engine.state.end("b", State.finished_abort)
    events = [(e.step, e.kind, e.request_id, e.tenant) for e in engine.state.log.events]
    assert events == [
        (0, "arrival", "a", "default"),
        (0, "arrival", "b", "blue"),
        (0, "reject", "huge", "default"),
        (2, "finish", "a", "default"),
        (2, "cancel", "b", "blue"),
    ]
