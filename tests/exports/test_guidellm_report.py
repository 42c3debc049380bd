"""guidellm's report, against literals and against its reader."""

import json

import numpy as np
import pytest

from loadgen.exports.formats import export
from loadgen.exports.guidellm import guidellm_report
from loadgen.foreign.read import imported_runs
from loadgen.measure.definitions import rescore
from loadgen.records import Status
from tests.exports.test_vllm_bench import three_requests
from tests.runs import measured_run, with_manifest

POISSON = {"arrivals": {"kind": "poisson", "rate": "10/s"}, "limits": {}}
USERS = {"arrivals": {"kind": "users", "users": 12}, "limits": {}}


def successful(run, metric):
    (benchmark,) = guidellm_report([run])["benchmarks"]
    return benchmark["metrics"][metric]["successful"]


def imported(folder, *runs):
    export(runs, "guidellm", folder)
    return [back for _, back in imported_runs([folder / "guidellm.json"], (), "")]


def test_three_requests_by_hand():
    run = with_manifest(three_requests(), scenario={"resolved": POISSON})
    (benchmark,) = guidellm_report([run])["benchmarks"]
    totals = {"successful": 2, "errored": 1, "incomplete": 0, "total": 3}
    assert benchmark["metrics"]["request_totals"] == totals
    assert benchmark["scheduler_metrics"]["requests_made"] == totals
    assert benchmark["duration"] == pytest.approx(1.5)  # 0.1 to 1.6
    assert benchmark["config"]["strategy"] == {"type_": "poisson", "rate": 10.0}
    assert successful(run, "requests_per_second") == {"mean": pytest.approx(2 / 1.5), "count": 2}
    assert successful(run, "output_tokens_per_second")["mean"] == pytest.approx(4 / 1.5)
    assert successful(run, "request_latency")["mean"] == pytest.approx((0.8 + 0.5) / 2)
    assert successful(run, "request_latency")["percentiles"]["p50"] == pytest.approx(0.5)
    assert successful(run, "request_scheduled_latency")["max"] == pytest.approx(0.9)
    assert successful(run, "request_dispatch_delay")["mean"] == pytest.approx(0.1)
    tpot = successful(run, "time_per_output_token_ms")  # 700/3 three times, 400 once
    assert tpot["count"] == 4
    assert tpot["mean"] == pytest.approx((700 + 400) / 4)
    assert tpot["mode"] == pytest.approx(700 / 3)
    assert tpot["std_dev"] == pytest.approx((400 - 700 / 3) * (3 / 16) ** 0.5)
    assert [tpot["percentiles"][p] for p in ("p75", "p90")] == pytest.approx([700 / 3, 400])
    itl = successful(run, "inter_token_latency_ms")  # 300/2 twice; one token has none
    assert (itl["count"], itl["min"], itl["max"]) == (2, pytest.approx(150), pytest.approx(150))
    json.dumps(benchmark, allow_nan=False)


def test_a_closed_loop_has_its_streams_and_no_delay_against_a_schedule():
    (benchmark,) = guidellm_report([with_manifest(three_requests(), scenario={"resolved": USERS})])[
        "benchmarks"
    ]
    assert benchmark["config"]["strategy"] == {"type_": "concurrent", "streams": 12}
    assert "request_scheduled_latency" not in benchmark["metrics"]
    assert "request_latency" in benchmark["metrics"]


def test_exported_runs_come_back_with_the_same_numbers(tmp_path):
    poisson = with_manifest(measured_run(n_failed=3), scenario={"resolved": POISSON})
    poisson.request_rows["sent_s"][30] += 0.01  # waited in the client
    loop = with_manifest(measured_run(seed=8), scenario={"resolved": USERS})
    backs = imported(tmp_path, poisson, loop)
    for run, back in zip((poisson, loop), backs, strict=True):
        (before,), (after,) = (guidellm_report([r])["benchmarks"] for r in (run, back))
        assert before["metrics"].keys() == after["metrics"].keys()
        for name, found in before["metrics"].items():
            numbers, again = found.get("successful", found), after["metrics"][name]
            again = again.get("successful", again)
            if not isinstance(numbers, dict):
                assert numbers == again
                continue
            for key in ("mean", "count", "min", "max"):
                if key in numbers:
                    close = pytest.approx(numbers[key], rel=1e-4, abs=1e-6)  # wall-clock floats
                    assert again[key] == close, (name, key)
        for ours, theirs in zip(rescore(run, ("guidellm",)), rescore(back, ("guidellm",)),
                                strict=True):  # fmt: skip
            assert ours.n == theirs.n
            assert list(theirs.percentiles.values()) == pytest.approx(
                list(ours.percentiles.values()), abs=1e-6
            )
    assert backs[0].request_rows["status"].tolist().count(Status.ok) == 197
    queue_s = backs[0].request_rows["sent_s"] - backs[0].request_rows["released_s"]
    assert queue_s.max() == pytest.approx(0.0102, abs=1e-6)
    assert backs[1].manifest.scenario.arrivals == {"kind": "users", "users": 12}


def test_unsent_and_cancelled_requests_are_errored_and_incomplete():
    run = measured_run(n_failed=1)
    run.request_rows["status"][-1] = Status.dropped
    run.request_rows["sent_s"][-1] = run.request_rows["done_s"][-1] = np.nan
    run.request_rows["status"][-2] = Status.cancelled
    run.request_rows["error_id"][-2] = run.request_rows["error_id"][-1]
    (benchmark,) = guidellm_report([run])["benchmarks"]
    totals = {"successful": 198, "errored": 1, "incomplete": 1, "total": 200}
    assert benchmark["metrics"]["request_totals"] == totals
    (unsent,) = benchmark["requests"]["errored"]
    timings = unsent["info"]["timings"]
    assert timings["request_start"] == timings["targeted_start"] == timings["request_end"]


def test_a_run_without_a_successful_request_has_zeros():
    run = measured_run(n_requests=30)
    run.request_rows["status"] = Status.connect_error
    found = successful(run, "time_to_first_token_ms")
    assert (found["count"], found["mean"], found["percentiles"]["p99"]) == (0, 0.0, 0.0)
    assert successful(run, "requests_per_second")["mean"] == 0
