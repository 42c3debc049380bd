"""Results of `vllm bench serve` as runs of slobench."""

import json

import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.exports.vllm_bench import vllm_bench
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import json_values
from loadgen.foreign.vllm import read_vllm
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.measure.definitions import rescore
from loadgen.records import Status
from tests.foreign.results import REFUSED, vllm, vllm_rs
from tests.runs import measured_run, with_manifest

ORIGIN = Origin("out.json", "ab" * 32, ("slobench", "import", "out.json"), "0.1.0")


def runs_of(text, slo=()):
    found = read_vllm(json_values(text, "out.json"), "out.json")
    return [build(result, "out", ORIGIN, slo) for result in found]


def run_of(slo=(), **changes):
    (run,) = runs_of(json.dumps(vllm(**changes)), slo)
    return run


def refusal(**changes):
    with pytest.raises(UsageError) as refused:
        run_of(**changes)
    return str(refused.value)


def test_the_numbers_that_vllm_prints_are_those_of_its_definition():
    rows = {row.metric: row for row in rescore(run_of(), ("vllm",))}
    shown = {
        metric: (row.n, *(f"{1e3 * v:.2f}" for v in (row.mean, *row.percentiles.values())))
        for metric, row in rows.items()
    }  # numpy's linear percentiles of the lists in the file, in ms
    assert shown == {
        "ttft": (4, "275.00", "250.00", "440.00", "494.00"),
        "tpot": (4, "26.25", "20.00", "41.00", "49.10"),
        "itl": (8, "30.00", "25.00", "50.00", "50.00"),
        "e2e": (4, "335.00", "300.00", "528.00", "592.80"),
    }


