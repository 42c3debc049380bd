"""Requests of inference-perf as runs of slobench."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import json_values
from loadgen.foreign.inference_perf import read_inference_perf
from loadgen.foreign.read import imported_runs
from loadgen.measure.aggregate import summarize
from loadgen.measure.definitions import rescore
from loadgen.records import Status, TokenSource
from tests.foreign.results import inference_perf_request

ORIGIN = Origin("p.json", "ab" * 32, ("slobench", "import", "p.json"), "0.1.0")
FOUR = [inference_perf_request(k) for k in range(4)]


def run_of(*requests):
    (found,) = read_inference_perf(json_values(json.dumps(requests), "p.json"), "p.json")
    return build(found, "p", ORIGIN)


def refusal(*requests):
    with pytest.raises(UsageError) as refused:
        run_of(*requests)
    return str(refused.value)


def test_the_numbers_that_inference_perf_prints_are_those_of_its_definition():
    rows = {row.metric: row for row in rescore(run_of(*FOUR), ("inference-perf",))}
    shown = {
        metric: (row.n, *(f"{1e3 * v:.2f}" for v in (row.mean, *row.percentiles.values())))
        for metric, row in rows.items()
    }  # numpy's linear percentiles of the times in the file, in ms; E2E ends with the stream
    assert shown == {
        "ttft": (4, "275.00", "250.00", "440.00", "494.00"),
        "tpot": (4, "30.00", "25.00", "44.00", "49.40"),
        "itl": (8, "30.00", "25.00", "50.00", "50.00"),
        "e2e": (4, "345.00", "310.00", "538.00", "602.80"),
    }


def test_the_servers_count_comes_before_that_of_the_tokenizer():
    without = inference_perf_request(1)
    without["info"]["response_metrics"]["server_usage"] = None
    anthropic = inference_perf_request(2)
    anthropic["info"]["response_metrics"]["server_usage"] = {"input_tokens": 64, "output_tokens": 9}
    rows = run_of(FOUR[0], without, anthropic).request_rows
    assert rows["output_tokens"].tolist() == [3, 4, 9]
    assert rows["token_source"].tolist() == [
        TokenSource.usage, TokenSource.tokenizer, TokenSource.usage,
    ]  # fmt: skip
    assert rows["cached_tokens"].tolist() == [16, 0, 0]


def test_an_answer_without_a_stream_has_no_first_token():
    whole = inference_perf_request(0)
    del whole["info"]["response_metrics"]["chunk_times"]
    run = run_of(whole)
    assert not run.manifest.target.stream
    assert summarize(run).metrics["e2e_s"].max == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("error", "status", "http_status"),
    [
        ({"error_type": "HTTP Error 503", "error_msg": "overloaded"}, Status.http_error, 503),
        ({"error_type": "TimeoutError", "error_msg": "Request timed out"}, Status.timeout, 0),
        ({"error_type": "ClientOSError", "error_msg": "reset"}, Status.stream_error, 0),
    ],
)
def test_a_failed_request_has_its_status_and_message(error, status, http_status):
    rows = run_of(FOUR[0], inference_perf_request(1, error=error))
    assert rows.request_rows["status"][1] == status
    assert rows.request_rows["http_status"][1] == http_status
    message = rows.names.errors[rows.request_rows["error_id"][1]]
    assert message == f"{error['error_type']}: {error['error_msg']}"


def test_a_damaged_file_is_refused_with_the_entry():
    assert refusal(FOUR[0], inference_perf_request(1, end_time=1.0)).startswith(
        "p.json: [1]: end_time, less start_time: expected a time of 0 s or more"
    )
    assert refusal(inference_perf_request(0, start_time="x")) == (
        'p.json: [0]: start_time: expected float, found "x"'
    )
    assert "no key info" in refusal(inference_perf_request(0, info=None))


def test_the_file_is_recognized_and_the_reports_beside_it_are_skipped(tmp_path):
    (tmp_path / "per_request_lifecycle_metrics.json").write_text(json.dumps(FOUR))
    (tmp_path / "summary_lifecycle_metrics.json").write_text('{"load_summary": {"count": 4}}')
    skipped = []
    ((name, run),) = imported_runs([tmp_path], (), "", (), skipped.append)
    assert (name, run.manifest.imported.tool) == ("per_request_lifecycle_metrics", "inference-perf")
    assert [path.name for path in skipped] == ["summary_lifecycle_metrics.json"]
