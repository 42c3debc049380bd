"""Which rows count, and which of them met an SLO: the ends of each interval."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.attainment import due_rows, slos_met
from loadgen.measure.per_request import per_request
from loadgen.measure.slo import parse_slo
from tests.runs import changed, measured_run


def with_ttft_s(*ttft_s):
    """A run whose first requests have these TTFTs, exactly."""
    run = measured_run(n_requests=60)
    rows, chunks = run.request_rows.copy(), run.chunk_rows.copy()
    for row, seconds in enumerate(ttft_s):
        rows["first_token_s"][row] = run.schedule_rows["scheduled_s"][row] + seconds
        first = np.flatnonzero(chunks["request_id"] == row)[0]
        chunks["received_s"][first] = rows["first_token_s"][row]
    return replace(run, request_rows=rows, chunk_rows=chunks)


def test_a_value_at_the_limit_meets_the_slo():
    columns = per_request(with_ttft_s(0.125, np.nextafter(0.125, 1.0), 0.0625))
    met = slos_met(columns, parse_slo("ttft <= 125ms"))
    assert columns.ttft_s[0] == 0.125
    assert met[:3].tolist() == [True, False, True]


@pytest.mark.parametrize(("measure_s", "last"), [(2.0, 39), (2.05, 40), (2.1, 40)])
def test_a_counted_window_does_not_hold_the_release_at_its_end(measure_s, last):
    """Releases every 100 ms, warm-up 2 s: the request of 4.0 s is the first after 2 s more."""
    run = measured_run(n_requests=60)
    window = {"requests": 20, "measure_s": measure_s, "ended_s": None}
    due = due_rows(replace(run, manifest=changed(run.manifest, window=window)))
    assert np.flatnonzero(due).tolist() == list(range(20, last + 1))
