"""A plan the engine cannot carry out is refused with the name and the numbers."""

from __future__ import annotations

import pytest

from reference_engine.kv import KvPool
from reference_engine.plan import (
    BadTokenCount,
    DuplicateItem,
    Item,
    Limits,
    NoProgress,
    OverLimit,
    Plan,
    UnknownRequest,
    View,
    check_plan,
)
from reference_engine.sequence import Request
from tests.reference_engine.engine_kit import request


def view(waiting: list[Request], running: list[Request], max_num_seqs: int = 4) -> View:
    kv = KvPool(64)
    for req in running:
        assert kv.admit(req, 1)
        req.n_computed = 1
    return View(0.0, waiting, running, kv, Limits(max_num_seqs, 32, 1024, 320))


@pytest.fixture
def two_and_one() -> View:
    """`a` (10 tokens left) and `b` (4) wait, `r` (5) runs."""
    waiting = [request("a", range(10), 3), request("b", range(4), 3)]
    return view(waiting, [request("r", range(6), 3)])


def test_a_sound_plan_is_returned_unchanged(two_and_one):
    plan = Plan((Item("r", 5), Item("a", 10), Item("b", 2)))
    assert check_plan(plan, two_and_one) is plan


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (Plan((Item("ghost", 1),)), UnknownRequest, "'ghost'"),
        (Plan((Item("r", 1),), preempt=("a",)), UnknownRequest, "'a', which is not running"),
        (Plan((Item("a", 1), Item("a", 1))), DuplicateItem, "'a' twice"),
        (Plan((Item("r", 1),), preempt=("r",)), DuplicateItem, "'r'"),
        (Plan((Item("a", 1),), preempt=("r", "r")), DuplicateItem, "twice: r, r"),
        (Plan((Item("a", 0),)), BadTokenCount, "'a' 0 tokens, it can use 1-10"),
        (Plan((Item("a", 11),)), BadTokenCount, "'a' 11 tokens, it can use 1-10"),
        (Plan((Item("r", 6),)), BadTokenCount, "'r' 6 tokens, it can use 1-5"),
        (Plan(), NoProgress, "2 wait, 1 run"),
    ],
)
def test_an_unsound_plan_names_what_is_wrong(two_and_one, plan, error, words):
    with pytest.raises(error, match=words):
        check_plan(plan, two_and_one)


def test_a_plan_over_the_token_limit_is_refused():
    waiting = [request("a", range(20), 3), request("b", range(20), 3)]
    with pytest.raises(OverLimit, match="40 tokens, limit 32"):
        check_plan(Plan((Item("a", 20), Item("b", 20))), view(waiting, []))


def test_a_plan_over_the_sequence_limit_is_refused():
    running = [request("r", range(6), 3)]
    waiting = [request("a", range(5), 3), request("b", range(5), 3)]
    with pytest.raises(OverLimit, match="3 sequences run, limit 2"):
        check_plan(Plan((Item("a", 5), Item("b", 5))), view(waiting, running, max_num_seqs=2))


def test_a_plan_may_be_empty_when_it_says_until_when(two_and_one):
    assert check_plan(Plan(wait_until_s=1.5), two_and_one).wait_until_s == 1.5
