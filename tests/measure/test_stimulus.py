"""What was sent, beside what was scheduled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from loadgen.measure.aggregate import summarize
from loadgen.measure.stimulus import ks_distance
from loadgen.records import Status
from tests.runs import measured_run


def what_was_sent(run):
    found = summarize(run).stimulus
    assert found is not None
    return found


def told(run):
    return [f for f in summarize(run).findings if "other arrivals than the scenario" in f]


def sent_after(run, scheduled_s, late_s):
    """The run with these scheduled times, each request sent so late."""
    run.schedule_rows["scheduled_s"][20:] = scheduled_s
    run.request_rows["sent_s"][20:] = scheduled_s + late_s
    return run


RNG = np.random.default_rng(3)
ONE_BY_ONE_S = np.arange(200) % 40 * 1e-4  # the lateness of 40 requests of the same time
SCHEDULES = {
    "bursts of 40": (2.0 + np.repeat(np.arange(5) * 4.0, 40), ONE_BY_ONE_S),
    "all at once": (np.full(200, 2.0), np.arange(200) * 1e-4),
    "constant": (2.0 + np.arange(200) * 0.1, RNG.uniform(1e-5, 4e-4, 200)),
    "pairs": (2.0 + np.repeat(np.arange(100) * 0.2, 2), np.arange(200) % 2 * 1e-4),
    "whole seconds": (2.0 + np.sort(RNG.integers(0, 20, 200)), RNG.uniform(1e-5, 4e-4, 200)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_times_and_equal_gaps_are_no_other_arrivals(name):
    """By their gaps, they would differ: 0.1 ms is not 0."""
    run = sent_after(measured_run(), *SCHEDULES[name])
    assert told(run) == []
    assert what_was_sent(run).displaced == pytest.approx(0.0, abs=0.02)


def test_a_burst_that_is_spread_is_told():
    planned_s, _ = SCHEDULES["bursts of 40"]
    run = sent_after(measured_run(), planned_s, np.arange(200) % 40 * 0.1)
    (said,) = told(run)
    assert "% of the requests fell into other windows of 200 ms than scheduled" in said


def test_a_quarter_that_is_not_sent_is_told():
    run = measured_run()
    run.request_rows["status"][20::4] = Status.dropped
    run.request_rows["sent_s"][20::4] = np.nan
    assert what_was_sent(run).displaced == pytest.approx(0.25, abs=0.05)
    assert told(run)


def test_a_run_that_followed_its_schedule_sent_what_was_scheduled():
    run = measured_run()
    found = summarize(run).to_json()["stimulus"]
    assert found["scheduled"]["n"] == found["sent"]["n"] == 200
    assert found["sent"]["rate_per_s"] == pytest.approx(10.0)
    assert found["sent"]["gap_cv"] == pytest.approx(found["scheduled"]["gap_cv"], abs=0.02)
    assert found["ks"] < found["ks_chance"]
    late_s = run.request_rows["sent_s"][20:] - run.schedule_rows["scheduled_s"][20:]
    assert found["late_s"][2] == pytest.approx(float(late_s.max()))
    assert told(run) == []


def test_a_stream_that_was_smoothed_is_told():
    """The same requests, sent at even distances."""
    run = measured_run()
    rng = np.random.default_rng(1)
    run.schedule_rows["scheduled_s"][20:] = 2.0 + np.sort(rng.uniform(0, 20, 200))
    run.request_rows["sent_s"][20:] = 2.0 + np.arange(200) * 0.1
    (said,) = told(run)
    assert "gap cv" in said
    assert what_was_sent(run).sent.gap_cv == pytest.approx(0.0, abs=1e-6)


def test_requests_that_were_never_sent_are_missing_from_what_was_sent():
    run = measured_run()
    run.request_rows["status"][100:150] = Status.dropped
    run.request_rows["sent_s"][100:150] = np.nan
    found = what_was_sent(run)
    assert (found.scheduled.n, found.sent.n) == (200, 150)


def test_lengths_asked_and_got_stand_side_by_side():
    run = measured_run()
    run.request_rows["output_tokens"][50:60] = 13
    run.request_rows["input_tokens"][70] = 104
    found = summarize(run).to_json()["stimulus"]
    assert found["output_tokens"] == {
        "n": 200, "asked_mean": 20.0, "got_mean": pytest.approx(19.65), "differ": 10, "most_off": 7,
    }  # fmt: skip
    assert (found["input_tokens"]["differ"], found["input_tokens"]["most_off"]) == (1, 4)


def test_rows_that_wait_for_others_have_no_instant_of_their_own():
    run = measured_run()
    run.schedule_rows["n_parents"][120:] = 1
    run.schedule_rows["scheduled_s"][120:] = np.nan
    found = what_was_sent(run)
    assert found.scheduled.n == 100


values = st.lists(st.floats(-100, 100), min_size=2, max_size=40)


@given(values, values)
def test_the_distance_is_that_of_kolmogorov_and_smirnov(one, other):
    distance, chance = ks_distance(np.array(one), np.array(other))
    assert distance == pytest.approx(ks_2samp(one, other, method="asymp").statistic)
    assert chance is not None


def test_too_few_values_have_no_distance():
    assert ks_distance(np.array([1.0]), np.array([1.0, 2.0])) == (None, None)
