"""The files of `aiperf profile`, against literals and against its reader."""

import json

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.exports.aiperf import aiperf_records, aiperf_summary
from loadgen.exports.formats import FORMATS, export
from loadgen.foreign.read import imported_runs
from loadgen.measure.definitions import rescore
from loadgen.records import Status
from tests.exports.test_vllm_bench import three_requests
from tests.runs import measured_run, with_manifest

POISSON = {"arrivals": {"kind": "poisson", "rate": "1/s"}, "limits": {}}


def imported(run, folder):
    """The run again, from both of its files."""
    for format in ("aiperf", "aiperf-records"):
        export(run, format, folder)
    ((_, back),) = imported_runs([folder / "profile_export.jsonl"], (), "")
    return back


def test_three_requests_by_hand():
    run = with_manifest(three_requests(), scenario={"resolved": POISSON})
    found = aiperf_summary(run)
    ttft = found["time_to_first_token"]
    assert (ttft["unit"], ttft["count"]) == ("ms", 2)
    assert [ttft[k] for k in ("avg", "min", "p50", "p99", "max", "std", "sum")] == pytest.approx(
        [400, 400, 400, 400, 400, 0, 800]
    )  # 0.5 − 0.1 and 1.5 − 1.1: the role chunk is no token
    assert found["request_latency"]["avg"] == pytest.approx(550)
    assert found["request_latency"]["p90"] == pytest.approx(670)  # 400 + 0.9 · 300
    assert found["inter_token_latency"]["avg"] == pytest.approx(150)  # 0.3 s / (3 − 1)
    assert found["inter_token_latency"]["count"] == 1
    assert found["inter_chunk_latency"]["sum"] == pytest.approx(300)
    assert found["time_to_second_token"]["avg"] == pytest.approx(100)
    assert found["output_token_throughput_per_user"]["avg"] == pytest.approx(1 / 0.15)
    assert found["benchmark_duration"] == {"unit": "sec", "avg": pytest.approx(1.4)}  # 0.1 to 1.5
    assert found["request_count"]["avg"] == 2
    assert found["error_request_count"]["avg"] == 1
    assert found["request_throughput"]["avg"] == pytest.approx(2 / 1.5)  # 0.1 to 1.6
    assert found["output_token_throughput"]["avg"] == pytest.approx(4 / 1.5)
    assert found["start_time"] == "2026-01-05T10:00:00.100000+00:00"
    assert found["end_time"] == "2026-01-05T10:00:01.600000+00:00"
    assert found["input_config"]["phases"] == [
        {"name": "profiling", "kind": "profiling", "requests": 220, "type": "poisson", "rate": 1.0}
    ]
    json.dumps(found, allow_nan=False)


def test_a_record_has_the_times_of_the_clock_and_a_failure_its_status():
    first, _, failed = aiperf_records(three_requests())
    started_ns = 1_767_607_200_000_000_000
    assert first["metadata"] == {
        "session_num": 0,
        "credit_issued_ns": started_ns,
        "request_start_ns": started_ns + 100_000_000,
        "request_end_ns": started_ns + 900_000_000,
        "worker_id": "slobench",
        "record_processor_id": "slobench",
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    }
    assert first["metrics"]["inter_chunk_latency"] == {
        "value": pytest.approx([100, 200]),
        "unit": "ms",
    }
    assert first["metrics"]["usage_prompt_tokens"]["value"] == 50
    assert failed["metrics"] == {}
    assert failed["error"]["message"] == "HTTP 503: overloaded"


def test_an_exported_run_comes_back_with_the_same_numbers(tmp_path):
    run = with_manifest(measured_run(n_failed=3), scenario={"resolved": POISSON})
    run.request_rows["sent_s"][30] += 0.01  # waited in the client
    back = imported(run, tmp_path)
    assert np.count_nonzero(back.request_rows["status"] == Status.ok) == 197
    before, after = aiperf_summary(run), aiperf_summary(back)
    metrics = [key for key, value in before.items() if isinstance(value, dict) and "avg" in value]
    assert len(metrics) == 21
    for key in metrics:
        assert after[key] == {"unit": before[key]["unit"]} | {
            name: pytest.approx(value, rel=1e-6, abs=1e-6)  # times are in ns
            for name, value in before[key].items()
            if name != "unit"
        }, key
    for ours, theirs in zip(rescore(run, ("aiperf",)), rescore(back, ("aiperf",)), strict=True):
        assert ours.n == theirs.n
        assert list(theirs.percentiles.values()) == pytest.approx(
            list(ours.percentiles.values()), rel=1e-6
        ), ours.metric
    queue_s = back.request_rows["sent_s"] - back.request_rows["released_s"]
    assert queue_s.max() == pytest.approx(0.0102)
    assert back.manifest.imported.version == "slobench 0.1.0"


def test_a_closed_loop_comes_back_with_its_users(tmp_path):
    users = {"arrivals": {"kind": "users", "users": 12}, "limits": {}}
    back = imported(with_manifest(measured_run(), scenario={"resolved": users}), tmp_path)
    assert back.manifest.scenario.arrivals == {"kind": "users", "users": 12}


def test_arrivals_that_the_tool_lacks_are_left_out_and_named(tmp_path):
    burst = {"arrivals": {"kind": "mmpp"}, "limits": {}}
    back = imported(with_manifest(measured_run(), scenario={"resolved": burst}), tmp_path)
    assert back.manifest.scenario.arrivals == {"kind": "recorded"}


def test_an_unsent_request_is_a_failure_at_its_time():
    run = measured_run(n_failed=1)
    run.request_rows["status"][-1] = Status.dropped
    for name in ("sent_s", "done_s"):
        run.request_rows[name][-1] = np.nan
    record = aiperf_records(run)[-1]
    assert record["error"]["message"]
    assert record["metadata"]["request_start_ns"] == record["metadata"]["credit_issued_ns"]
    assert record["metadata"]["request_end_ns"] == record["metadata"]["credit_issued_ns"]


def test_a_run_without_a_successful_request_has_rates_of_zero():
    run = measured_run(n_requests=30)
    run.request_rows["status"] = Status.connect_error
    found = aiperf_summary(run)
    assert found["request_throughput"]["avg"] == 0
    assert "time_to_first_token" not in found


@pytest.mark.parametrize("format", ["aiperf", "aiperf-records"])
def test_a_file_of_one_run_refuses_two(format):
    with pytest.raises(UsageError, match=f"^{format} holds a single run: export 2 runs one by one"):
        export([measured_run(), measured_run(seed=8)], format)
    assert FORMATS[format].file_name.startswith("profile_export")
