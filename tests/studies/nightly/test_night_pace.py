"""Without a control, a machine that surely changed its pace takes a verdict back and makes none."""

from dataclasses import replace

import numpy as np
import pytest
from rig import nights

from loadgen.studies.compare.judgement import Options
from loadgen.studies.nightly.record import from_json, to_json
from loadgen.studies.nightly.verdict import History, judge_night


def night(rng, k, slower=1.0, pace=1.0, verdict="", names=("mean(tpot)",), sd=0.01):
    """A night of five runs; the machine's pace shifts the server and the fixed calculation."""
    made = nights.cell_night(rng, k, 5)
    runs = [
        replace(
            run,
            values={
                name: 0.02 * slower * pace * float(np.exp(rng.normal(0, sd))) for name in names
            },
            pace_s=0.012 * pace * float(np.exp(rng.normal(0, sd))),
        )
        for run in made.runs
    ]
    return replace(made, runs=tuple(runs), verdict=verdict)


def before(rng, n=6, **options):
    return tuple(night(rng, k, verdict="same", **options) for k in range(n))


def judged(tonight, baseline, **options):
    asked = Options(**{"metrics": ["mean(tpot)"], **options})
    (found,) = judge_night([tonight], {"chat": History((baseline,))}, asked)
    return found


def unpaced(night):
    return replace(night, runs=tuple(replace(run, pace_s=None) for run in night.runs))


def test_a_slower_machine_leaves_worse_open_and_says_by_how_much():
    rng = np.random.default_rng(1)
    baseline, tonight = before(rng), night(rng, 9, pace=1.24)
    assert judged(unpaced(tonight), baseline).verdict == "worse"
    found = judged(tonight, baseline)
    assert found.verdict == "inconclusive"
    assert found.pace.change == pytest.approx(0.24, abs=0.02)
    assert found.notes[0].startswith(
        "The machine was slower tonight: the time of a fixed calculation changed by +24 % ["
    )
    assert (
        "This may explain the change of mean(tpot), so the verdict is inconclusive. "
        in found.notes[0]
    )
    assert judged(night(rng, 9, pace=0.8), baseline).verdict == "inconclusive"


def test_a_change_that_no_machine_explains_stays_a_verdict():
    rng = np.random.default_rng(2)
    baseline = before(rng)
    assert judged(night(rng, 9, slower=2.0, pace=1.24), baseline).verdict == "worse"
    assert judged(night(rng, 9, slower=1.5, pace=0.8), baseline).verdict == "worse"
    assert judged(night(rng, 9, slower=0.5, pace=1.24), baseline).verdict == "better"
    assert judged(night(rng, 9, slower=1.1, pace=1.01), baseline).verdict == "worse"


def test_errors_are_no_matter_of_pace_but_kept_promises_are():
    rng = np.random.default_rng(3)
    names = ("mean(tpot)", "error_rate", "attainment")

    def with_shares(one, failed, kept):
        runs = [
            replace(r, values={**r.values, "error_rate": failed, "attainment": kept})
            for r in one.runs
        ]
        return replace(one, runs=tuple(runs))

    baseline = tuple(with_shares(one, 0.0, 0.99) for one in before(rng, names=names))
    tonight = with_shares(night(rng, 9, pace=1.3, names=names), 0.2, 0.6)
    rows = judged(tonight, baseline, metrics=names).measures
    assert {row.measure: row.verdict for row in rows if row.is_gated} == {
        "mean(tpot)": "inconclusive", "error_rate": "worse", "attainment": "inconclusive",
    }  # fmt: skip


def test_a_machine_that_changed_makes_no_verdict():
    rng = np.random.default_rng(4)
    baseline = before(rng)
    for slower, word in ((1 / 1.24, "same"), (1.02 / 1.24, "same")):
        tonight = night(rng, 9, slower=slower, pace=1.24)
        assert judged(tonight, baseline, margins={"": 0.05}).verdict == word
    mute = tuple(map(unpaced, baseline))
    assert judged(night(rng, 9, pace=1.24), mute).verdict == "worse"
    assert judged(night(rng, 9, pace=1.24), mute).pace is None


def test_a_pace_reads_back_as_it_was_written():
    made = night(np.random.default_rng(5), 1)
    assert from_json(to_json(made)) == made
    assert "pace_s" not in to_json(unpaced(made))["runs"][0]
