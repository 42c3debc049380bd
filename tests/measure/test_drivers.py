"""The drivers of latency, on runs where they are known."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.drivers import Drivers, drivers, tpot_points
from loadgen.measure.per_request import per_request
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


def rescheduled(
    released_s: list[float], first_s: list[float], last_s: list[float], done_s: list[float]
) -> Run:
    """A run of as many successful requests with these instants (seconds)."""
    run = measured_run(len(released_s))
    rows = run.request_rows
    rows["released_s"] = rows["sent_s"] = released_s
    rows["first_chunk_s"] = rows["first_token_s"] = rows["first_answer_s"] = first_s
    rows["last_token_s"], rows["done_s"] = last_s, done_s
    return run


def test_requests_in_flight_while_decoding_are_counted_from_release_to_done():
    """Three requests by hand. The first decodes over [4, 8): itself all of the time, the second
    (in flight over [6, 20)) for 2 of 4 s, the third (over [7, 9)) for 1 of 4 s."""
    run = rescheduled([3.0, 6.0, 7.0], [4.0, 10.0, 8.0], [8.0, 18.0, 9.0], [8.0, 20.0, 9.0])
    columns = per_request(run)
    in_flight, tpot_s = tpot_points(run, columns, columns.is_ok)
    assert in_flight.tolist() == pytest.approx([1.75, 1.0, 2.0])
    assert tpot_s.tolist() == columns.tpot_s.tolist()
    waiting = rescheduled([3.0, 3.0, 3.0], [4.0, 5.0, 6.0], [8.0, 9.0, 8.0], [8.0, 13.0, 8.0])
    columns = per_request(waiting)
    in_flight, _ = tpot_points(waiting, columns, columns.is_ok)
    # requests count before their first token too; the second is alone from 8 to 9
    assert in_flight.tolist() == pytest.approx([3.0, 2.5, 3.0])


def test_a_request_in_flight_that_costs_ten_milliseconds_per_token_is_found():
    """Every other second 1 to 4 requests decode together, 0.01 s per token for each of them."""
    sizes = [1 + k % 4 for k in range(12)]
    starts_s = [2.0 * k for k, size in enumerate(sizes) for _ in range(size)]
    ends_s = [s + 1.0 for s in starts_s]
    run = rescheduled(starts_s, starts_s, ends_s, ends_s)
    n_tokens = [1 + round(1.0 / (0.01 * size)) for size in sizes for _ in range(size)]
    run.request_rows["output_tokens"] = n_tokens
    run.request_rows["first_chunk_tokens"] = 1
    columns = per_request(run)
    found = drivers(run, columns, columns.is_ok, 0.95)
    assert found is not None
    line = found.tpot_by_in_flight
    assert line is not None
    assert line.slope == pytest.approx(0.01, rel=0.02)
    assert line.intercept == pytest.approx(0.0, abs=5e-4)
    assert line.n == 30


def test_prompts_of_one_length_give_no_line():
    run = measured_run()
    run.request_rows["input_tokens"] = 7
    assert drivers_of(run).ttft_by_input is None


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


def test_the_time_to_connect_is_no_part_of_the_prefill():
    run = measured_run()
    before = drivers_of(run).split["all"]
    assert before.connect_s == 0.0  # every connection was reused
    run.request_rows["reused_connection"] = False
    run.request_rows["connected_s"] = run.request_rows["sent_s"] + 0.02
    after = drivers_of(run).split["all"]
    assert after.connect_s == pytest.approx(0.02)
    assert after.prefill_s == pytest.approx(before.prefill_s - 0.02)
