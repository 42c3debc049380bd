"""What a page carries of its requests is what was measured, to the last bit."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given

from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.measure.per_request import per_request
from reports.run import embedded_rows as module
from reports.run.embedded_rows import embedded_rows
from tests.runs import measured_run, runs


def unpacked(column):
    """A column read back by hand: byte planes, then values."""
    planes = zlib.decompress(base64.b64decode(column["data"]))
    size = int(column["type"][1])
    n = len(planes) // size
    in_order = bytes(planes[plane * n + k] for k in range(n) for plane in range(size))
    return np.frombuffer(in_order, "<" + column["type"])


@given(runs())
def test_every_due_request_is_there_with_all_its_bits(run):
    columns, due = per_request(run), due_rows(run)
    held = embedded_rows(run, summarize(run), columns)
    if held is None:
        assert not due.any()
        return
    assert held["n"] == np.count_nonzero(due)
    found = {name: unpacked(column) for name, column in held["columns"].items()}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert found[name].tobytes() == columns.column(name)[due].tobytes()
    assert found["request_id"].tolist() == run.request_rows["request_id"][due].tolist()
    assert found["status"].tolist() == run.request_rows["status"][due].tolist()


def test_promised_metrics_come_along_and_the_tightest_limit_is_asked():
    run = measured_run(slo=["ttft <= 300ms", "ttft <= 200ms", "max_stall <= 1s"])
    held = embedded_rows(run, summarize(run), per_request(run))
    assert held is not None
    asked = {limit["metric"]: limit["asked_ms"] for limit in held["limits"]}
    assert asked == {"ttft_s": 200.0, "tpot_s": None, "e2e_s": None, "max_stall_s": 1000.0}
    assert set(asked) < set(held["columns"])


def queued(slo):
    """200 requests whose latencies come in four waves of 50."""
    run = measured_run(slo=slo)
    rows = run.request_rows
    due = np.flatnonzero(due_rows(run))
    later_s = 0.2 * np.sin(np.arange(len(due)) * 2 * np.pi / 50)
    for name in ("first_chunk_s", "first_token_s", "last_token_s", "done_s"):
        rows[name][due] += 0.3 + later_s
    return run


@pytest.mark.parametrize("slo", [[], ["p99(ttft) <= 2s"], ["ttft <= 2s"]])
def test_the_page_counts_dependent_requests_as_few(slo):
    run = queued(slo)
    held = embedded_rows(run, summarize(run), per_request(run))
    assert held is not None
    assert held["times"] is None  # 200 requests of four waves: no bounds
    plain = measured_run(slo=slo)
    held = embedded_rows(plain, summarize(plain), per_request(plain))
    assert held is not None
    assert held["times"] == (1.0, 1.0)


def test_a_page_that_would_get_too_large_carries_none(monkeypatch):
    run = measured_run()
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    assert embedded_rows(run, summarize(run), per_request(run)) is None
