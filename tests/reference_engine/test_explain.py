"""Waiting time is charged to causes, and the charges add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.accounting.explain import Account, Blocker
from reference_engine.state.batch import Row, StepBatch
from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import request, rig


def test_a_request_that_waits_for_a_slot_is_told_so():
    engine = rig(max_num_seqs=1, executor_args={"step_s": 0.5})
    engine.admit(request("first", [1], 4), request("second", [2], 1))
    engine.drain()
    entry = engine.state.explain("second")
    assert entry is not None
    assert entry.queue_s == 2.0
    assert entry.sentence() == "waited 2 s: 2 s for sequence slots"


def test_a_request_behind_one_that_needs_kv_blocks_names_it():
    engine = rig(n_blocks=6, max_model_len=96, watermark=0, executor_args={"step_s": 1.0})
    engine.admit(request("big", range(64), 5))
    engine.step()
    engine.admit(
        request("wide", range(100, 150), 1, arrived_s=1.0),
        request("small", [5], 1, arrived_s=1.0),
    )
    engine.drain()
    wide, small = engine.state.explain("wide"), engine.state.explain("small")
    assert wide is not None
    assert small is not None
    assert wide.sentence() == "waited 4 s: 4 s for KV blocks"
    assert small.sentence() == "waited 4 s: 4 s behind wide (50 prompt tokens)"


def test_who_comes_during_a_long_prefill_is_told_whose():
    engine = rig(executor_args={"step_s": 1.0})
    engine.admit(request("big", range(48), 3, tenant="B"), request("other", [1], 3))
    engine.step()  # both prompts, the clock stands at 1 s
    engine.admit(request("small", [5], 1, arrived_s=0.25))
    engine.step()
    engine.admit(request("later", [6], 1, arrived_s=1.5))  # while mostly tokens were decoded
    engine.drain()
    small, later = engine.state.explain("small"), engine.state.explain("later")
    assert small is not None
    assert later is not None
    assert small.sentence() == (
        "waited 0.75 s: 0.75 s for the step in flight, mostly the prompt of big "
        "(48 prompt tokens, tenant B)"
    )
    assert later.sentence() == "waited 0.5 s: 0.5 s for the step in flight"


def test_who_comes_to_an_idle_engine_waits_for_nobody():
    engine = rig(executor_args={"step_s": 1.0})
    engine.admit(request("big", range(48), 1))
    engine.drain()
    engine.clock.advance_to(9.0)
    engine.admit(request("late", [7], 1, arrived_s=8.75))  # a quarter of a second to be taken in
    engine.drain()
    late = engine.state.explain("late")
    assert late is not None
    assert late.sentence() == "waited 0.25 s: 0.25 s for the step in flight"
    assert not late.blockers


def test_who_comes_during_many_small_prompts_is_told_of_none():
    engine = rig(executor_args={"step_s": 1.0})
    engine.admit(*(request(f"r{i}", range(100 * i, 100 * i + 12), 1) for i in range(4)))
    engine.step()
    engine.admit(request("late", [7], 1, arrived_s=0.25))
    engine.drain()
    late = engine.state.explain("late")
    assert late is not None
    assert late.sentence() == "waited 0.75 s: 0.75 s for the step in flight"
    assert not late.blockers


def _row(name, start, n_tokens, n_prompt=8):
    return Row(request(name, range(n_prompt), 99), start, n_tokens, True)


DECODED = [request(f"d{i}", [1], 9) for i in range(3)]


@pytest.mark.parametrize(
    ("rows", "decodes", "name"),
    [
        ([], DECODED, None),
        ([_row("a", 0, 8)], [], "a"),
        ([_row("a", 0, 4)], DECODED, "a"),  # 4 of 7 tokens
        ([_row("a", 0, 3)], DECODED, None),  # 3 of 6
        ([_row("a", 0, 8), _row("b", 0, 7)], [], "a"),
        ([_row("a", 0, 8), _row("b", 0, 8)], [], None),
        ([_row("a", 0, 3), *(_row(f"d{i}", 8 + i, 1) for i in range(3))], [], None),
        ([_row("d", 8, 1)], [], None),  # a decode that the plan named
        ([_row("a", 7, 1)], [], "a"),  # the only token of its prompt that was not cached
        ([_row("a", 8, 6)], [], "a"),  # computed again after a preemption
    ],
)
def test_a_prompt_is_named_that_is_more_than_half_of_a_step(rows, decodes, name):
    found = StepBatch(tuple(rows), decodes).main_prompt
    assert (found and found.id) == name


def test_the_sentence_names_blockers_with_their_size_and_tenant():
    blockers = (Blocker("req-17", 16384, "B"), Blocker("req-18", 12, "default"))
    waits = (
        (Cause(Why.no_token_budget), 0.23),
        (Cause(Why.behind, "req-17"), 1.61),
        (Cause(Why.step_in_flight), 0.0),
    )
    entry = _account()._replace(waits=waits, blockers=blockers)
    assert entry.sentence() == (
        "waited 1.84 s: 1.61 s behind req-17 (16 384 prompt tokens, tenant B), "
        "0.23 s for token budget"
    )
    group = ((Cause(Why.static_group_running, "req-18"), 2.0),)
    assert entry._replace(waits=group).sentence() == (
        "waited 2 s: 2 s for the running batch, which waits for req-18 (12 prompt tokens)"
    )
    others = ((Cause(Why.preempted_by, "req-18"), 2.0), (Cause(Why.behind, "gone"), 1.0))
    entry = entry._replace(waits=others)
    assert entry.sentence() == (
        "waited 3 s: 2 s preempted by req-18 (12 prompt tokens), 1 s behind gone"
    )


def test_many_causes_are_told_in_short():
    waits = tuple((Cause(Why.behind, f"r{i}"), 1.0) for i in range(40))
    entry = _account()._replace(waits=waits)
    assert entry.sentence() == (
        "waited 40 s: 1 s behind r0, 1 s behind r1, 1 s behind r2, 1 s behind r3, "
        "36 s for 36 other causes"
    )


def _account() -> Account:
    engine = rig()
    engine.admit(request("a", [1], 1))
    engine.drain()
    entry = engine.state.explain("a")
    assert entry is not None
    return entry


def test_an_account_remembers_promises_and_times():
    engine = rig(executor_args={"step_s": 0.5})
    engine.admit(request("a", [1], 5, ttft_slo_s=0.2, tpot_slo_s=0.6, deadline_s=9.0, priority=2))
    engine.step()
    live = engine.state.explain("a")
    engine.drain()
    entry = engine.state.explain("a")
    assert live is not None
    assert entry is not None
    assert (live.state, live.ttft_s, live.tpot_s, live.e2e_s) == ("running", 0.5, None, None)
    assert (entry.ttft_s, entry.tpot_s, entry.e2e_s) == (0.5, 0.5, 2.5)
    assert (entry.ttft_slo_s, entry.tpot_slo_s, entry.deadline_s) == (0.2, 0.6, 9.0)
    assert (entry.priority, entry.max_tokens) == (2, 5)


def test_an_unknown_request_has_no_account():
    assert rig().state.explain("nobody") is None


@settings(max_examples=50, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 30), st.floats(0, 20)),
        min_size=1,
        max_size=10,
    ),
    n_blocks=st.integers(6, 20),
    token_budget=st.integers(1, 40),
    cancel=st.integers(0, 20),
)
def test_the_charges_add_up_to_the_time_in_the_queue(jobs, n_blocks, token_budget, cancel):
    engine = rig(n_blocks, token_budget=token_budget, executor_args={"step_s": 0.37})
    arrivals = sorted((at, i) for i, (_, _, at) in enumerate(jobs))
    requests = {
        i: request(f"r{i}", [i * 40 + k for k in range(jobs[i][0])], jobs[i][1], arrived_s=at)
        for at, i in arrivals
    }
    n_steps = 0
    while arrivals or engine.state.has_work:
        while arrivals and arrivals[0][0] <= engine.clock.now_s():
            engine.admit(requests[arrivals.pop(0)[1]])
        if n_steps == cancel:
            engine.state.end("r0", State.finished_abort)
        if engine.state.has_work:
            engine.step()
        elif arrivals:
            engine.clock.advance_to(arrivals[0][0])
        n_steps += 1
    for req in requests.values():
        entry = engine.state.explain(req.id)
        assert entry is not None
        total_s = sum(seconds for _, seconds in entry.waits)
        assert all(seconds >= -1e-9 for _, seconds in entry.waits)
        if req.n_preemptions == 0:
            assert total_s == pytest.approx(entry.queue_s, abs=1e-9)
        else:
            assert total_s >= entry.queue_s - 1e-9
