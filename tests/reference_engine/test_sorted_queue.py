"""Sorted queues of policies, compared with sorting all requests at each step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reference_engine.policies.ranked import Ranking
from reference_engine.policies.sorted_queue import ScoredQueue, ScoreSegment, SortedQueue
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits, View
from reference_engine.state.queues import Queues
from tests.reference_engine.engine_kit import request


def queue(n: int) -> tuple[View, Queues]:
    """A view in which r0 … r{n-1} wait."""
    queues = Queues()
    for k in range(n):
        queues.waiting[f"r{k}"] = request(f"r{k}", [1], 1)
    return View(0.0, queues, KvPool(4), Limits(8, 64, 64, 320)), queues


moves = st.lists(
    st.tuples(st.sampled_from(["put", "drop", "leave"]), st.integers(0, 7), st.integers(0, 3))
)


@given(moves)
def test_a_sorted_queue_walks_like_sorting_all_waiting_requests(moves):
    view, queues = queue(8)
    filed, keys = SortedQueue(), {}
    for n_put, (verb, k, key) in enumerate(moves):
        name = f"r{k}"
        if verb == "put" and name in queues.waiting:
            filed.put(queues.waiting[name], (float(key),))
            keys[name] = (float(key), n_put)
        elif verb == "drop":
            assert filed.drop(name) == (keys.pop(name, None) is not None)
        elif verb == "leave" and name in keys:
            del queues.waiting[name]  # admitted, without a call of the queue
            del keys[name]
            assert name not in [req.id for _, req in filed.walk(view)]
        assert [req.id for _, req in filed.walk(view)] == sorted(keys, key=keys.__getitem__)
    assert len(filed) == len(keys)


def test_of_equal_keys_the_first_filed_comes_first():
    view, queues = queue(3)
    filed = SortedQueue()
    for name in ("r2", "r0", "r1"):
        filed.put(queues.waiting[name], (7.0,))
    assert [req.id for _, req in filed.walk(view)] == ["r2", "r0", "r1"]


def test_overdue_requests_come_first_in_the_order_of_their_overdue_instants():
    view, queues = queue(4)
    ranking = Ranking()
    for name, key, overdue_s in [("r0", 3, 9), ("r1", 2, 5), ("r2", 1, 4), ("r3", 0, 99)]:
        ranking.put(queues.waiting[name], (float(key),), float(overdue_s))
    order = lambda: [req.id for _, req in ranking.waiting(view)]  # noqa: E731  # asked thrice
    assert order() == ["r3", "r2", "r1", "r0"]
    view.now_s = 5.0
    assert order() == ["r2", "r1", "r3", "r0"]
    view.now_s = 9.0
    assert order() == ["r2", "r1", "r0", "r3"]


bends = st.lists(st.integers(1, 40), max_size=3, unique=True).map(sorted)
curves = st.lists(
    st.tuples(st.integers(-20, 20), bends, st.lists(st.integers(0, 3), min_size=4, max_size=4)),
    min_size=1,
    max_size=8,
)


@given(curves=curves, instants=st.lists(st.integers(0, 50), min_size=1, max_size=6).map(sorted))
def test_lanes_keep_the_order_of_scores_that_change_slope(curves, instants):
    """Scores are continuous and piecewise linear; at each instant the walk must be by score."""

    def score(k: int, t: float) -> float:
        start, bends, slopes = curves[k]
        total, before = float(start), 0.0
        for bend, slope in zip([*bends, 1e9], slopes, strict=False):
            total += slope * (min(t, bend) - before)
            before = min(t, bend)
        return total

    def segment(req, now_s: float) -> ScoreSegment:
        k = int(req.id[1:])
        _, bends, slopes = curves[k]
        i = sum(bend <= now_s for bend in bends)
        until_s = float(bends[i]) if i < len(bends) else float("inf")
        return ScoreSegment(score(k, now_s) - slopes[i] * now_s, float(slopes[i]), until_s)

    view, queues = queue(len(curves))
    lanes = ScoredQueue(segment)
    for req in queues.waiting.values():
        lanes.put(req, 0.0)
    for t in instants:
        view.now_s = float(t)
        lanes.refile(view)
        walked = [(-rank[0], req.id) for rank, req in lanes.walk(view)]
        assert len(walked) == len(curves)
        assert [s for s, _ in walked] == sorted((s for s, _ in walked), reverse=True)
        for s, name in walked:
            assert s == score(int(name[1:]), t)
