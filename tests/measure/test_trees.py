"""The trees of agents: their requests, times and outcomes, for trees made by hand."""

import numpy as np
import pytest

from loadgen.measure.attainment import due_rows, measured_window, meets, with_window
from loadgen.measure.per_request import per_request
from loadgen.measure.slo import Slo
from loadgen.measure.trees import in_order_of_start, tree_outcomes, tree_times, trees_of
from tests.measure.agent_runs import BROKEN, FANNED_OUT, LINEAR, UNFINISHED, Asked, agent_run
from tests.runs import measured_run


def limit(metric, at_most):
    return Slo(f"{metric} <= {at_most}", "run", metric, "<=", at_most)


def found(run):
    trees = trees_of(run)
    assert trees is not None
    return trees


def outcomes(run, *limits):
    due = due_rows(run)
    met = due & meets(per_request(run), [])
    everywhere = np.ones(len(due), bool)
    applied = [(slo, everywhere) for slo in limits]
    return tree_outcomes(found(run), run, due, met, measured_window(run), applied)


def test_a_run_without_agents_has_no_trees():
    assert trees_of(measured_run()) is None


def test_rows_belong_to_the_tree_of_their_session_and_turns_count_within_a_chain():
    trees = found(agent_run(FANNED_OUT, LINEAR))
    assert trees.tree.tolist() == [0] * 6 + [1] * 3
    assert trees.first.tolist() == [0, 6]
    assert trees.turn.tolist() == [1, 1, 2, 2, 3, 1, 1, 2, 3]
    assert trees.binding.tolist() == [-1, 0, 1, 0, 2, 3, -1, 6, 7]


def test_a_user_plays_tree_after_tree():
    """The second tree of a session begins with the row that follows a failure, too."""
    run = agent_run(LINEAR, UNFINISHED, BROKEN, sessions=[0, 0, 1])
    assert run.schedule_rows["after_failure"].tolist() == [False] * 3 + [True] + [False] * 5
    trees = found(run)
    assert trees.tree.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert trees.binding.tolist() == [-1, 0, 1, -1, 3, 4, -1, 6, 7]


def test_trees_are_numbered_by_their_first_row_whatever_their_session():
    run = agent_run(LINEAR, FANNED_OUT, sessions=[5, 2])
    trees = found(run)
    assert trees.tree.tolist() == [0] * 3 + [1] * 6
    assert in_order_of_start(trees, run, np.ones(2, bool)).tolist() == [1, 0]


def test_the_path_that_ended_last_is_split_into_model_tools_and_subagents():
    times = tree_times(found(run := agent_run(FANNED_OUT, LINEAR, UNFINISHED, BROKEN)), run)
    assert times.task_s.tolist()[:2] == pytest.approx([12.0, 6.0])
    # 2 s and 2.5 s of its own; 0.5 s after the subagent; 1 + 2 + 0.5 + 3.5 s of the subagent
    assert times.model_s.tolist()[:2] == pytest.approx([4.5, 4.5])
    assert times.tools_s.tolist()[:2] == pytest.approx([0.5, 1.5])
    assert times.subagents_s.tolist()[:2] == pytest.approx([7.0, 0.0])
    assert times.wait_share.tolist()[:2] == pytest.approx([10 / 12, 4.5 / 6])
    assert np.isnan(times.task_s[2:]).all()
    assert np.isnan(times.wait_share[2:]).all()


def test_the_longer_gap_binds_a_request_that_waits_for_two():
    tree = [
        Asked(1, 0.0, 1.0),
        Asked(2, 1.5, 6.0, {0: 0.5}),
        Asked(1, 2.0, 5.0, {0: 1.0}),
        Asked(1, 9.0, 10.0, {1: 1.0, 2: 4.0}),
    ]
    times = tree_times(found(run := agent_run(tree)), run)
    # 0-1, a gap of 1 s, 2-5, a gap of 4 s, 9-10: the subagent had been over at 7 s
    parts = times.model_s[0], times.tools_s[0], times.subagents_s[0]
    assert parts == pytest.approx((5.0, 5.0, 0.0))


def test_a_root_that_keeps_its_offset_waits_from_the_start_of_the_tree():
    run = agent_run([Asked(1, 0.0, 1.0), Asked(2, 2.0, 5.0)])
    times = tree_times(found(run), run)
    assert (times.task_s[0], times.subagents_s[0], times.model_s[0]) == (5.0, 5.0, 0.0)


def test_a_background_chain_can_end_last():
    tree = (*FANNED_OUT[:5], Asked(3, 5.5, 20.0, {3: 0.5}))
    times = tree_times(found(run := agent_run(tree)), run)
    # 0-2 own, 2 s of tools, 4-5 own, then the background
    parts = times.model_s[0], times.tools_s[0], times.subagents_s[0]
    assert parts == pytest.approx((3.0, 2.0, 15.0))


def test_a_tree_meets_its_slos_misses_them_or_is_open():
    result = outcomes(agent_run(FANNED_OUT, LINEAR, UNFINISHED, BROKEN))
    assert result.due.tolist() == [True] * 4
    assert result.met.tolist() == [True, True, False, False]
    assert result.missed.tolist() == [False, False, False, True]
    assert (result.n, result.n_met, result.n_missed, result.n_open) == (4, 2, 1, 1)


def test_a_tree_that_began_before_the_window_is_not_due():
    result = outcomes(agent_run(FANNED_OUT, LINEAR, window=(1.0, 30.0)))
    assert result.due.tolist() == [False, True]
    assert result.kept.tolist() == [True, True]
    assert result.n == result.n_met == 1


@pytest.mark.parametrize(
    ("at_most", "met", "missed"),
    [(12.0, [True, True, False], [False] * 3), (6.0, [False, True, False], [True, False, True])],
)
def test_a_task_time_is_missed_as_soon_as_it_is_over(at_most, met, missed):
    """The third tree has run for 10 s when the window ends."""
    run = agent_run(FANNED_OUT, LINEAR, UNFINISHED)
    result = outcomes(run, limit("task_time_s", at_most))
    assert result.met.tolist() == met
    assert result.missed.tolist() == missed


def test_a_limit_applies_to_the_trees_of_its_class():
    run = agent_run(FANNED_OUT, LINEAR)
    due = due_rows(run)
    of_second = found(run).tree == 1
    limits = [(limit("task_time_s", 1.0), of_second)]
    result = tree_outcomes(found(run), run, due, due, measured_window(run), limits)
    assert result.missed.tolist() == [False, True]


def test_a_wait_share_is_that_of_trees_that_have_ended():
    result = outcomes(agent_run(FANNED_OUT, LINEAR, UNFINISHED), limit("wait_share", 0.8))
    assert result.met.tolist() == [False, True, False]
    assert result.missed.tolist() == [True, False, False]


def test_a_shorter_window_leaves_trees_open():
    """A tree with later requests behind the window did not end in it; one behind it never began."""
    run = with_window(agent_run(FANNED_OUT, LINEAR), "0s:9s")
    result = outcomes(run)
    assert result.due.tolist() == [True, False]
    assert (result.n_met, result.n_open) == (0, 1)
    assert np.isnan(found(run).begun_s(run)).tolist() == [False, True]
