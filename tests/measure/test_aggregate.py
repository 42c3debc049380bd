"""The summary: who counts, what percentiles hold, and when there is a verdict and which."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.manifest.sections import WorkerSection
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.records import EDGES, Phase, Run, Status, TokenSource
from tests.runs import measured_run, runs, schedule_rows, two_classes, with_manifest, with_shard

LOST_WORKER = WorkerSection(0, "w0", "bench-2", 220, "lost", "silent for 5 s", None, None)


def test_a_run_that_keeps_every_promise_is_met_and_exits_0() -> None:
    summary = summarize(measured_run(slo=["ttft <= 500ms", "p99(ttft) <= 500ms"]))
    assert (summary.verdict, summary.exit_code) == ("met", 0)
    assert summary.attainment.value == 1.0
    assert summary.goodput.requests_per_s.value == pytest.approx(10.0)


def test_a_broken_promise_is_missed_and_exits_1() -> None:
    summary = summarize(measured_run(slo=["p50(ttft) <= 50ms"]))
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert summary.reasons == (
        "p50(ttft) <= 50ms: missed at 97.7 ms, n = 200; at least 96 ms with 95 % confidence.",
    ), summary.reasons


def test_failures_are_infinite_in_percentile_promises_and_left_out_of_the_plain_ones() -> None:
    """5 of 200 due fail: the 99th percentile of all of them is a failure, of the others not."""
    summary = summarize(measured_run(n_failed=5, slo=["p99(ttft) <= 10s"]))
    ttft = summary.metrics["ttft_s"]
    assert (ttft.n, summary.counts["http_error"]) == (195, 5)
    assert ttft.percentiles["p99"].value < 0.2
    assert ttft.with_failures["p99"].value == math.inf
    assert ttft.with_failures["p90"].value < 0.2
    assert (summary.slo[0].met, summary.slo[0].proven) == (False, False)
    assert summary.to_json()["metrics"]["ttft_s"]["with_failures"]["p99"]["value"] is None


def test_dropped_unsent_and_failed_requests_are_misses() -> None:
    run = measured_run(slo=["ttft <= 500ms"])
    for position, status in ((100, Status.dropped), (101, Status.lost), (102, Status.timeout)):
        run.request_rows["status"][position] = status
    summary = summarize(run)
    assert (summary.attainment.met, summary.attainment.due) == (197, 200)
    assert summary.counts["dropped"] == summary.counts["lost"] == summary.counts["timeout"] == 1
    (dropped,) = [text for text in summary.findings if "dropped" in text]
    assert dropped.startswith("1 of 200 requests were dropped, because the most allowed were in")


def test_every_scheduled_row_is_counted_once() -> None:
    counts = summarize(measured_run(n_failed=4)).counts
    assert counts["scheduled"] == counts["warmup"] + counts["due"] + counts["not_due"] == 220
    assert counts["due"] == sum(counts[status.name] for status in Status)


def test_without_a_per_request_limit_there_is_no_attainment() -> None:
    summary = summarize(measured_run(slo=["p99(ttft) <= 50ms"]))
    share = summary.to_json()["attainment"]
    assert (share["value"], share["low"], share["high"], share["met"]) == (None, None, None, None)
    assert (share["due"], share["reason"]) == (200, "no per-request limit")
    assert summary.verdict == "missed"
    assert summary.goodput.requests_per_s.value == pytest.approx(10.0)  # successful requests


def five_failures(slo: list[str]) -> Run:
    """Failures far from each other: they count as independent."""
    run = measured_run(slo=slo)
    run.request_rows["status"][[30, 70, 110, 150, 190]] = Status.http_error
    return run


def test_the_summary_holds_the_bound_that_each_slo_is_judged_by() -> None:
    """194 of 200: the one-sided Clopper-Pearson bounds are 94.17 % and 98.69 % (R: binom.test)."""
    slo = ["ttft <= 150ms", "p99(ttft) <= 300ms", "output_tokens_per_s >= 1/s"]
    content = summarize(five_failures([*slo, "attainment >= 95%"])).to_json()
    each, percentile, throughput, share = content["slo"]
    assert (content["attainment"]["met"], content["attainment"]["due"]) == (194, 200)
    for bound in (each["bound"], share["bound"], content["attainment"]["bound"]):
        assert bound == {"side": "at_least", "value": pytest.approx(0.9417, abs=5e-5)}
    assert percentile["bound"] == {
        "side": "at_most" if percentile["met"] else "at_least",
        "value": percentile["high" if percentile["met"] else "low"],
    }
    assert throughput["bound"] is None
    missed = summarize(five_failures(["ttft <= 150ms"])).to_json()
    assert missed["slo"][1]["text"] == "attainment >= 99%"
    for bound in (missed["slo"][1]["bound"], missed["attainment"]["bound"]):
        assert bound == {"side": "at_most", "value": pytest.approx(0.9869, abs=5e-5)}
    rag = summarize(two_classes(rag=["ttft <= 500ms"])).to_json()["classes"]["rag"]
    assert rag["slo"][0]["bound"] == {"side": "at_least", "value": 0.0}


def test_the_summary_states_the_parts_of_each_slo() -> None:
    run = two_classes(chat=["p99.9(itl) <= 20ms"], slo=["ttft <= 150ms", "mean(tpot) <= 15ms"])
    summary = summarize(run).to_json()
    parts = ("text", "scope", "metric", "operator", "limit", "aggregate", "quantile")
    slos = [*summary["slo"], *summary["classes"]["chat"]["slo"]]
    assert [tuple(slo[part] for part in parts) for slo in slos] == [
        ("ttft <= 150ms", "request", "ttft_s", "<=", 0.15, None, None),
        ("mean(tpot) <= 15ms", "run", "tpot_s", "<=", 0.015, "mean", None),
        ("attainment >= 99%", "run", "attainment", ">=", 0.99, None, None),
        ("p99.9(itl) <= 20ms", "run", "itl_s", "<=", 0.02, "p99.9", 0.999),
    ]


def test_an_attainment_that_no_slo_is_about_has_its_lower_bound() -> None:
    share = summarize(five_failures(["ttft <= 150ms", "goodput >= 9.9/s"])).attainment
    assert share.bound is not None
    assert share.bound.side == "at_least"
    assert share.bound.value == pytest.approx(0.9417, abs=5e-5)


def test_the_rates_requested_offered_and_achieved_are_three_numbers() -> None:
    """The draw has 200 of 210 requested requests in 20 s; 10 of them were never sent."""
    run = with_manifest(measured_run(), requested_rate_per_s=10.5)
    run.request_rows["sent_s"][-10:] = np.nan
    content = summarize(run).to_json()
    rates = [content[f"{word}_rate_per_s"] for word in ("requested", "offered", "achieved")]
    assert rates == [10.5, 10.0, 9.5]
    assert content["rate_note"] == ""


def test_a_run_of_an_earlier_version_has_no_requested_rate() -> None:
    summary = summarize(measured_run())
    assert (summary.requested_rate_per_s, summary.offered_rate_per_s) == (None, 10.0)
    assert summary.rate_note == "requested: no mean rate was recorded"


def test_a_limit_of_a_class_gives_it_and_the_whole_run_an_attainment() -> None:
    summary = summarize(two_classes(chat=["ttft <= 500ms"], rag=["p50(ttft) <= 2s"]))
    chat, rag = summary.classes["chat"].attainment, summary.classes["rag"].attainment
    assert (chat.value, chat.reason) == (1.0, "")
    assert (rag.met, rag.due, rag.reason) == (None, 50, "no per-request limit")
    assert (summary.attainment.met, summary.attainment.reason) == (200, "")


def test_a_run_without_due_requests_has_no_attainment_for_that_reason() -> None:
    share = summarize(measured_run(0, slo=["ttft <= 1s"])).attainment
    assert (share.due, share.reason) == (0, "no request was due")


def test_a_turn_whose_parent_failed_is_not_due() -> None:
    run = measured_run(slo=["ttft <= 500ms"])
    run.schedule_rows["n_parents"][219], run.schedule_rows["scheduled_s"][219] = 1, np.nan
    run.request_rows["status"][219], run.request_rows["released_s"][219] = (
        Status.not_released,
        np.nan,
    )
    run.request_rows["status"][218] = Status.stream_error
    summary = summarize(replace(run, edge_rows=np.array([(219, 218, 0.0)], EDGES)))
    assert (summary.attainment.due, summary.counts["not_due"]) == (199, 1)
    assert summary.attainment.met == 198


def test_an_interrupted_run_has_no_verdict_and_its_window_ends_where_releasing_stopped() -> None:
    run = measured_run(slo=["p99(ttft) <= 500ms"])
    late = run.schedule_rows["scheduled_s"] >= 12.0
    run.request_rows["status"][late] = Status.not_released
    run.request_rows["released_s"][late] = np.nan
    window = {"ended_s": 12.0}
    summary = summarize(with_manifest(run, ended="interrupted", end_reason="Ctrl-C", window=window))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reasons == ("The run was interrupted: Ctrl-C.",)
    assert summary.reason_kinds == ("ended_early",)
    assert (summary.window.length_s, summary.attainment.due) == (10.0, 100)
    assert any(
        "window is 10 s long, not 20 s as planned" in finding for finding in summary.findings
    )


def test_lost_rows_allow_no_verdict() -> None:
    run = measured_run(slo=["p50(ttft) <= 500ms"])
    run.request_rows["status"][50] = Status.lost
    summary = summarize(run)
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reason_kinds == ("invalid",)
    assert "The load generator lost 1 of 220 requests" in summary.reasons[0]


def test_rows_lost_with_a_dead_worker_are_told_with_its_end_and_its_log() -> None:
    """The parent notes how the worker ended; the run itself counts as completed."""
    run = measured_run(slo=["p50(ttft) <= 500ms"])
    run.request_rows["status"][50:60] = Status.lost
    why = "worker 3 died (ended by SIGKILL; nothing in its log)"
    ended = {"ended": "completed", "end_reason": why}
    summary = summarize(with_manifest(run, **ended, dead_workers=[3]))
    assert summary.reasons == (
        "The load generator lost 10 of 220 requests: worker 3 died (ended by SIGKILL; nothing in "
        "its log); see logs/shard-3.log.",
    )
    assert summary.validity.checks[0].detail.endswith("see logs/shard-3.log")
    both = summarize(with_manifest(run, **ended, dead_workers=[3, 0]))
    assert both.reasons[0].endswith("see logs/shard-3.log, logs/shard-0.log.")


def test_rows_lost_without_a_told_cause_point_to_the_logs() -> None:
    run = measured_run()
    run.request_rows["status"][50] = Status.lost
    assert summarize(run).reasons[0] == (
        "The load generator lost 1 of 220 requests; see the logs of its workers, logs/shard-N.log."
    )


def test_rows_lost_with_a_worker_elsewhere_point_to_what_is_known_of_it() -> None:
    run = measured_run()
    run.request_rows["status"][50] = Status.lost
    why = "worker 0 died (nothing is heard of its worker)"
    told = {"workers": [LOST_WORKER], "end_reason": why, "dead_workers": [0]}
    (reason, *_) = summarize(with_manifest(run, **told)).reasons
    assert "logs/" not in reason
    assert reason.endswith("see `workers` in manifest.json.")


def test_a_share_that_was_cut_short_allows_no_verdict_though_no_row_is_lost() -> None:
    cut = with_shard(measured_run(), broken="nothing was heard of the master for 5 s")
    summary = summarize(cut)
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert "nothing was heard of the master for 5 s" in summary.reasons[0]


def test_without_promises_there_is_no_verdict_and_nothing_failed() -> None:
    summary = summarize(measured_run())
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 0)
    assert "No SLO was given" in summary.reasons[0]


def test_a_run_in_which_nothing_ended_well_fails_even_if_nothing_was_promised() -> None:
    summary = summarize(measured_run(n_failed=220))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reasons[1:] == ("No request was successful.",)
    assert summary.to_json()["cause"]["kind"] == "unavailable"
    assert summarize(measured_run(n_failed=219)).exit_code == 3, "only warm-up ended well"
    assert summarize(measured_run(n_failed=199)).exit_code == 0
    promised = summarize(measured_run(n_failed=220, slo=["ttft <= 1s"]))
    assert (promised.verdict, promised.exit_code) == ("missed", 1)


def test_promises_asked_of_each_request_imply_99_percent_attainment() -> None:
    summary = summarize(measured_run(n_failed=3, slo=["ttft <= 500ms"]))
    asked, implied = summary.slo
    assert (asked.scope, asked.met, asked.value) == ("request", None, 197 / 200)
    assert (implied.text, implied.is_implied, implied.met) == ("attainment >= 99%", True, False)
    assert summary.verdict == "missed"
    stated = summarize(measured_run(n_failed=3, slo=["ttft <= 500ms", "attainment >= 98%"]))
    assert [result.is_implied for result in stated.slo] == [False, False]
    assert stated.verdict == "met"


def test_a_close_call_is_met_but_not_proven_and_says_what_would_prove_it() -> None:
    run = measured_run(n_failed=1, slo=["ttft <= 500ms", "attainment >= 99%"])
    result = summarize(run).slo[1]
    assert (result.met, result.proven) == (True, False)
    assert result.n_needed is not None
    assert 473 <= result.n_needed <= 5000
    strict = summarize(run, confidence=0.95)
    assert (strict.verdict, strict.exit_code) == ("no_verdict", 3)
    assert "; 95 % confidence needs about 1" in strict.reasons[0]


def test_zero_misses_prove_a_p99_from_299_requests_on() -> None:
    manifest = {"window": {"warmup_s": 2.0, "measure_s": 40.0, "drain_s": 10.0}}
    for n_due, proven in ((298, False), (299, True)):
        run = measured_run(20 + n_due, slo=["p99(ttft) <= 500ms"], manifest=manifest)
        assert summarize(run).slo[0].proven is proven


def test_a_clear_miss_stays_missed_when_only_proof_counts() -> None:
    summary = summarize(measured_run(slo=["p50(ttft) <= 50ms"]), confidence=0.99)
    assert summary.verdict == "missed"


def test_nothing_due_gives_no_verdict_and_says_so() -> None:
    for run in (measured_run(20, slo=["p99(ttft) <= 1s"]), measured_run(0, slo=["ttft <= 1s"])):
        summary = summarize(run)
        assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
        assert summary.reasons == ("No request was due in the measured window.",)
        assert summary.reason_kinds == ("nothing_due",)
        json.dumps(summary.to_json(), allow_nan=False)


def test_throughput_counts_what_arrived_inside_the_window() -> None:
    """10 requests/s of 20 tokens through a 20 s window; the edges exchange about equal shares."""
    rates = summarize(measured_run()).throughput
    assert rates.requests_per_s == pytest.approx(10.0, rel=0.03)
    assert rates.output_tokens_per_s == pytest.approx(200.0, rel=0.03)
    assert rates.input_tokens_per_s == pytest.approx(1000.0, rel=0.03)


def test_one_rate_promise_of_each_kind_is_judged() -> None:
    slo = ["goodput >= 9.5/s", "goodput_output_tokens_per_s >= 150/s", "requests_per_s >= 11/s",
           "error_rate <= 5%", "mean(tpot) <= 20ms", "max(e2e) <= 100ms"]  # fmt: skip
    results = {r.metric: r for r in summarize(measured_run(n_failed=2, slo=slo)).slo}
    assert results["goodput"].value == pytest.approx(9.9)
    assert results["goodput"].met
    assert results["goodput_output_tokens_per_s"].value == pytest.approx(198.0)
    assert (results["requests_per_s"].met, results["requests_per_s"].proven) == (False, None)
    assert (results["error_rate"].value, results["error_rate"].met) == (0.01, True)
    assert results["tpot_s"].proven is True
    assert (results["e2e_s"].met, results["e2e_s"].proven) == (False, True)


def test_other_slos_than_the_runs_own_can_be_asked() -> None:
    run = measured_run(slo=["p50(ttft) <= 1ms"])
    assert summarize(run, slo=["p50(ttft) <= 1s"]).verdict == "met"
    assert summarize(run, slo=[]).exit_code == 0


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        (["ttft<500"], "--slo 'ttft<500': '<' is not allowed in an SLO; write 'ttft <= 500'"),
        (
            ["p99(ttft) <= 1s", "attainment>=99%"],
            "--slo 'attainment>=99%' counts requests that meet every per-request SLO, and there"
            " is none; add one, e.g. 'ttft <= 500ms'",
        ),
        (["goodput >= 1/s"], "--slo 'goodput >= 1/s' counts requests that meet"),
    ],
)
def test_other_slos_that_cannot_be_meant_are_the_users_to_fix(slo: list[str], said: str) -> None:
    with pytest.raises(UsageError) as problem:
        summarize(measured_run(slo=["ttft <= 1s"]), slo=slo)
    assert str(problem.value).startswith(said)


@pytest.mark.parametrize("confidence", [0.5, 1.0, 95.0])
def test_a_confidence_that_means_nothing_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="above 50 % and below 100 %"):
        summarize(measured_run(30), confidence=confidence)


def test_the_confidence_is_that_of_every_interval() -> None:
    """One-sided Clopper-Pearson bounds of 200 of 200: 0.05^(1/200) and 0.2^(1/200)."""
    run = measured_run(slo=["ttft <= 1s"])
    usual, lower = summarize(run), summarize(run, confidence=0.8)
    assert (usual.confidence, lower.confidence) == (0.95, 0.8)
    assert usual.slo[0].low == pytest.approx(0.985133, abs=5e-7)
    assert lower.slo[0].low == pytest.approx(0.991985, abs=5e-7)


def test_itl_counts_tokens_and_icl_counts_chunks() -> None:
    run = measured_run()
    run.chunk_rows["tokens"] = 2
    run.request_rows["output_tokens"], run.request_rows["first_chunk_tokens"] = 40, 2
    metrics = summarize(run).metrics
    assert (metrics["icl_s"].n, metrics["itl_s"].n) == (200 * 19, 200 * 38)
    itl, icl = (metrics[name].percentiles["p50"].value for name in ("itl_s", "icl_s"))
    assert itl == pytest.approx(icl / 2)
    assert metrics["tpot_s"].mean == pytest.approx(metrics["itl_s"].mean)


def test_derived_columns_say_which_requests_met_the_runs_own_slo() -> None:
    columns = derived(measured_run(n_failed=2, slo=["ttft <= 500ms"]))
    assert columns["slo_met"].sum() == 218
    assert np.isnan(columns["ttft_s"]).sum() == 2


def slow_attainment(run: Run, ttft_limit_s: float, tpot_limit_s: float) -> tuple[int, int]:
    """met and due by walking the rows once, from the words of the definition."""
    met = due = 0
    for schedule, row in zip(run.schedule_rows, run.request_rows, strict=True):
        if schedule["phase"] == Phase.warmup:
            continue
        if row["status"] == Status.not_released and schedule["n_parents"]:
            continue
        due += 1
        if row["status"] != Status.ok or math.isnan(row["first_token_s"]):
            continue
        n = row["output_tokens"] if row["token_source"] else row["chunks"]
        rest = int(n) - int(row["first_chunk_tokens"] or 1)
        ttft = row["first_token_s"] - row["released_s"]
        fast = rest <= 0 or (row["last_token_s"] - row["first_token_s"]) / rest <= tpot_limit_s
        met += bool(ttft <= ttft_limit_s and fast)
    return met, due


def slow_ttfts(run: Run) -> tuple[list[float], list[float]]:
    """TTFTs of the due requests that ended well, and of all with +inf for those without one."""
    answered, everything = [], []
    for schedule, row in zip(run.schedule_rows, run.request_rows, strict=True):
        unreleased = row["status"] == Status.not_released and schedule["n_parents"]
        if schedule["phase"] == Phase.warmup or unreleased:
            continue
        ttft = float(row["first_token_s"] - row["released_s"])
        is_answer = row["status"] == Status.ok and not math.isnan(ttft)
        answered += [ttft] if is_answer else []
        everything.append(ttft if is_answer else math.inf)
    return answered, everything


@given(runs(), st.integers(1, 3000), st.integers(1, 3000))
def test_attainment_and_percentiles_agree_with_a_walk_over_the_rows(
    run: Run, ttft_ms: int, tpot_ms: int
) -> None:
    summary = summarize(run, slo=[f"ttft <= {ttft_ms}ms", f"tpot <= {tpot_ms}ms"])
    expected = slow_attainment(run, ttft_ms * 1e-3, tpot_ms * 1e-3)
    assert (summary.attainment.met, summary.attainment.due) == expected
    answered, everything = slow_ttfts(run)
    ttft = summary.metrics["ttft_s"]
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        for found, samples in ((ttft.percentiles, answered), (ttft.with_failures, everything)):
            expected_s = np.quantile(samples or [math.nan], quantile, method="inverted_cdf")
            assert found[name].value == pytest.approx(expected_s, nan_ok=True)
    json.dumps(summary.to_json(), allow_nan=False)


def test_importing_the_summary_loads_neither_pandas_nor_scipy() -> None:
    code = (
        "import sys, loadgen.measure.aggregate;"
        "heavy = {'pandas', 'scipy', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_queue_that_grows_through_the_window_is_missed_for_its_reason() -> None:
    """Latencies within a loose promise, but each request waits longer than the one before."""
    run = measured_run(slo=["p99(ttft) <= 60s"])
    delay_s = 0.8 * run.schedule_rows["scheduled_s"]
    for name in ("first_token_s", "first_answer_s", "last_token_s", "done_s"):
        run.request_rows[name] += delay_s
    summary = summarize(run)
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert summary.reasons[-1].startswith("The offered rate is above the server's capacity: ")
    assert summary.to_json()["reason_kinds"][-1] == "overloaded"
    needs = [(r["proven"], r["n_needed"], r["seconds_needed"]) for r in summary.to_json()["slo"]]
    assert needs == [(False, None, None)], "a longer run would look worse, not clearer"
    assert summary.is_overloaded
    assert summary.validity.trusted


def test_schedule_rows_of_tests_are_in_the_phases_they_say() -> None:
    rows: Any = schedule_rows([0.0, 1.9, 2.0], warmup_s=2.0)
    assert rows["phase"].tolist() == [Phase.warmup, Phase.warmup, Phase.measure]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TokenSource.distrusted, "cannot be true in 200 of 200 answers"),
        (TokenSource.chunks, "200 of 200 answers have no usage"),
    ],
)
def test_metrics_of_doubtful_token_counts_are_marked(source: TokenSource, words: str) -> None:
    run = measured_run()
    run.request_rows["token_source"] = source
    summary = summarize(run)
    assert set(summary.marks) == {"tpot_s", "itl_s", "max_itl_s", "e2e_per_token_s"}
    assert words in summary.marks["tpot_s"]
    assert summary.to_json()["marks"]["tpot_s"] == summary.marks["tpot_s"]


def test_a_total_without_counts_per_chunk_marks_tpot_as_estimated() -> None:
    run = measured_run()
    assert summarize(run).marks == {}
    run.request_rows["output_tokens"], run.request_rows["first_chunk_tokens"] = 80, 4
    marks = summarize(run).marks
    assert marks["tpot_s"].startswith("the tokens of the first chunk are estimated")
    assert marks["itl_s"].startswith("per chunk")