def test_a_request_is_due_when_the_client_released_it_and_sent_after_its_queue():
    run = run_of()
    assert run.schedule_rows["scheduled_s"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert run.request_rows["sent_s"].tolist() == [0.0, 1.0, 2.0, 3.5]
    ttft = summarize(run).metrics["ttft_s"]
    assert ttft.max == pytest.approx(1.0)  # 0.5 s in the queue and 0.5 s after the send
    assert summarize(run).metrics["ttft_from_send_s"].max == pytest.approx(0.5)


def test_the_load_is_that_of_the_file():
    assert run_of().manifest.scenario.arrivals == {"kind": "poisson", "rate": "1/s"}
    gamma = run_of(burstiness=0.25, max_concurrency=2).manifest.scenario
    assert gamma.arrivals == {"kind": "gamma", "rate": "1/s", "cv": 2.0}
    assert gamma.limits.max_concurrency == 2
    assert gamma.limits.when_full == "wait"
    loop = run_of(request_rate="inf", max_concurrency=2).manifest
    assert loop.scenario.arrivals == {"kind": "users", "users": 2}
    assert loop.has_closed_loop


def test_a_closed_loop_counts_from_the_send_and_has_as_many_users_as_its_concurrency():
    run = run_of(
        request_rate="inf", max_concurrency=2,
        start_times=[10.0, 10.0, 10.14, 10.24], queue_times=[0.0, 0.0, 0.14, 0.24],
    )  # fmt: skip
    assert run.request_rows["released_s"].tolist() == run.request_rows["sent_s"].tolist()
    assert run.schedule_rows["session_id"].tolist() == [0, 1, 0, 1]


def test_send_times_that_an_old_version_does_not_write_are_those_of_the_load():
    old = {"start_times": None, "queue_times": None, "latencies": None}
    run = run_of(**old, request_rate=2)
    assert run.request_rows["sent_s"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert "no send times" in summarize(run).findings[0]
    loop = run_of(**old, request_rate="inf", max_concurrency=2)
    assert loop.request_rows["sent_s"].tolist() == pytest.approx([0.0, 0.0, 0.14, 0.24])


def test_a_failed_request_is_a_miss_with_its_message():
    trace = 'Traceback (most recent call last):\n  File "x"\nConnectionError: reset'
    run = run_of(
        completed=2, ttfts=[0.1, 0.0, 0.3, 0.0], itls=[[0.01, 0.03], [], [0.04, 0.02], []],
        output_lens=[3, 0, 5, 0], errors=["", "Service Unavailable", "", trace],
        latencies=[0.14, 0.0, 0.36, 0.0],
    )  # fmt: skip
    rows = run.request_rows
    assert rows["status"].tolist() == [
        Status.ok, Status.http_error, Status.ok, Status.stream_error,
    ]  # fmt: skip
    assert rows["http_status"].tolist() == [200, 503, 200, 0]
    assert [run.names.errors[k] for k in rows["error_id"]] == [
        "", "Service Unavailable", "", "ConnectionError: reset",
    ]  # fmt: skip
    summary = summarize(run, slo=["attainment >= 90%", "ttft <= 1s"])
    assert (summary.attainment.met, summary.attainment.due) == (2, 4)


def test_a_result_of_the_client_in_rust_is_named_and_its_refusals_have_their_status():
    (run,) = runs_of(json.dumps(vllm_rs()))
    manifest = run.manifest
    assert manifest.imported.tool == "vllm-rs bench serve"
    assert manifest.started_utc == "2026-01-05T10:00:00"
    assert manifest.scenario.arrivals == {"kind": "poisson", "rate": "1/s"}
    assert run.request_rows["sent_s"].tolist() == [0.0, 1.0, 2.0, 3.5]
    assert run.request_rows["status"].tolist() == [Status.ok] * 3 + [Status.http_error]
    assert run.request_rows["http_status"].tolist() == [200, 200, 200, 503]
    assert run.names.errors[run.request_rows["error_id"][3]] == REFUSED
    assert "no scheduled time" in manifest.imported.missing[0]


def test_an_error_of_the_client_in_rust_without_a_status_is_a_broken_stream():
    error = "connection closed before message completed"
    (run,) = runs_of(json.dumps(vllm_rs(errors=["", "", "", error])))
    assert run.request_rows["status"][3] == Status.stream_error
    assert run.names.errors[run.request_rows["error_id"][3]] == error


def test_every_check_that_the_file_does_not_allow_is_not_known():
    checks = {check.name: check.ok for check in summarize(run_of()).validity.checks}
    assert not any(checks.values()), checks
    assert {name for name, ok in checks.items() if ok is False} == set()
    assert {"record", "stimulus", "offered load", "lateness", "instrument error"} <= set(checks)


def test_the_verdict_carries_what_vllm_did_not_record():
    summary = summarize(run_of(slo=("p50(ttft) <= 400ms",)))
    assert summary.verdict == "met"
    assert summary.reason_kinds == ("met", "imported")
    assert summary.reasons[-1] == (
        "The times are those of vllm bench serve; its own delays are not known."
    )
    assert summary.findings[0].startswith("Measured by vllm bench serve, whose file has no sched")


def test_gaps_that_vllm_records_can_have_an_slo():
    summary = summarize(run_of(slo=("p50(itl) <= 30ms", "p50(itl) <= 20ms")))
    assert [result.met for result in summary.slo if result.metric == "itl_s"] == [True, False]


def test_an_exported_run_comes_back_with_the_same_numbers():
    before = vllm_bench(measured_run(n_failed=3))
    (run,) = runs_of(json.dumps(before))
    after = vllm_bench(run)
    assert np.count_nonzero(run.request_rows["status"] == Status.ok) == 197
    numbers = [key for key, value in before.items() if isinstance(value, (int, float))]
    assert len(numbers) == 40
    for key in (*numbers, "latencies"):
        assert after[key] == pytest.approx(before[key], rel=1e-9), key


def test_an_exported_run_with_a_rate_comes_back_with_its_schedule():
    poisson = {"arrivals": {"kind": "poisson", "rate": "10/s"}, "limits": {}}
    run = with_manifest(measured_run(), scenario={"resolved": poisson})
    run.request_rows["sent_s"][30] += 0.01  # waited in the client
    (back,) = runs_of(json.dumps(vllm_bench(run)))
    due_s = run.request_rows["released_s"][due_rows(run)]
    np.testing.assert_allclose(back.schedule_rows["scheduled_s"], due_s - due_s[0], atol=1e-9)
    assert summarize(back).metrics["queue_client_s"].max == pytest.approx(0.0102)


def test_each_result_of_an_appended_file_is_a_run():
    text = json.dumps(vllm()) + "\n" + json.dumps(vllm(ttfts=[0.9, 0.2, 0.3, 0.5]))
    first, second = runs_of(text)
    assert [run.manifest.imported.part for run in (first, second)] == [0, 1]
    assert second.request_rows["first_token_s"][0] == pytest.approx(0.9)


def test_a_damaged_file_is_refused_with_its_place():
    text = json.dumps(vllm(), indent=1)
    with pytest.raises(UsageError, match=r"^out\.json:\d+: damaged JSON .* ends within a JSON"):
        runs_of(text[:-40])
    with pytest.raises(UsageError, match=r"^out\.json:3: damaged JSON at character 1: "):
        runs_of(text.replace('"endpoint_type"', "endpoint_type").replace("\n endp", "\nendp"))
    assert refusal(itls=[[0.01], [0.02, -1.0], [0.04], [0.05]]) == (
        "out.json: itls[1][1]: expected a time of 0 s or more, found -1.0"
    )
    assert refusal(ttfts=["x", 0.2, 0.3, 0.5]) == 'out.json: ttfts[0]: expected float, found "x"'
    assert refusal(errors=[""]) == (
        "out.json: errors: 1 values, but ttfts has 4: the file is damaged"
    )
    assert refusal(completed=3) == (
        "out.json: completed: 3 requests, but 4 have a first token and no error"
    )
    assert refusal(request_rate="fast").startswith("out.json: request_rate: expected a rate")


def test_a_file_without_details_is_refused_with_the_flag():
    summary_only = {key: value for key, value in vllm().items() if not isinstance(value, list)}
    with pytest.raises(UsageError, match=r"no key input_lens: .* only with --save-result --save-d"):
        runs_of(json.dumps(summary_only))
