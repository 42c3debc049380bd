"""The engine under random work: every token once and in order, nothing lost, nothing stuck."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.policies.chunked import Chunked
from reference_engine.state.plan import Item, Plan
from reference_engine.state.sequence import Sampling, State
from tests.reference_engine.engine_kit import request, rig, toy_output

jobs = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 30), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


def prompt_of(family: int, n: int) -> list[int]:
    """Prompts of one family are prefixes of each other."""
    return [(family * 31 + 7 * i) % 256 for i in range(n)]


@settings(max_examples=25, deadline=None)
@given(jobs=jobs, token_budget=st.integers(1, 64))
def test_a_step_never_computes_more_than_its_budget(jobs, token_budget):
    engine = rig(24, token_budget=token_budget)
    engine.admit(*(request(f"r{i}", prompt_of(f, n), m) for i, (n, m, _, f) in enumerate(jobs)))
    while engine.state.has_work:
        assert 1 <= sum(engine.shares.values()) <= token_budget
        engine.step()


def test_a_small_pool_preempts_the_latest_and_still_answers_all():
    engine = rig(n_blocks=6, max_model_len=96)
    requests = [request(f"r{i}", prompt_of(i, 20), 60) for i in range(3)]
    engine.admit(*requests)
    engine.drain()
    assert engine.state.counters.preemptions > 0
    assert requests[0].n_preemptions == 0
    for i, req in enumerate(requests):
        assert req.output == toy_output(prompt_of(i, 20), 60)


def test_preempted_requests_return_to_the_head_of_the_queue_in_their_order():
    engine = rig(n_blocks=8, max_model_len=128, watermark=0)
    engine.admit(
        request("a", prompt_of(0, 30), 90),
        request("b", prompt_of(1, 30), 60),
        request("c", prompt_of(2, 30), 60),
        request("d", prompt_of(3, 30), 60),
    )
    engine.step()
    engine.admit(request("late", prompt_of(4, 5), 2))
    while engine.state.counters.preemptions < 2:
        engine.step()
    assert list(engine.state.queues.waiting) == ["c", "d", "late"]


def test_what_just_fits_an_empty_engine_is_served():
    engine = rig(n_blocks=5, max_model_len=100)
    engine.admit(req := request("big", range(64), 17))
    engine.drain()
    assert req.n_output == 17


@pytest.mark.parametrize("state", [State.waiting, State.running, State.preempted])
def test_a_cancel_frees_everything_in_every_state(state):
    engine = rig(n_blocks=6, max_model_len=96, token_budget=16)
    requests = [request(f"r{i}", prompt_of(i, 40), 50) for i in range(3)]
    engine.admit(*requests)
    while not any(req.state is state for req in requests):
        engine.step()
    victim = next(req for req in requests if req.state is state)
    assert engine.state.end(victim.id, State.finished_abort) is victim
    engine.state.check()
    assert (victim.state, victim.blocks) == (State.finished_abort, [])
    engine.drain()
    assert [req.state is State.finished_length for req in requests].count(True) == 2


def test_a_cancel_after_the_end_is_ignored():
    engine = rig()
    engine.admit(req := request("a", [1], 1))
    engine.drain()
    assert engine.state.end("a", State.finished_abort) is None
    assert req.state is State.finished_length


def test_a_stop_token_ends_a_request_but_not_before_its_minimum():
    eager = rig(executor_args={"eos_every": 1})
    eager.admit(
        a := request("a", [1, 2], 9, stop_ids=[257]),
        b := request("b", [1, 2], 9, stop_ids=[257], min_tokens=4),
        c := request("c", [1, 2], 9),
    )
    eager.drain()
    assert (a.n_output, a.state) == (1, State.finished_stop)
    assert (b.n_output, b.state) == (5, State.finished_stop)
    assert (c.n_output, c.state) == (9, State.finished_length)


def test_a_seed_decides_sampled_tokens():
    engine = rig()
    engine.admit(
        a := request("a", [1, 2], 9, sampling=Sampling(1.0, seed=5)),
        b := request("b", [1, 2], 9, sampling=Sampling(1.0, seed=5)),
        c := request("c", [1, 2], 9, sampling=Sampling(1.0, seed=6)),
    )
    engine.drain()
    assert a.output == b.output != c.output


def test_times_are_stamped_on_the_engines_clock():
    engine = rig(executor_args={"step_s": 0.25}, token_budget=10)
    engine.admit(req := request("a", range(15), 3))
    engine.clock.advance(1.0)
    engine.drain()
    assert (req.scheduled_s, req.first_token_s, req.finished_s) == (1.0, 1.5, 2.0)


def test_cached_prompt_tokens_are_counted_once():
    engine = rig()
    engine.admit(request("a", range(40), 1))
    engine.drain()
    engine.admit(req := request("b", range(40), 3))
    engine.drain()
    assert req.n_cached == 32
    assert engine.state.counters.cached_tokens == 32
    assert engine.state.counters.prompt_tokens == 40 + 8


def test_policy_hooks_are_called_for_each_arrival_step_and_end():
    calls = []

    class Watching(Chunked):
        def on_arrival(self, request, view):
            calls.append(("arrival", request.id))

        def on_step_end(self, record, view):
            calls.append(("step", record.step))

        def on_finish(self, request, view):
            calls.append(("finish", request.state))

    engine = rig(policy=Watching())
    engine.admit(request("a", [1], 2))
    engine.drain()
    assert calls == [
        ("arrival", "a"),
        ("step", 0),
        ("step", 1),
        ("finish", State.finished_length),
    ]


class Greedy(Chunked):
    """Plans everybody in every step, whatever the KV can hold."""

    def plan(self, view):
        everybody = [*view.running, *view.waiting]
        return Plan(tuple(Item(req.id, view.to_compute(req)) for req in everybody))


def test_a_step_that_preempts_for_a_running_requests_memory_admits_none():
    engine = rig(n_blocks=4, max_model_len=64, policy=Greedy())
    engine.admit(request("a", prompt_of(0, 31), 30), request("b", prompt_of(1, 31), 30))
    engine.step()
    engine.step()
    engine.admit(request("late", prompt_of(2, 5), 2))
    engine.step()  # both need a third block: b makes room, and a takes one of its two
    assert list(engine.state.queues.running) == ["a"]
    assert list(engine.state.queues.waiting) == ["b", "late"]
    engine.step()
    assert "late" in engine.state.queues.running
    engine.drain()


class Backwards(Chunked):
    """Serves the running requests in the reverse of their order of admission."""

    def plan(self, view):
        plan = super().plan(view)
        return plan._replace(items=plan.items[::-1])


@pytest.mark.parametrize("policy", [Greedy(), Backwards()])
def test_a_policy_that_ignores_memory_cannot_harm_anyone(policy):
    engine = rig(n_blocks=6, max_model_len=96, policy=policy)
    # The longest comes first, so that it needs room when the others are served already.
    lengths = [28, 22, 20, 25]
    requests = [request(f"r{i}", prompt_of(i, n), 50) for i, n in enumerate(lengths)]
    engine.admit(*requests)
    engine.drain()
    assert engine.state.counters.preemptions > 0
    for i, n in enumerate(lengths):
        assert requests[i].output == toy_output(prompt_of(i, n), 50)


class Stubborn(Chunked):
    """Plans nothing but the last request, whatever becomes of it."""

    def plan(self, view):
        last = [*view.running, *view.waiting][-1]
        return Plan((Item(last.id, min(view.to_compute(last), 9)),))


def test_a_policy_that_insists_on_what_has_no_room_does_not_stop_the_others():
    engine = rig(n_blocks=5, max_model_len=80, policy=Stubborn())
    first, last = request("a", prompt_of(0, 40), 40), request("b", prompt_of(1, 40), 9)
    engine.admit(first)
    while first.n_output < 9:
        engine.step()
    engine.admit(last)
    engine.drain()
    assert first.output == toy_output(prompt_of(0, 40), 40)
    assert last.output == toy_output(prompt_of(1, 40), 9)
    assert (first.n_preemptions, last.n_preemptions) == (0, 1)
    assert "fallback" in {record.action for record in engine.state.log.steps}
