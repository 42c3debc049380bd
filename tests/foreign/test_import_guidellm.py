"""Reports of guidellm as runs of slobench."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import json_values
from loadgen.foreign.guidellm import read_guidellm
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.measure.definitions import rescore
from loadgen.records import Status
from tests.foreign.results import STARTED_NS, guidellm_report, guidellm_request

ORIGIN = Origin("g.json", "ab" * 32, ("slobench", "import", "g.json"), "0.1.0")
FOUR = tuple(map(guidellm_request, range(4)))


def runs_of(report):
    found = read_guidellm(json_values(json.dumps(report), "g.json"), "g.json")
    return [build(result, "g", ORIGIN) for result in found]


def run_of(*requests, **strategy):
    (run,) = runs_of(guidellm_report(*requests, **strategy))
    return run


def test_the_numbers_that_guidellm_prints_are_those_of_its_definition():
    rows = {row.metric: row for row in rescore(run_of(*FOUR), ("guidellm",))}
    shown = {
        metric: (row.n, *(f"{1e3 * v:.2f}" for v in (row.mean, *row.percentiles.values())))
        for metric, row in rows.items()
    }  # nearest rank; TPOT has a sample per token (14), ITL per token after the first (10)
    assert shown == {
        "ttft": (4, "275.00", "200.00", "500.00", "500.00"),
        "tpot": (14, "95.71", "72.00", "200.00", "200.00"),
        "itl": (10, "24.00", "20.00", "50.00", "50.00"),
        "e2e": (4, "345.00", "250.00", "610.00", "610.00"),
    }


def test_latency_counts_from_the_targeted_start():
    metrics = summarize(run_of(*FOUR)).metrics
    assert metrics["ttft_s"].max == pytest.approx(0.502, abs=1e-6)
    assert metrics["ttft_from_send_s"].max == pytest.approx(0.5, abs=1e-6)
    assert "no scheduled time" not in summarize(run_of(*FOUR)).findings[0]


def test_a_targeted_start_that_is_no_time_of_the_clock_is_not_used():
    broken = guidellm_request(0, targeted_start=0.27)
    run = run_of(broken, *FOUR[1:])
    assert run.request_rows["released_s"].tolist() == run.request_rows["sent_s"].tolist()
    assert "its targeted_start is no time of the clock" in summarize(run).findings[0]


def test_the_load_and_the_server_are_those_of_the_report():
    manifest = run_of(*FOUR).manifest
    assert manifest.scenario.arrivals == {"kind": "poisson", "rate": "1/s"}
    assert (manifest.target.model, manifest.target.api) == ("tiny-llama", "chat")
    assert (manifest.imported.version, manifest.imported.duration_s) == ("0.8.1", 3.7)
    loops = {
        ("concurrent", 4): {"streams": 4},
        ("synchronous", 1): {},
        ("throughput", 7): {"max_concurrency": 7},
    }
    for (kind, users), more in loops.items():
        loop = run_of(*FOUR, type_=kind, rate=None, **more).manifest
        assert loop.scenario.arrivals == {"kind": "users", "users": users}
        assert loop.has_closed_loop


def test_gaps_that_guidellm_does_not_record_are_not_known_and_no_slo():
    run = run_of(*FOUR)
    summary = summarize(run)
    assert not len(run.chunk_rows)
    assert summary.metrics["itl_s"].n == 0
    assert summary.metrics["tpot_s"].max == pytest.approx(0.05, abs=1e-6)
    with pytest.raises(UsageError, match="p99\\(itl\\) <= 1s: guidellm does not record gaps"):
        summarize(run, slo=["p99(itl) <= 1s"])


def test_tokens_without_chunks_are_spread_from_the_first_to_the_last():
    run = run_of(*FOUR)
    assert run.manifest.window.measure_s == pytest.approx(4.0, abs=1e-6)
    assert summarize(run).throughput.output_tokens_per_s == pytest.approx(14 / 4.0, abs=1e-5)


def test_errors_and_requests_that_the_end_cut_off_are_rows():
    refused = guidellm_request(1, "errored", first_token_iteration=None, request_end=None)
    refused["info"]["error"] = "HTTPStatusError(\"Server error '503 Busy' for url\\nMore\")"
    cut = guidellm_request(2, "cancelled", last_token_iteration=None, request_end=None)
    unsent = guidellm_request(3, "cancelled", request_start=None)
    run = run_of(FOUR[0], refused, cut, unsent)
    rows = run.request_rows
    assert rows["status"].tolist() == [Status.ok, Status.http_error, Status.cancelled]
    assert rows["http_status"].tolist() == [200, 503, 0]
    assert run.names.errors[1].endswith("for url")
    assert rows["done_s"][1] == pytest.approx(2.002, abs=1e-6)
    counts = summarize(run).counts
    assert (counts["due"], counts["failed"], counts["unfinished"]) == (3, 1, 1)


def test_requests_before_the_measured_time_are_warm_up():
    report = guidellm_report(*FOUR)
    scheduler = report["benchmarks"][0]["scheduler_metrics"]
    scheduler["measure_start_time"] = STARTED_NS / 1e9 + 1.5
    (run,) = runs_of(report)
    assert due_rows(run).tolist() == [False, False, True, True]


def test_each_benchmark_of_a_report_is_a_run():
    report = guidellm_report(*FOUR)
    report["benchmarks"] += guidellm_report(*FOUR, rate=2.0)["benchmarks"]
    first, second = runs_of(report)
    assert (first.manifest.imported.part, second.manifest.imported.part) == (0, 1)
    assert second.manifest.requested_rate_per_s == 2.0


def test_a_sample_and_a_damaged_report_are_refused_with_their_place():
    report = guidellm_report(*FOUR)
    report["benchmarks"][0]["scheduler_metrics"]["requests_made"]["successful"] = 90
    with pytest.raises(
        UsageError, match=r"requests.successful: 4 of 90 requests; the report has a"
    ):
        runs_of(report)
    bad = guidellm_request(0)
    bad["info"]["timings"]["request_start"] = "now"
    with pytest.raises(UsageError, match=r"^g\.json: benchmarks\[0\]: requests.successful\[0\]\."):
        run_of(bad)
    with pytest.raises(UsageError, match=r"^g\.json: benchmarks: expected a list with"):
        runs_of({"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": []})
