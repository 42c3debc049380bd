"""A plan the engine cannot carry out is refused with the name and the numbers."""

from __future__ import annotations

import pytest

from reference_engine.state.kv import KvPool
from reference_engine.state.plan import (
    BadTokenCount,
    DuplicateItem,
    Item,
    Limits,
    NoProgress,
    OverLimit,
    Plan,
    Preemption,
    UnknownRequest,
    View,
    check_plan,
)
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_kit import request


def view(
    waiting: list[Request],
    running: list[Request],
    max_num_seqs: int = 4,
    max_step_tokens: int = 32,
) -> View:
    """The running ones have computed all but 1 token if their prompt has 3, else 1 token."""
    kv, queues = KvPool(64), Queues()
    for req in [*running, *waiting]:
        queues.enter(req)
    for req in running:
        assert kv.admit(req, req.n_prompt)
        queues.start(req)
        req.n_computed = 2 if req.n_prompt == 3 else 1
        if req.n_remaining == 1:
            queues.decode(req)
    return View(0.5, queues, kv, Limits(max_num_seqs, max_step_tokens, 1024, 320))


@pytest.fixture
def busy() -> View:
    """`a` (10 tokens left) and `b` (4) wait, `r` (5) reads its prompt, `d` and `e` decode."""
    waiting = [request("a", range(10), 3), request("b", range(4), 3)]
    running = [request("r", range(6), 3), request("d", range(3), 3), request("e", range(3), 3)]
    return view(waiting, running, max_num_seqs=8)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((Item("r", 5), Item("a", 10), Item("b", 2, reserve_tokens=6))),
        Plan((Item("r", 5), Item("a", 10)), decode_all=True),
        Plan((Item("d", 1),), decode_all=True),
        Plan((Item("a", 4),), hold=("d", "r"), preempt=(Preemption("e"),), decode_all=True),
        Plan(decode_all=True),
        Plan(wait_until_s=1.5),
    ],
)
def test_a_sound_plan_is_returned_unchanged(busy, plan):
    assert check_plan(plan, busy) is plan


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (Plan((Item("ghost", 1),)), UnknownRequest, "'ghost'"),
        (Plan((Item("r", 1),), preempt=(Preemption("a"),)), UnknownRequest, "preempts 'a', which"),
        (Plan((Item("r", 1),), hold=("b",)), UnknownRequest, "holds 'b', which is not running"),
        (Plan((Item("a", 1), Item("a", 1))), DuplicateItem, "'a' twice"),
        (Plan((Item("r", 1),), preempt=(Preemption("r"),)), DuplicateItem, "'r'"),
        (Plan((Item("d", 1),), hold=("d",)), DuplicateItem, "'d'"),
        (Plan(preempt=(Preemption("d"),), hold=("d",)), DuplicateItem, "holds 'd'"),
        (Plan((Item("a", 1),), preempt=(Preemption("r"),) * 2), DuplicateItem, "twice: r, r"),
        (Plan((Item("a", 0),)), BadTokenCount, "'a' 0 tokens, it can use 1-10"),
        (Plan((Item("a", 11),)), BadTokenCount, "'a' 11 tokens, it can use 1-10"),
        (Plan((Item("r", 6),)), BadTokenCount, "'r' 6 tokens, it can use 1-5"),
        (Plan((Item("d", 2),), decode_all=True), BadTokenCount, "'d' 2 tokens, it can use 1-1"),
        (Plan((Item("a", 1, -1),)), BadTokenCount, "reserves -1 tokens for 'a'"),
        (Plan(), NoProgress, "2 wait, 3 run"),
        (Plan(hold=("d", "e"), decode_all=True), NoProgress, "2 wait, 3 run"),
        (Plan(wait_until_s=0.5), NoProgress, r"until 0.5 s, which is not after now \(0.5 s\)"),
    ],
)
def test_an_unsound_plan_names_what_is_wrong(busy, plan, error, words):
    with pytest.raises(error, match=words):
        check_plan(plan, busy)


def test_a_plan_over_the_token_limit_is_refused():
    waiting = [request("a", range(20), 3), request("b", range(20), 3)]
    with pytest.raises(OverLimit, match="40 tokens, limit 32"):
        check_plan(Plan((Item("a", 20), Item("b", 20))), view(waiting, []))


@pytest.mark.parametrize(("hold", "n_tokens"), [((), 22), (("d",), 21), (("d", "e"), 20)])
def test_decodes_count_towards_the_token_limit_unless_held(hold, n_tokens):
    running = [request("d", range(3), 3), request("e", range(3), 3)]
    plan = Plan((Item("a", 20),), decode_all=True, hold=hold)
    waiting = [request("a", range(20), 3)]
    check_plan(plan, view(waiting, running, max_step_tokens=n_tokens))
    waiting, running = [request("a", range(20), 3)], [request(r.id, range(3), 3) for r in running]
    with pytest.raises(OverLimit, match=f"{n_tokens} tokens, limit {n_tokens - 1}"):
        check_plan(plan, view(waiting, running, max_step_tokens=n_tokens - 1))


def test_a_plan_over_the_sequence_limit_is_refused():
    running = [request("r", range(6), 3)]
    waiting = [request("a", range(5), 3), request("b", range(5), 3)]
    with pytest.raises(OverLimit, match="3 sequences run, limit 2"):
        check_plan(Plan((Item("a", 5), Item("b", 5))), view(waiting, running, max_num_seqs=2))
