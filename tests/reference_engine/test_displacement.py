"""Who pushed whom back: against one loop over everybody per jump, and in the engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.accounting.displacement import Displacements
from reference_engine.policies.chunked import Chunked
from reference_engine.state.plan import Item, Plan
from tests.reference_engine.engine_kit import request, rig

moves = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "jump"]), st.integers(0, 12)), max_size=80
)


@settings(deadline=None)
@given(moves=moves)
def test_everybody_before_a_jump_is_pushed_back_and_nobody_else(moves):
    displacements = Displacements()
    pushed_back: dict[int, float] = {}
    for i, (what, arrival) in enumerate(moves):
        if what == "enter" and arrival not in pushed_back:
            displacements.enter(arrival)
            pushed_back[arrival] = 0.0
        elif what == "leave":
            assert displacements.leave(arrival) == pushed_back.pop(arrival, 0.0)
        elif what == "jump" and arrival not in pushed_back:
            seconds = float(1 << (i % 20))  # sums of these are exact, and tell which were added
            displacements.jump(arrival, seconds)
            before = [other for other in pushed_back if other < arrival]
            assert displacements.n_before(arrival) == len(before)
            for other in before:
                pushed_back[other] += seconds
        for other, seconds in pushed_back.items():
            assert displacements.so_far(other) == seconds


class LastFirst(Chunked):
    """One request at a time, the latest arrival first, its prompt in one step."""

    def plan(self, view):
        if view.running or not view.waiting:
            return Plan(decode_all=True)
        last = list(view.waiting)[-1]
        return Plan((Item(last.id, view.to_compute(last)),))


def test_a_jump_is_charged_to_its_tenant_and_told_to_those_it_pushed_back():
    engine = rig(policy=LastFirst(), executor_args={"step_s": 1.0})
    state = engine.state
    engine.admit(request("first", range(10), 1, tenant="red"))
    engine.admit(request("second", range(20, 40), 1, tenant="red"))
    engine.step()  # second's 20 tokens in 1 s, with first waiting: the rate from now on
    engine.admit(request("third", range(50, 60), 1, arrived_s=1.0, tenant="blue"))
    engine.drain()
    events = [e for e in state.log.events if e.kind == "jump"]
    # Nothing was known of the rate at the first jump, so it cost nothing that could be named.
    assert [(e.request_id, e.detail["n_displaced"], e.detail["seconds"]) for e in events] == [
        ("second", 1, 0.0),
        ("third", 1, 0.5),
    ]
    assert events[1].detail["displaced"] == ["first"]
    third, first = state.explain("third"), state.explain("first")
    assert third is not None
    assert first is not None
    assert (third.n_displaced, third.displaced_s, third.pushed_back_s) == (1, 0.5, 0.0)
    assert (first.n_displaced, first.pushed_back_s) == (0, 0.5)
    tenants = state.accounting.tenants
    assert tenants["blue"].displaced_s == 0.5
    assert (tenants["red"].displaced_s, tenants["red"].pushed_back_s) == (0.0, 0.5)
    assert tenants["red"].wait_s == {"no_token_budget": 2.0}
    assert (tenants["red"].n_finished, tenants["red"].input_tokens) == (2, 30)


def test_first_come_first_served_pushes_nobody_back():
    engine = rig(max_num_seqs=2, token_budget=16, executor_args={"step_s": 1.0})
    engine.admit(*(request(f"r{i}", range(i, i + 20), 4) for i in range(9)))
    engine.drain()
    assert not [e for e in engine.state.log.events if e.kind == "jump"]


def test_a_preempted_request_keeps_what_it_suffered():
    engine = rig(n_blocks=6, max_model_len=96, watermark=0)
    engine.admit(*(request(f"r{i}", [i] * 20, 60) for i in range(3)))
    engine.drain()
    for i in range(3):
        entry = engine.state.explain(f"r{i}")
        assert entry is not None
        assert entry.pushed_back_s == pytest.approx(0)
