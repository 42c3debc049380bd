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
    return [f for f in summarize(run).findings if "sent differ from the scheduled gaps" in f]


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
