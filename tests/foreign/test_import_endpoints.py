"""Event logs of MLPerf Endpoints as runs of slobench."""

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import json_values
from loadgen.foreign.mlperf_endpoints import read_mlperf_endpoints
from loadgen.foreign.read import imported_runs
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.records import Status, TokenSource
from tests.foreign.results import (
    endpoints_event,
    endpoints_request,
    endpoints_session,
    lines,
)

ORIGIN = Origin("events.jsonl", "ab" * 32, ("slobench", "import", "events.jsonl"), "0.1.0")
FOUR = [endpoints_request(k) for k in range(4)]


def run_of(*events, slo=()):
    (found,) = read_mlperf_endpoints(json_values(lines(*events), "events.jsonl"), "events.jsonl")
    return build(found, "events", ORIGIN, slo)


def refusal(*events):
    with pytest.raises(UsageError) as refused:
        run_of(*events)
    return str(refused.value)


def test_latencies_count_from_the_issue_of_a_request():
    metrics = summarize(run_of(*endpoints_session(*FOUR))).metrics
    assert metrics["ttft_s"].mean == pytest.approx(0.275)
    assert metrics["e2e_s"].max == pytest.approx(0.6)  # the last chunk, not the completion
    assert metrics["itl_s"].n == 8
    assert metrics["itl_s"].mean == pytest.approx(0.03)
    assert metrics["tpot_s"].mean == pytest.approx(0.03)  # a chunk counts as a token


def test_the_file_states_prompts_of_token_ids_and_no_load():
    run = run_of(*endpoints_session(*FOUR))
    assert run.request_rows["input_tokens"].tolist() == [64] * 4
    assert run.request_rows["output_tokens"].tolist() == [3] * 4
    assert set(run.request_rows["token_source"]) == {TokenSource.chunks}
    assert run.manifest.scenario.arrivals == {"kind": "recorded"}
    assert "no load: the file does not state the arrivals" in run.manifest.imported.missing


def test_without_all_chunks_an_slo_on_gaps_is_refused():
    events = endpoints_session(*(endpoints_request(k, has_all_chunks=False) for k in range(4)))
    run = run_of(*events)
    assert summarize(run).metrics["e2e_s"].max == pytest.approx(0.601)  # the completion
    assert run.request_rows["output_tokens"].tolist() == [3] * 4
    with pytest.raises(UsageError, match="does not record gaps"):
        summarize(run, slo=["p50(itl) <= 1s"])


def test_an_answer_that_came_as_a_whole_has_no_first_token():
    answer = endpoints_event("sample.complete", 1, "r0", ["TextModelOutput", "all of it"])
    run = run_of(endpoints_event("sample.issued", 0, "r0"), answer)
    assert not run.manifest.target.stream
    assert summarize(run).metrics["e2e_s"].max == pytest.approx(1)


def test_requests_outside_the_tracked_time_are_warm_up():
    first, *others = endpoints_session(*FOUR[1:])
    run = run_of(first, *FOUR[0], *others)
    assert np.count_nonzero(due_rows(run)) == 3
    assert np.count_nonzero(due_rows(run_of(*FOUR[0], *FOUR[1]))) == 2  # none is tracked: all count


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["ErrorData", "ClientError", "reset by peer"], "ClientError: reset by peer"),
        (["ErrorData", "ClientError"], "ClientError"),
        (None, "failed without a message"),
    ],
)
def test_a_failed_request_is_a_miss_with_its_message(data, message):
    failed = [
        endpoints_event("sample.issued", 4, "bad"),
        endpoints_event("sample.complete", 4.5, "bad", data),
    ]
    run = run_of(*endpoints_session(*FOUR, failed))
    assert run.request_rows["status"].tolist() == [Status.ok] * 4 + [Status.stream_error]
    assert run.names.errors[run.request_rows["error_id"][-1]] == message
    assert summarize(run, slo=["ttft <= 1s"]).attainment.met == 4


def test_an_error_event_of_a_request_names_its_failure():
    failed = [
        endpoints_event("sample.issued", 4, "bad"),
        endpoints_event("error.generic", 4.4, "bad", ["ErrorData", "Timeout", "120 s"]),
        endpoints_event("sample.complete", 4.5, "bad"),
    ]
    run = run_of(*endpoints_session(*FOUR, failed))
    assert run.names.errors[run.request_rows["error_id"][-1]] == "Timeout: 120 s"


def test_a_request_without_an_end_is_unfinished():
    run = run_of(*endpoints_session(*FOUR, [endpoints_event("sample.issued", 4, "open")]))
    assert run.request_rows["status"][-1] == Status.cancelled
    assert run.request_rows["done_s"][-1] == pytest.approx(11)


def test_events_that_cannot_be_are_refused_with_their_line():
    assert refusal(endpoints_event("sample.complete", 0, "r9")) == (
        "events.jsonl:1: sample.complete: request r9 was not issued"
    )
    early = endpoints_event("sample.recv_first", -1, "r0")
    assert refusal(endpoints_event("sample.issued", 0, "r0"), early) == (
        "events.jsonl:2: timestamp_ns: before request r0 was issued"
    )
    assert refusal(endpoints_event("session.started", 0)) == (
        "events.jsonl: sample.issued: no request in the file"
    )
    negative = {**endpoints_event("session.started", 0), "timestamp_ns": -1}
    assert refusal(negative) == "events.jsonl:1: timestamp_ns: expected a time in ns, found -1"


def test_a_file_is_recognized_by_its_first_line(tmp_path):
    (tmp_path / "events.jsonl").write_text(lines(*endpoints_session(*FOUR)))
    ((name, run),) = imported_runs([tmp_path], (), "")
    assert (name, run.manifest.imported.tool) == ("events", "MLPerf Endpoints")
