"""SLOs about the trees of agents: a share of trees, limits of each tree, and open trees."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.live.live_histogram import LiveCounts
from loadgen.live.slo_so_far import Tally, slos_so_far
from loadgen.measure.aggregate import summarize
from loadgen.measure.slo import parse_slo
from loadgen.measure.slo_result import tree_result
from loadgen.measure.trees import TreeOutcomes
from tests.measure.agent_runs import BROKEN, FANNED_OUT, LINEAR, UNFINISHED, Asked, agent_run
from tests.runs import measured_run, starved

ALL = (FANNED_OUT, LINEAR, UNFINISHED, BROKEN)
"""Two trees that end, of 12 and of 6 s, one that has not ended after 10 s, one that fails."""


def judged(*slo, trees=ALL):
    summary = summarize(agent_run(*trees, slo=slo))
    results = {result.text: result for result in summary.slo}
    return summary, results["attainment(tree) " + next(t for t in slo if "(tree)" in t)[17:]]


@pytest.mark.parametrize(
    ("share", "verdict", "kind"),
    [
        (50, "met", "met"),  # 2 of 4 met, however the open tree ends
        (51, "no_verdict", "open_trees"),
        (75, "no_verdict", "open_trees"),
        (76, "missed", "missed"),  # at most 3 of 4
    ],
)
def test_there_is_a_verdict_if_open_trees_cannot_change_it(share, verdict, kind):
    summary, result = judged("ttft <= 1s", f"attainment(tree) >= {share}%")
    assert (summary.verdict, summary.reason_kinds[-1]) == (verdict, kind)
    assert (result.n, result.value) == (4, pytest.approx(2 / 3))
    assert result.met is {"met": True, "missed": False}.get(verdict)


def test_an_open_verdict_names_the_trees():
    summary, result = judged("ttft <= 1s", "attainment(tree) >= 60%")
    assert result.note_kind == "open_trees"
    assert "1 of 4 trees had not ended when the run did" in " ".join(summary.reasons)
    assert summary.exit_code == 3


@pytest.mark.parametrize(
    ("limit", "n_met", "n_missed"),
    [
        ("task_time <= 12s", 2, 1),
        ("task_time <= 11s", 1, 2),
        ("task_time <= 9s", 1, 3),  # the open tree has lasted 10 s
        ("wait_share <= 80%", 1, 2),
        ("wait_share <= 74%", 0, 3),
        ("e2e <= 2.9s", 0, 3),
        ("output_speed >= 6/s", 1, 2),  # 19 tokens after the first in 2.9 s, and in 3.4 s
    ],
)
def test_a_tree_meets_its_own_limits_and_those_of_each_request(limit, n_met, n_missed):
    summary, _ = judged(limit, "attainment(tree) >= 95%")
    assert summary.agents is not None
    assert (summary.agents.met, summary.agents.missed) == (n_met, n_missed)


def test_a_limit_of_each_tree_shows_the_share_that_met_it_alone():
    summary, _ = judged("task_time <= 11s", "e2e <= 1s", "attainment(tree) >= 95%")
    found = summary.slo[0]
    assert (found.scope, found.met, found.unit, found.n) == ("tree", None, "share", 4)
    assert found.value == pytest.approx(1 / 3)  # of three that show it: one open, one failed


def outcomes(n_met, n_missed, n_open):
    kinds = [0] * n_met + [1] * n_missed + [2] * n_open
    masks = [[kind == k for kind in kinds] for k in range(3)]
    met, missed, _ = (np.array(mask, bool) for mask in masks)
    return TreeOutcomes(met | True, met, missed, met, met[met | missed])


@pytest.mark.parametrize(
    ("counts", "proven"),
    [
        ((58, 0, 0), False),
        ((59, 0, 0), True),  # 0.95 ** 59 < 5 %
        ((59, 0, 1), False),  # as a miss
        ((92, 0, 1), True),  # Clopper and Pearson: 1 miss of 93
        ((91, 0, 1), False),
    ],
)
def test_a_share_is_proven_however_open_trees_end(counts, proven):
    result = tree_result(parse_slo("attainment(tree) >= 95%"), outcomes(*counts), 0.95)
    assert result.met is True
    assert result.proven is proven


def test_a_miss_is_proven_however_open_trees_end():
    slo = parse_slo("attainment(tree) >= 95%")
    assert tree_result(slo, outcomes(0, 9, 1), 0.95).proven is True
    late = tree_result(slo, outcomes(0, 1, 9), 0.95)
    assert (late.met, late.value, late.proven) == (False, 0.0, False)
    none = tree_result(slo, outcomes(0, 0, 0), 0.95)
    assert (none.met, none.n) == (None, 0)


def test_a_proof_needs_as_many_trees_as_of_requests():
    result = tree_result(parse_slo("attainment(tree) >= 95%"), outcomes(20, 0, 0), 0.95)
    assert result.n_needed == 59


def test_the_load_generators_error_counts_for_trees():
    """Reads that may have been 9 s late leave a task time of 12 s open at a limit of 12.5 s."""
    slo = ["task_time <= 12.5s", "attainment(tree) >= 95%"]
    run = agent_run(FANNED_OUT, slo=slo)
    assert summarize(run).verdict == "met"
    late = summarize(starved(run))
    assert late.slo[1].met is True
    assert late.slo[1].survives is False
    assert late.verdict == "no_verdict"


def test_the_output_speed_judges_like_the_tpot():
    run = measured_run(slo=["output_speed >= 95/s", "attainment >= 50%"])
    inverse = measured_run(slo=[f"tpot <= {1000 / 95!r}ms", "attainment >= 50%"])
    found, expected = summarize(run), summarize(inverse)
    assert 0 < found.attainment.value < 1
    assert found.attainment == expected.attainment
    assert found.slo[0].value == expected.slo[0].value
    assert found.slo[0].text == "output_speed >= 95/s"


def test_other_slos_about_trees_need_agents():
    with pytest.raises(UsageError, match="which only agents have"):
        summarize(measured_run(), slo=["ttft <= 1s", "attainment(tree) >= 95%"])
    with pytest.raises(UsageError, match=r"add 'attainment\(tree\) >= 95%'"):
        summarize(agent_run(LINEAR), slo=["task_time <= 10s"])
    found = summarize(agent_run(LINEAR), slo=["task_time <= 5s", "attainment(tree) >= 95%"])
    assert found.verdict == "missed"


@pytest.mark.parametrize("share", ["attainment", "attainment(tree)"])
def test_the_search_advised_for_agents_is_over_agents(share):
    run = agent_run(*ALL, slo=["e2e <= 2s", f"{share} >= 50%"])
    assert "--over agents" in summarize(run).capacity_command
    mixed = run.schedule_rows.copy()
    mixed["chain"][-1] = 0
    command = summarize(replace(run, schedule_rows=mixed)).capacity_command
    assert "--over" not in command
    assert command.startswith("slobench capacity") == (share == "attainment")


def test_a_live_view_shows_no_slo_about_trees():
    slos = list(map(parse_slo, ("ttft <= 1s", "task_time <= 1m", "attainment(tree) >= 50%")))
    tally = Tally(latencies={"ttft_s": LiveCounts()})
    assert [found.text for found in slos_so_far(slos, tally)] == ["ttft <= 1s"]


def test_a_tree_with_a_slow_request_is_missed_whatever_its_others_are():
    fast, slow = ([Asked(1, at, at + took)] for at, took in ((0.0, 1.0), (5.0, 4.0)))
    summary, result = judged("e2e <= 2s", "attainment(tree) >= 50%", trees=(fast, slow))
    assert (result.value, summary.verdict) == (0.5, "met")
