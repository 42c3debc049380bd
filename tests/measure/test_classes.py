"""Classes: each in its own numbers, judged by its own promises; every expected number by hand."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.records import EDGES, Phase, Status
from tests.runs import changed, measured_run, traffic, two_classes, with_manifest


def test_a_class_has_the_numbers_of_its_rows_alone():
    summary = summarize(two_classes())
    assert list(summary.classes) == ["chat", "rag"]
    chat, rag = summary.classes["chat"], summary.classes["rag"]
    assert (chat.counts["due"], rag.counts["due"]) == (150, 50)
    assert (chat.counts["warmup"], rag.counts["warmup"]) == (15, 5)
    assert chat.offered_rate_per_s == pytest.approx(7.5)  # 150 in 20 s
    assert rag.metrics["ttft_s"].percentiles["p50"].value == pytest.approx(1.0)
    assert chat.metrics["ttft_s"].percentiles["p99"].value < 0.2
    assert chat.metrics["ttft_s"].n + rag.metrics["ttft_s"].n == summary.metrics["ttft_s"].n == 200
    together = sum(c.throughput.output_tokens_per_s for c in (chat, rag))
    assert together == pytest.approx(summary.throughput.output_tokens_per_s)


def test_promises_of_a_class_are_asked_of_its_rows_alone():
    """rag answers after 1 s, chat after 0.1 s; each keeps its own promise."""
    summary = summarize(two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 2s"]))
    assert (summary.verdict, summary.exit_code) == ("met", 0)
    assert summary.attainment.met == summary.attainment.due == 200
    assert summary.goodput.requests_per_s.value == pytest.approx(10.0)
    chat = summary.classes["chat"]
    assert [r.text for r in chat.slo] == ["ttft <= 500ms", "attainment >= 99%"]
    assert (chat.slo[0].n, chat.slo[0].value) == (150, 1.0)


def test_one_class_that_misses_makes_the_run_missed_and_says_which():
    summary = summarize(two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 500ms"]))
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert summary.classes["chat"].verdict == "met"
    assert summary.classes["rag"].verdict == "missed"
    assert summary.reasons[0].startswith("rag: attainment >= 99%: missed at 0 %, n = 50")
    assert (summary.attainment.met, summary.attainment.due) == (150, 200)
    assert summary.goodput.requests_per_s.value == pytest.approx(7.5)
    assert summary.classes["rag"].goodput.requests_per_s.value == 0.0


def test_promises_about_all_are_asked_of_every_class_too():
    """All: ttft <= 500 ms in 75 %; chat's own promise holds; rag keeps none of the common one."""
    run = two_classes(chat=["e2e <= 5s"], slo=["ttft <= 500ms", "attainment >= 70%"])
    summary = summarize(run)
    assert summary.verdict == "met"
    assert summary.slo[1].value == 0.75
    assert summary.classes["rag"].attainment.met == 0
    assert summary.classes["chat"].attainment.met == 150


def test_a_class_needs_proof_where_the_run_does():
    """150 due requests cannot prove a P99, which takes 299."""
    run = two_classes(chat=["p99(ttft) <= 300ms"], rag=["p50(ttft) <= 2s"])
    verdicts = [
        {name: found.verdict for name, found in summarize(run, confidence=level).classes.items()}
        for level in (None, 0.95)
    ]
    assert verdicts == [{"chat": "met", "rag": "met"}, {"chat": "no_verdict", "rag": "met"}]


def test_the_rate_that_the_whole_run_requested_is_not_that_of_a_class():
    """15/s were requested of all; chat was offered 7.5/s, so 8/s are out of reach."""
    run = two_classes(chat=["ttft <= 9s", "goodput >= 8/s"])
    chat = summarize(with_manifest(run, requested_rate_per_s=15.0)).classes["chat"]
    assert chat.slo[1].note_kind == "above_offered_rate"


def test_failures_count_against_their_class():
    """The last 8 rows fail: 212 … 219, of which 215 and 219 are rag."""
    summary = summarize(two_classes(chat=["ttft <= 500ms"], n_failed=8))
    assert summary.classes["chat"].counts["http_error"] == 6
    assert summary.classes["rag"].counts["http_error"] == 2
    assert summary.classes["chat"].attainment.met == 144


def test_the_written_column_says_who_kept_all_promises_made_to_it():
    run = two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 500ms"])
    assert np.array_equal(derived(run)["slo_met"], run.schedule_rows["class_id"] == 0)


def test_other_promises_replace_those_of_the_classes():
    run = two_classes(rag=["ttft <= 500ms"])
    summary = summarize(run, slo=["ttft <= 2s"])
    assert summary.verdict == "met"
    assert summary.classes["rag"].slo == ()
    assert summary.classes["rag"].attainment.met == 50


