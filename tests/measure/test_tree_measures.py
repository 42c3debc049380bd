"""Numbers of trees as measures of a run: alone, in a comparison, and in the record of a night."""

import dataclasses
import math

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.measure.measures import Measured, measure
from loadgen.studies.compare.numbers import SHOWN_OF_AGENTS, compare, measure_noise
from loadgen.studies.nightly.record import CellNight, from_json, numbers_of, to_json
from tests.measure.agent_runs import BROKEN, FANNED_OUT, LINEAR, UNFINISHED, Asked, agent_run
from tests.runs import changed, measured_run

ALL = (FANNED_OUT, LINEAR, UNFINISHED, BROKEN)
"""Two trees that end, of 12 and of 6 s, one that has not ended after 10 s, one that fails."""
SLO = ("ttft <= 1s", "task_time <= 11s", "attainment(tree) >= 50%")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("attainment(tree)", 1 / 3),
        ("mean(task_time)", 9.0),
        ("p50(task_time)", 6.0),
        ("p90(task_time)", 12.0),
        ("mean(wait_share)", (10 / 12 + 0.75) / 2),
    ],
)
def test_a_run_has_the_numbers_of_its_trees(text, value):
    run = Measured(agent_run(*ALL, slo=SLO))
    assert run.value(measure(text)) == pytest.approx(value)
    assert run.estimate(measure(text), 0.95, with_failures=False).value == pytest.approx(value)
    assert run.n_of(measure(text)) == 3
    assert run.n_of(measure("p50(ttft)")) == 13


def test_a_broken_tree_has_no_short_task_time():
    run = Measured(agent_run(*ALL, slo=SLO))
    assert run.estimate(measure("mean(task_time)"), 0.95).value == math.inf
    assert run.estimate(measure("p50(task_time)"), 0.95).value == 12.0


def test_trees_pair_up_in_the_order_of_the_schedule():
    run = Measured(agent_run(*ALL, slo=SLO))
    times_s = run.in_order(measure("mean(task_time)"))
    assert times_s.tolist() == pytest.approx([12.0, 6.0, math.nan, math.nan], nan_ok=True)
    met = run.in_order(measure("attainment(tree)"))
    assert met.tolist() == pytest.approx([0.0, 1.0, math.nan, 0.0], nan_ok=True)


def test_other_runs_have_no_trees():
    run = Measured(measured_run())
    for text in SHOWN_OF_AGENTS:
        assert math.isnan(run.value(measure(text)))
        assert run.n_of(measure(text)) == 0
        assert len(run.in_order(measure(text))) == 0
    with pytest.raises(UsageError, match=r"has a value per tree; write 'p50\(task_time\)'"):
        measure("task_time")


def run_of_tasks(seed, slower=1.0):
    """Forty tasks of a request of 0.4 to 0.6 s, a pause of 0.2 s and another such request."""
    rng, trees = np.random.default_rng(seed), []
    for k in range(40):
        first, second = (slower * rng.uniform(0.4, 0.6, 2)).tolist()
        later = k + first + 0.2
        trees.append(
            [Asked(1, float(k), k + first), Asked(1, later, later + second, {0: 0.2})]
        )  # fmt: skip
    run = agent_run(*trees, window=(0.0, 45.0), slo=["ttft <= 1s", "attainment(tree) >= 90%"])
    sha256 = f"{seed:064x}"
    return dataclasses.replace(run, manifest=changed(run.manifest, schedule_sha256=sha256))


def test_slower_tasks_are_worse():
    sides = [run_of_tasks(k) for k in range(4)], [run_of_tasks(k + 9, 1.2) for k in range(4)]
    found = compare(*sides, metrics=["mean(task_time)"])
    assert found.verdict == "worse"
    rows = {row.measure: row for row in found.measures}
    assert set(SHOWN_OF_AGENTS) <= set(rows)
    assert rows["mean(task_time)"].change == pytest.approx(1.4 / 1.2 - 1, abs=0.02)
    assert rows["attainment(tree)"].n_due == (160, 160)
    # By chance alone, a share among 40 trees varies by sqrt(321 · 1 / 322² / 40).
    assert rows["attainment(tree)"].noise == pytest.approx(0.0087975, abs=1e-6)
    assert rows["mean(ttft)"].n_due == (320, 320)
    noise = measure_noise(sides[0], ["attainment(tree)"])["attainment(tree)"]
    assert noise.df == 160
    plain = compare([measured_run(seed=1)], [measured_run(seed=2)])
    assert not {row.measure for row in plain.measures} & set(SHOWN_OF_AGENTS)


def test_a_night_records_the_numbers_of_trees():
    numbers = numbers_of(Measured(agent_run(*ALL, slo=SLO)))
    assert numbers.n_trees == numbers.n_of(measure("mean(task_time)")) == 3
    assert numbers.n_of(measure("p50(ttft)")) == 13
    assert {text: numbers.values[text] for text in SHOWN_OF_AGENTS} == pytest.approx(
        {
            "attainment(tree)": 1 / 3,
            "mean(task_time)": 9.0,
            "p90(task_time)": 12.0,
            "mean(wait_share)": 0.791666667,
        }
    )
    night = CellNight("cell", "1", "2026-01-01T00:00:00Z", {}, SLO, False, (numbers,))
    assert from_json(to_json(night)).runs[0].n_trees == 3
    plain = numbers_of(Measured(measured_run()))
    assert not set(SHOWN_OF_AGENTS) & set(plain.values)
    assert "n_trees" not in to_json(dataclasses.replace(night, runs=(plain,)))["runs"][0]
