"""The numbers of agents: rates, shares of cached tokens and turns, for trees made by hand."""

import math

import numpy as np
import pytest

from loadgen.measure.agents import agent_numbers
from loadgen.measure.attainment import due_rows, measured_window, meets
from loadgen.measure.per_request import per_request
from loadgen.measure.trees import tree_outcomes, trees_of
from loadgen.records import FIRST_PIECE, PIECES
from tests.measure.agent_runs import BROKEN, FANNED_OUT, LINEAR, UNFINISHED, Asked, agent_run

CHAIN = np.array([(0, 64), (FIRST_PIECE, 128)], PIECES)
"""A piece of 64 tokens, and one of 128 behind it."""


def numbers(run):
    trees, columns, due, window = trees_of(run), per_request(run), due_rows(run), None
    assert trees is not None
    window = measured_window(run)
    outcomes = tree_outcomes(trees, run, due, due & meets(columns, []), window)
    return agent_numbers(run, columns, due, trees, outcomes, window, 0.95)


def test_every_tree_is_counted_once():
    found = numbers(agent_run(FANNED_OUT, LINEAR, UNFINISHED, BROKEN, window=(1.0, 30.0)))
    assert (found.planned, found.due, found.begun_before, found.not_begun) == (4, 3, 1, 0)
    assert (found.met, found.missed, found.open) == (1, 1, 1)
    assert found.attainment.value == 0.5
    assert (found.attainment_least, found.attainment_most) == pytest.approx((1 / 3, 2 / 3))


def test_tasks_per_hour_count_ends_in_the_window():
    found = numbers(agent_run(FANNED_OUT, LINEAR, UNFINISHED, BROKEN, window=(0.0, 20.0)))
    assert found.tasks_per_hour.value == found.goodput_tasks_per_hour.value == 2 / 20 * 3600
    late = numbers(agent_run(FANNED_OUT, LINEAR, window=(0.0, 14.0)))
    assert late.tasks_per_hour.value == pytest.approx(1 / 14 * 3600)
    assert late.tasks_per_hour.low is None


def test_tasks_per_hour_have_the_interval_of_equal_parts():
    """Sixty tasks of 1 s, one each second: 20 parts of 3 s with 3 ends each, so no spread."""
    run = agent_run(*([Asked(1, k + 0.25, k + 0.75)] for k in range(60)), window=(0.0, 60.0))
    rate = numbers(run).tasks_per_hour
    assert (rate.value, rate.low, rate.high) == pytest.approx((3600, 3600, 3600))


def test_the_parts_of_the_task_time_add_up():
    found = numbers(agent_run(FANNED_OUT, LINEAR, UNFINISHED))
    assert (found.task_time_s.n, found.task_time_s.mean.value) == (2, 9.0)
    parts = found.model_s, found.tools_s, found.subagents_s
    assert [part.mean.value for part in parts] == pytest.approx([4.5, 1.0, 3.5])
    assert found.task_time_s.percentiles["p50"].value == 6.0
    assert found.task_time_s.max == 12.0
    assert found.wait_share.mean.value == pytest.approx((10 / 12 + 0.75) / 2)
    assert (found.tools_s.mean.low, found.wait_share.mean.high) == (0.0, 1.0)


def cached(*reported):
    """Two turns that extend each other, and a third that was compacted to the first 64 tokens."""
    prompts = [(100, (FIRST_PIECE, 64)), (220, (FIRST_PIECE + 1, 192)), (90, (FIRST_PIECE, 64))]
    return [
        Asked(1, 2.0 * k, 2.0 * k + 1, {k - 1: 1.0} if k else {}, tokens, reported[k], prefix)
        for k, (tokens, prefix) in enumerate(prompts)
    ]


def test_ideal_hits_are_those_of_an_unlimited_cache_and_misses_have_a_reason():
    found = numbers(agent_run(cached(0, 48, 64), pieces=CHAIN)).cache
    assert (found.requests, found.prompt_tokens) == (3, 410)
    assert found.ideal.value == pytest.approx((0 + 64 + 64) / 410)
    assert found.reported is not None
    assert found.reported.value == pytest.approx((48 + 64) / 410)
    assert found.first_sight == pytest.approx((100 + 156) / 410)
    assert found.compaction == pytest.approx(26 / 410)
    assert found.lost == pytest.approx(16 / 410)
    total = found.reported.value + found.first_sight + found.compaction + found.lost
    assert total == pytest.approx(1.0)