def test_a_run_of_one_class_has_no_classes():
    summary = summarize(measured_run(slo=["ttft <= 500ms"]))
    assert summary.classes == {}
    assert summary.to_json()["classes"] == {}


def test_classes_are_plain_json():
    content = summarize(two_classes(chat=["ttft <= 500ms"])).to_json()
    whole = {"counts", "throughput", "metrics", "slo", "attainment", "goodput"}
    assert whole <= set(content["classes"]["chat"]) <= set(content) | {"tenant", "priority"}


def test_a_row_that_waited_belongs_to_the_phase_of_its_release():
    """Row 30 was planned for the measured window and released in the warm-up, row 10 the reverse;
    both waited for a parent."""
    run = measured_run()
    plan, rows = run.schedule_rows, run.request_rows
    plan["n_parents"][[10, 30]] = 1
    plan["scheduled_s"][[10, 30]] = np.nan
    assert plan["phase"][[10, 30]].tolist() == [Phase.warmup, Phase.measure]
    rows["released_s"][10], rows["released_s"][30] = 5.0, 1.9
    counts = summarize(run).counts
    assert (counts["warmup"], counts["due"]) == (20, 200)
    rows["released_s"][30] = 2.1
    counts = summarize(run).counts
    assert (counts["warmup"], counts["due"]) == (19, 201)


def closed_loop(n_reached):
    """One user with 220 planned requests, one after the other, of which `n_reached` were sent."""
    run = measured_run()
    plan, rows = run.schedule_rows, run.request_rows
    plan["session_id"] = 0
    plan["n_parents"][1:], plan["after_failure"][1:] = 1, True
    plan["scheduled_s"][1:] = np.nan
    edges = np.zeros(219, EDGES)
    edges["request_id"], edges["after"] = np.arange(1, 220), np.arange(219)
    rows["done_s"][:-1] = rows["released_s"][1:]
    rows["status"][n_reached:] = Status.not_released
    for name in ("released_s", "sent_s", "first_token_s", "last_token_s", "done_s"):
        rows[name][n_reached:] = np.nan
    chunks = run.chunk_rows[run.chunk_rows["request_id"] < n_reached]
    return replace(
        with_manifest(run, classes={"default": traffic(is_closed_loop=True)}),
        edge_rows=edges,
        chunk_rows=chunks,
    )


def stimulus(run):
    return next(c for c in summarize(run).validity.checks if c.name == "stimulus")


def test_a_closed_loop_that_did_not_reach_the_end_of_its_plan_is_trusted():
    run = closed_loop(180)
    assert stimulus(run).ok is True
    summary = summarize(run)
    assert (summary.counts["due"], summary.counts["not_due"]) == (160, 40)
    assert not any("never came due" in finding for finding in summary.findings)


def test_a_closed_loop_has_an_achieved_rate_only():
    summary = summarize(closed_loop(180))
    assert (summary.requested_rate_per_s, summary.offered_rate_per_s) == (None, None)
    assert summary.achieved_rate_per_s == 8.0  # 160 in 20 s
    assert summary.rate_note == "closed loop: the server's speed sets the rate"


def test_each_class_has_its_own_requested_rate_and_a_closed_loop_leaves_the_whole_without():
    run = two_classes()
    of_chat = changed(traffic(), requested_rate_per_s=7.0)
    classes = {"chat": of_chat, "rag": traffic(is_closed_loop=True)}
    summary = summarize(with_manifest(run, classes=classes))
    chat, rag = summary.classes["chat"], summary.classes["rag"]
    assert (chat.requested_rate_per_s, chat.offered_rate_per_s) == (7.0, 7.5)
    assert (rag.offered_rate_per_s, rag.achieved_rate_per_s) == (None, 2.5)
    assert summary.offered_rate_per_s is None


def test_a_closed_loop_that_ran_dry_is_not_trusted():
    check = stimulus(closed_loop(220))
    assert check.ok is False
    assert check.is_gate
    assert check.detail.startswith("1 users of the closed loop ran out of planned requests")


def test_a_release_after_a_parent_that_was_never_sent_is_not_held_against_it():
    run = closed_loop(180)
    run.request_rows["status"][50] = Status.dropped
    run.request_rows["done_s"][50] = np.nan
    assert stimulus(run).ok is True


def test_a_class_with_too_few_requests_for_its_percentile_has_no_verdict():
    """50 rag requests have no P99; 150 chat requests do."""
    summary = summarize(two_classes(chat=["p99(ttft) <= 5s"], rag=["p99(ttft) <= 5s"]))
    verdicts = {name: found.verdict for name, found in summary.classes.items()}
    assert verdicts == {"chat": "met", "rag": "no_verdict"}
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reasons == (
        "rag: p99(ttft) <= 5s: 50 samples have no P99, which needs at least 100.",
    )
