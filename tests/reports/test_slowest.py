"""The slowest answers: the right ones, in order, and where their seconds went."""

from itertools import pairwise

import numpy as np
import vl_convert

from loadgen.measure.aggregate import summarize
from loadgen.measure.per_request import per_request
from loadgen.records import Status
from reports.run.slowest import MAX_TICKS, gantt, slowest
from tests.runs import measured_run


def slowest_of(run):
    return slowest(run, per_request(run))


def test_the_longest_come_first_and_failures_not_at_all():
    run = measured_run()
    rows = run.request_rows
    for row, late_s in ((100, 5.0), (150, 7.0), (200, 9.0)):
        rows["last_token_s"][row] += late_s
    rows["status"][200] = Status.timeout
    rows["last_token_s"][3] += 60.0  # in the warm-up
    seen = slowest_of(run)
    assert list(seen.order[:2]) == ["150", "100"]
    assert len(seen.order) == 50
    assert [cells[0].text for cells in seen.rows[:2]] == ["150", "100"]


def test_the_parts_follow_each_other_up_to_the_last_token():
    run = measured_run()
    run.request_rows["server_queue_s"] = 0.02
    seen = slowest_of(run)
    first = [bar for bar in seen.bars if bar["request"] == seen.order[0]]
    assert first[0]["from_s"] == 0.0
    assert all(a["to_s"] == b["from_s"] for a, b in pairwise(first))
    assert "waiting in the server" in {bar["part"] for bar in first}
    row = int(seen.order[0])
    e2e_s = run.request_rows["last_token_s"][row] - run.request_rows["released_s"][row]
    assert first[-1]["to_s"] == e2e_s


def test_ticks_are_the_chunks_of_that_answer():
    run = measured_run()
    seen = slowest_of(run)
    name = seen.order[0]
    received_s = run.chunk_rows["received_s"][run.chunk_rows["request_id"] == int(name)]
    ticks = [tick["at_s"] for tick in seen.ticks if tick["request"] == name]
    assert len(received_s) <= MAX_TICKS
    assert np.allclose(ticks, received_s - run.request_rows["released_s"][int(name)])


def test_the_figure_is_drawn():
    svg = vl_convert.vegalite_to_svg({**gantt(slowest_of(measured_run())), "width": 400})
    assert "<path" in svg
    assert "NaN" not in svg


def test_a_run_without_answers_has_none():
    assert slowest_of(measured_run(0)).order == []
    assert summarize(measured_run(0)).drivers is not None