def test_hits_count_in_order_of_release():
    """Of two prompts that share a piece, the later has the hit, although it stands first."""
    late = [Asked(1, 0.0, 1.0), Asked(1, 5.0, 6.0, {0: 4.0}, prefix=(FIRST_PIECE, 64))]
    early = [Asked(1, 1.0, 2.0, prefix=(FIRST_PIECE, 64))]
    found = numbers(agent_run(late, early, pieces=CHAIN))
    assert found.cache.ideal.value == pytest.approx(64 / 300)
    assert [turn.ideal.value for turn in found.turns] == pytest.approx([0.0, 0.64])


def test_a_short_prompt_that_begins_a_chain_is_no_compaction():
    run = agent_run([Asked(1, 0.0, 1.0), Asked(2, 2.0, 3.0, {0: 1.0}, tokens=50)])
    found = numbers(run).cache
    assert (found.first_sight, found.compaction) == (1.0, 0.0)


def test_a_server_that_states_no_cached_tokens_has_no_reported_share():
    found = numbers(agent_run(cached(0, 0, 0), pieces=CHAIN))
    assert found.cache.reported is None
    assert found.cache.lost is None
    assert [turn.reported for turn in found.turns] == [None, None, None]


def test_shares_have_an_interval_over_trees():
    """Four trees with hit rates of 40, 50, 60 and 50 %: 0.5 ± t(3) · √(0.02/3/4)."""
    trees = [
        [Asked(1, 2.0 * k, 2.0 * k + 1, tokens=50, cached=n), Asked(2, 2.0 * k, 2.0 * k + 1, {},
         50, 20)]
        for k, n in enumerate((20, 30, 40, 30))
    ]  # fmt: skip
    found = numbers(agent_run(*trees)).cache.reported
    assert found is not None
    half = 3.182446305 * math.sqrt(0.02 / 3 / 4)
    bounds = found.value, found.low, found.high
    assert bounds == pytest.approx((0.5, 0.5 - half, 0.5 + half))


@pytest.mark.parametrize(
    ("trees", "window", "tokens"),
    [
        # 100, then + 156, then + 26 new tokens
        ([cached(0, 0, 0)], (0.0, 30.0), 282),
        ([cached(0, 0, 0)], (0.0, 3.0), 256),
        ([cached(0, 0, 0)], (6.0, 30.0), 0),
        ([LINEAR, cached(0, 0, 0)], (0.0, 30.0), 300),  # one after the other
        ([UNFINISHED, [Asked(1, 27.0, 28.0)]], (0.0, 30.0), 300),  # the first goes on
        ([BROKEN, [Asked(1, 4.9, 9.0)]], (0.0, 30.0), 300),
        ([BROKEN, [Asked(1, 5.1, 9.0)]], (0.0, 30.0), 200),  # the first has failed
    ],
)
def test_the_working_set_is_what_live_trees_have_sent(trees, window, tokens):
    run = agent_run(*trees, pieces=CHAIN, window=window)
    assert numbers(run).cache.working_set_tokens == tokens


def test_turns_have_their_own_rows():
    run = agent_run(cached(0, 64, 64), pieces=CHAIN)
    turns = numbers(run).turns
    assert [(turn.turns, turn.requests) for turn in turns] == [("1", 1), ("2", 1), ("3-5", 1)]
    assert [turn.new_tokens_p50 for turn in turns] == [100, 156, 26]
    assert [turn.ttft_p50_s.value for turn in turns] == pytest.approx([0.1, 0.1, 0.1])
    assert [turn.ideal.value for turn in turns] == pytest.approx([0.0, 64 / 220, 64 / 90])


def test_a_chain_of_many_turns_falls_into_all_groups():
    tree = [Asked(1, k * 0.2, k * 0.2 + 0.15, {k - 1: 0.05} if k else {}) for k in range(60)]
    turns = numbers(agent_run(tree)).turns
    assert [(turn.turns, turn.requests) for turn in turns] == [
        ("1", 1), ("2", 1), ("3-5", 3), ("6-10", 5), ("11-20", 10), ("21-50", 30),
        ("51 and more", 10),
    ]  # fmt: skip
