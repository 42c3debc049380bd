"""Records of `aiperf profile` as runs of slobench."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.foreign.aiperf import read_aiperf
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import JsonValue, json_values
from loadgen.foreign.read import imported_runs
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.measure.definitions import rescore
from loadgen.records import Status, TokenSource
from tests.foreign.results import aiperf_record, aiperf_summary, failed_aiperf_record, lines

ORIGIN = Origin("e.jsonl", "ab" * 32, ("slobench", "import", "e.jsonl"), "0.1.0")
FOUR = tuple(map(aiperf_record, range(4)))


def run_of(*records, summary=None):
    beside = None if summary is None else JsonValue(summary, 1)
    values = json_values(lines(*records), "e.jsonl")
    (found,) = read_aiperf(values, "e.jsonl", beside, "e_aiperf.json")
    return build(found, "e", ORIGIN)


def test_the_numbers_that_aiperf_prints_are_those_of_its_definition():
    rows = {row.metric: row for row in rescore(run_of(*FOUR), ("aiperf",))}
    shown = {
        metric: (row.n, *(f"{1e3 * v:.2f}" for v in (row.mean, *row.percentiles.values())))
        for metric, row in rows.items()
    }  # numpy's linear percentiles of the records, in ms
    assert shown == {
        "ttft": (4, "275.00", "250.00", "440.00", "494.00"),
        "tpot": (4, "30.00", "25.00", "44.00", "49.40"),
        "itl": (4, "30.00", "25.00", "44.00", "49.40"),
        "e2e": (4, "335.00", "300.00", "528.00", "592.80"),
    }


def test_latency_counts_from_the_credit_and_the_send_stands_beside_it():
    run = run_of(*FOUR, summary=aiperf_summary())
    assert run.schedule_rows["scheduled_s"].tolist() == pytest.approx([0.0, 1.0, 2.0, 3.0])
    metrics = summarize(run).metrics
    assert metrics["ttft_s"].max == pytest.approx(0.502)
    assert metrics["ttft_from_send_s"].max == pytest.approx(0.5)


def test_the_load_and_the_server_are_those_of_the_summary():
    manifest = run_of(*FOUR, summary=aiperf_summary(concurrency=2)).manifest
    assert manifest.scenario.arrivals == {"kind": "poisson", "rate": "1/s"}
    assert manifest.scenario.limits.max_concurrency == 2
    assert manifest.requested_rate_per_s == 1.0
    assert (manifest.target.url, manifest.target.model) == ("http://127.0.0.1:8000", "tiny-llama")
    assert (manifest.imported.version, manifest.imported.duration_s) == ("0.13.0", 3.7)
    gamma = aiperf_summary(type="gamma", smoothness=4.0)
    assert run_of(*FOUR, summary=gamma).manifest.scenario.arrivals["cv"] == 0.5
    loop = run_of(*FOUR, summary=aiperf_summary(type="concurrency", rate=None, concurrency=2))
    assert loop.manifest.scenario.arrivals == {"kind": "users", "users": 2}
    assert loop.request_rows["released_s"].tolist() == loop.request_rows["sent_s"].tolist()


def test_a_missing_summary_is_named():
    assert "no load: the summary" in summarize(run_of(*FOUR)).findings[0]
    assert "no load" not in summarize(run_of(*FOUR, summary=aiperf_summary())).findings[0]


def test_token_counts_name_their_source():
    counted = run_of(*FOUR).request_rows
    assert counted["token_source"].tolist() == 4 * [TokenSource.usage]
    assert counted["input_tokens"].tolist() == 4 * [64]
    assert run_of(*FOUR).schedule_rows["output_tokens"].tolist() == 4 * [4]
    own = run_of(aiperf_record(0, usage_completion_tokens=(7, "tokens"))).request_rows
    assert own["token_source"][0] == TokenSource.tokenizer


def test_the_tokens_of_a_first_chunk_of_several_follow_from_the_itl_of_aiperf():
    several = aiperf_record(
        0, output_sequence_length=(5, "tokens"), inter_token_latency=(20.0, "ms")
    )  # 40 ms for 2 tokens after a first chunk of 3
    assert run_of(several).request_rows["first_chunk_tokens"][0] == 3


def test_two_chunks_of_one_read_are_one_arrival():
    record = aiperf_record(0, inter_chunk_latency=([20.0, 0.0, 20.0], "ms"))
    chunks = run_of(record).chunk_rows["received_s"]
    assert np.diff(chunks).tolist() == pytest.approx([0.02, 0.0, 0.02], abs=1e-12)
    assert chunks[1] == chunks[2]


def test_failures_are_misses_with_their_reason():
    run = run_of(
        failed_aiperf_record(0, code=503, type="Service Unavailable"),
        failed_aiperf_record(1, type="TimeoutError"),
        failed_aiperf_record(2, code=499, type="RequestCancellationError"),
        aiperf_record(3),
    )
    rows = run.request_rows
    assert rows["status"].tolist() == [
        Status.http_error, Status.timeout, Status.stream_error, Status.ok,
    ]  # fmt: skip
    assert rows["http_status"].tolist() == [503, 0, 0, 200]
    assert run.names.errors[rows["error_id"][0]] == "Service Unavailable: overloaded"
    assert summarize(run, slo=["ttft <= 1s"]).attainment.met == 1


def test_warm_up_is_not_due():
    warmup = aiperf_record(0)
    warmup["metadata"]["benchmark_phase"] = "warmup"
    run = run_of(warmup, *FOUR[1:])
    assert due_rows(run).tolist() == [False, True, True, True]
    assert run.manifest.window.warmup_s == pytest.approx(1.0)


def test_an_answer_that_was_not_streamed_has_an_e2e_and_no_ttft():
    whole = aiperf_record(0), aiperf_record(1)
    for record in whole:
        for name in ("time_to_first_token", "time_to_first_output_token", "inter_chunk_latency"):
            del record["metrics"][name]
    run = run_of(*whole)
    assert not run.manifest.target.stream
    metrics = summarize(run).metrics
    assert metrics["e2e_s"].max == pytest.approx(0.242)
    assert summarize(run).throughput.output_tokens_per_s == pytest.approx(3.0)  # 6 in 2 s
    assert metrics["ttft_s"].n == 0


def test_a_damaged_line_is_refused_with_its_number():
    with pytest.raises(UsageError, match=r"^e\.jsonl:4: damaged JSON at character \d+: the file"):
        json_values(lines(*FOUR)[:-20], "e.jsonl")
    bad = aiperf_record(1, time_to_first_token=("soon", "ms"))
    with pytest.raises(UsageError, match=r"^e\.jsonl:2: metrics.time_to_first_token.value: expec"):
        run_of(FOUR[0], bad)
    minutes = aiperf_record(1, request_latency=(3.0, "min"))
    with pytest.raises(UsageError, match=r"e\.jsonl:2: metrics.request_latency: unit: expected"):
        run_of(FOUR[0], minutes)
    negative = aiperf_record(1, request_latency=(-3.0, "ms"))
    with pytest.raises(UsageError, match=r"e\.jsonl:2: metrics.request_latency: value: expected"):
        run_of(FOUR[0], negative)


def test_the_summary_next_to_the_records_is_read(tmp_path):
    (tmp_path / "profile_export.jsonl").write_text(lines(*FOUR))
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(aiperf_summary()))
    (tmp_path / "inputs.json").write_text("{}")
    skipped: list[Path] = []
    ((name, run),) = imported_runs([tmp_path], ["slobench"], "0.1.0", (), skipped.append)
    assert name == "profile_export"
    assert run.manifest.versions == {"aiperf": "0.13.0"}
    assert skipped == [tmp_path / "inputs.json"]


def test_rates_cover_the_time_between_the_start_and_the_end_of_the_summary():
    summary = {**aiperf_summary(), "end_time": "2026-01-05T10:00:05.750000"}
    assert run_of(*FOUR, summary=summary).manifest.imported.duration_s == 5.25
    assert run_of(*FOUR, summary=aiperf_summary()).manifest.imported.duration_s == 3.7


def test_an_end_that_is_no_time_or_before_the_start_is_refused():
    for end, message in (
        ("noon", "end_time: expected an ISO 8601 time, found 'noon'"),
        ("2026-01-05T09:00:00", "end_time, less start_time: expected a time of 0 s or more"),
    ):
        with pytest.raises(UsageError, match=f"^e_aiperf.json: {message}"):
            run_of(*FOUR, summary={**aiperf_summary(), "end_time": end})
