"""What latency goes with, on runs where that is known."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.drivers import Drivers
from loadgen.records import Run
from tests.runs import measured_run


def drivers_of(run: Run) -> Drivers:
    found = summarize(run).drivers
    assert found is not None
    return found


def test_a_token_of_the_prompt_that_costs_a_millisecond_is_found():
    run = measured_run()
    rows = run.request_rows
    tokens = np.arange(len(rows)) % 50 * 10 + 10
    moved_s = tokens * 0.001 - (rows["first_token_s"] - rows["sent_s"])
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s"):
        rows[name] += moved_s
    rows["input_tokens"] = tokens
    line = drivers_of(run).ttft_by_input
    assert line is not None
    assert line.slope == pytest.approx(0.001)
    assert line.intercept == pytest.approx(0.0, abs=1e-9)


def test_company_is_the_mean_number_in_flight_while_decoding():
    run = measured_run()
    run.request_rows["input_tokens"] = 7
    found = drivers_of(run)
    assert found.ttft_by_input is None  # every prompt is alike


def test_the_parts_of_a_request_add_up_to_its_e2e():
    run = measured_run(n_failed=9)
    summary = summarize(run)
    found = drivers_of(run)
    assert list(found.split) == ["all", "slowest 10 %"]
    whole = found.split["all"]
    parts = (whole.client_queue_s, whole.connect_s, whole.prefill_s, whole.decode_s)
    assert whole.server_queue_s is None
    assert sum(parts) == pytest.approx(summary.metrics["e2e_s"].mean)
    assert whole.n == summary.metrics["e2e_s"].n


def test_a_server_that_tells_its_queue_has_it_taken_out_of_the_prefill():
    run = measured_run()
    before = drivers_of(run).split["all"]
    run.request_rows["server_queue_s"] = 0.03
    after = drivers_of(run).split["all"]
    assert after.server_queue_s == pytest.approx(0.03)
    assert after.prefill_s == pytest.approx(before.prefill_s - 0.03)


def test_a_run_without_answers_has_none():
    found = drivers_of(replace(measured_run(0)))
    assert found == Drivers(None, None, {})
