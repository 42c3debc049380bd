"""Errors are ours minus the server's: known answers, and what must not change them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.records import CHUNKS, SCHEDULE, Run, Status, empty_requests
from loadgen.studies.doctor.fidelity import Truth, fidelity, spread
from tests.runs import MANIFEST


def run_of(sent_s, first_s, last_s, tokens, late_s=0.0):
    n = len(sent_s)
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = np.arange(n)
    rows = empty_requests(schedule)
    rows["status"] = Status.ok
    rows["sent_s"], rows["first_token_s"], rows["last_token_s"] = sent_s, first_s, last_s
    rows["released_s"] = np.asarray(sent_s) - late_s
    rows["output_tokens"] = tokens
    return Run(MANIFEST, schedule, rows, np.empty(0, CHUNKS))


def test_the_errors_of_one_request_by_hand():
    """Sent at 1.000, read 0.2 ms later; first token written after 50 ms, seen 0.3 ms after that;
    ten more tokens in 100 ms, the last one seen 0.5 ms late."""
    run = run_of([1.0], [1.0505], [1.1507], [11], late_s=0.001)
    truth = Truth(*map(np.atleast_1d, (1.0002, 1.0502, 1.1502, 4e-5)))
    found = fidelity(run, truth)
    assert found.ttft_error_s.p50 == pytest.approx(0.0005)
    assert found.tpot_error_s.p50 == pytest.approx(0.00002)
    assert found.lateness_s.p99 == pytest.approx(0.001)
    assert (found.server_lateness_s.max, found.ttft_error_s.n) == (4e-5, 1)
    assert found.ttft_error_s.few


times = st.lists(st.floats(0, 100), min_size=1, max_size=30)


@given(times, st.floats(-0.01, 0.01), st.floats(-1e5, 1e5))
def test_a_reading_delay_is_the_error_whatever_the_traffic_and_the_epoch(sent, delay_s, epoch_s):
    sent_s = np.array(sent)
    n = len(sent)
    read_s, first_s, last_s = sent_s, sent_s + 0.05, sent_s + 0.15
    run = run_of(sent_s, first_s + delay_s, last_s + delay_s, [11] * n)
    shifted = Truth(read_s + epoch_s, first_s + epoch_s, last_s + epoch_s, np.zeros(n))
    found = fidelity(run, shifted)
    assert found.ttft_error_s.p50 == pytest.approx(delay_s, abs=1e-9)
    assert found.ttft_error_s.p99 == pytest.approx(abs(delay_s), abs=1e-9)
    assert found.tpot_error_s.p99 == pytest.approx(0, abs=1e-9)


def test_failures_and_answers_of_one_token_have_no_such_error():
    run = run_of([0.0, 0.0, 0.0], [0.1] * 3, [0.2] * 3, [11, 1, 11])
    run.request_rows["status"][2] = Status.timeout
    found = fidelity(run, Truth(np.zeros(3), np.full(3, 0.1), np.full(3, 0.2), np.zeros(3)))
    assert (found.ttft_error_s.n, found.tpot_error_s.n, found.lateness_s.n) == (2, 1, 3)


def test_a_request_the_server_never_saw_is_left_out():
    run = run_of([0.0, 0.0], [0.1, 0.1], [0.2, 0.2], [2, 2])
    nan = np.array([0.0, np.nan])
    found = fidelity(run, Truth(nan, nan + 0.1, nan + 0.2, nan))
    assert (found.ttft_error_s.n, found.server_lateness_s.n) == (1, 1)


def test_a_spread_is_of_order_statistics_and_signs():
    values = spread(np.r_[np.full(60, -0.001), np.full(39, 0.002), -0.5, np.nan])
    assert (values.n, values.p50, values.p99, values.max, values.few) == (
        100, -0.001, 0.002, 0.5, True,
    )  # fmt: skip
    assert not spread(np.zeros(1000)).few
    assert np.isnan(spread(np.array([])).p99)
