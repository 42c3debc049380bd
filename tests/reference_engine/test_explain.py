"""Waiting time is charged to causes, and the charges add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.sequence import State
from tests.reference_engine.engine_kit import request, rig


def test_a_request_that_waits_for_a_slot_is_told_so():
    engine = rig(max_num_seqs=1, executor_args={"step_s": 0.5})
    engine.admit(request("first", [1], 4), request("second", [2], 1))
    engine.drain()
    entry = engine.state.explain("second")
    assert entry is not None
    assert entry.queue_s == 2.0
    assert entry.sentence() == "waited 2 s: 2 s for a sequence slot"


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
    assert small.sentence() == "waited 4 s: 4 s behind wide"


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
