"""SLOs that leave requests out are not met by those that are left: docs/metrics.md, "Which requests
count"."""

import json
from dataclasses import replace

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.catalog import BY_SLO_WORD
from loadgen.records import Status
from reports.run.verdict_section import banner
from tests.runs import cut_off, measured_run, two_classes

MEAN = "mean(ttft) <= 500ms"


def ended(n, status, slo=(MEAN,), run=None):
    """200 due requests, the first n of which ended with a status and no token."""
    run = measured_run(slo=slo) if run is None else run
    rows, gone = run.request_rows, np.arange(20, 20 + n)
    rows["status"][gone], rows["http_status"][gone] = status, 503
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s"):
        rows[name][gone] = np.nan
    rows["output_tokens"][gone] = rows["chunks"][gone] = 0
    return replace(run, chunk_rows=run.chunk_rows[~np.isin(run.chunk_rows["request_id"], gone)])


@pytest.mark.faults
def test_the_mean_of_the_survivors_of_an_outage_gives_no_verdict():
    summary = summarize(ended(180, Status.http_error))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reasons[-1] == (
        "mean(ttft) <= 500ms: met by the values of 20 of 200 due requests; the others have none "
        "(180 failed). At most 1 % may be left out, beside failures that an error_rate SLO "
        "allows."
    )
    assert summary.reason_kinds == ("cause", "unanswered")
    (result,) = summary.slo
    assert (result.met, result.proven, result.n_needed, result.survives) == (None,) * 4
    (content,) = json.loads(json.dumps(summary.to_json()))["slo"]
    assert (content["met"], content["certainty"], content["bound"]) == (None, None, None)
    assert content["note_kind"] == "unanswered"
    assert content["value"] == pytest.approx(0.1, rel=0.2)
    assert banner(summary).word == "NO VERDICT"


@pytest.mark.parametrize(("n", "verdict"), [(2, "met"), (3, "no_verdict")])
def test_a_mean_may_leave_out_one_percent(n, verdict):
    assert summarize(ended(n, Status.timeout)).verdict == verdict


AT_ONCE = [
    (f"mean({word})", "mean") for word, m in BY_SLO_WORD.items() if m.scope in ("request", "gap")
]
GAPS = [(f"p{q}({word})", "gaps") for word in ("itl", "icl") for q in (50, 90, 99)]


@pytest.mark.parametrize(("left", "kind"), [*AT_ONCE, *GAPS])
def test_each_aggregate_that_leaves_requests_out_is_open(left, kind):
    run = ended(10, Status.http_error, [f"{left} <= 50s"])
    assert summarize(ended(0, Status.ok, [f"{left} <= 50s"])).verdict == "met"
    assert summarize(run).verdict in (
        {"no_verdict"} if kind == "mean" else {"no_verdict", "missed"}
    )
    assert summarize(run).slo[0].met is not True


@pytest.mark.parametrize(
    ("slo", "verdict"),
    [
        ("p50(ttft) <= 50s", "met"),  # failures are infinitely slow in it
        ("p99(ttft) <= 50s", "missed"),
        ("max(ttft) <= 50s", "missed"),
        ("attainment >= 90%", "met"),
        ("goodput >= 5/s", "met"),
        ("requests_per_s >= 5/s", "met"),  # a failure is no answer in it
        ("output_tokens_per_s >= 5/s", "met"),
        ("input_tokens_per_s >= 5/s", "met"),
        ("goodput_output_tokens_per_s >= 5/s", "met"),
        ("error_rate <= 5%", "met"),
    ],
)
def test_an_slo_in_which_failures_count_has_its_verdict(slo, verdict):
    slos = [slo, "ttft <= 9s", "attainment >= 90%"] if slo[0] in "ag" else [slo]
    assert summarize(ended(10, Status.http_error, slos)).verdict == verdict


def test_a_missed_mean_stays_missed():
    summary = summarize(ended(180, Status.http_error, ["mean(ttft) <= 1ms"]))
    assert (summary.verdict, summary.reason_kinds[-1]) == ("missed", "missed")


ALL_KINDS = [Status.cancelled, Status.dropped, Status.not_released, Status.lost]


@pytest.mark.parametrize("status", [*ALL_KINDS, Status.ok])
def test_an_error_rate_excuses_failures_only(status):
    """Of 200 requests 10 failed, and 3 others have no answer; an answer without a token is one of
    these."""
    slos = [MEAN, "error_rate <= 10%"]
    run = ended(10, Status.http_error, slos)
    assert summarize(run).verdict == "met"
    rows, others = run.request_rows, slice(100, 103)
    rows["status"][others] = status
    rows["last_token_s"][others] = rows["first_token_s"][others] = np.nan
    run = replace(
        run, chunk_rows=run.chunk_rows[~np.isin(run.chunk_rows["request_id"], [100, 101, 102])]
    )
    rows["chunks"][others] = 0
    of_mean, _ = summarize(run).slo
    word = {Status.cancelled: "3 unfinished", Status.dropped: "3 dropped",
            Status.not_released: "3 never sent", Status.lost: "3 lost",
            Status.ok: "3 without a token"}[status]  # fmt: skip
    assert of_mean.met is None
    assert f"(10 failed, {word})" in of_mean.note


@pytest.mark.parametrize(("limit", "met"), [("5%", True), ("4.9%", None)])
def test_an_error_rate_excuses_failures_up_to_its_limit(limit, met):
    summary = summarize(ended(10, Status.stream_error, [MEAN, f"error_rate <= {limit}"]))
    assert summary.slo[0].met is met
    assert summary.verdict == ("met" if met else "missed")


def test_the_mean_of_a_class_counts_the_requests_of_the_class():
    """Every fourth of 200 requests is of rag; 3 of its 50 failed, which are 6 %."""
    slow = "mean(ttft) <= 2s"

    def judged(**slos):
        run = two_classes(**slos)
        run.request_rows["status"][[103, 107, 111]] = Status.timeout
        return summarize(run)

    found = judged(rag=[slow], chat=[slow])
    assert found.classes["rag"].verdict == "no_verdict"
    assert found.classes["chat"].verdict == "met"
    assert (found.verdict, found.reason_kinds) == ("no_verdict", ("unanswered",))
    assert found.reasons[0].startswith("rag: mean(ttft) <= 2s: met by the values of 47 of 50 ")
    assert judged(rag=[slow], slo=["error_rate <= 2%"]).verdict == "no_verdict"  # of the class: 6 %
    assert judged(rag=[slow], slo=["error_rate <= 6%"]).verdict == "met"
    assert judged(rag=[slow, "error_rate <= 6%"]).verdict == "met"
    assert judged(slo=[slow], rag=["error_rate <= 6%"]).verdict == "no_verdict"  # not of all


def test_answers_without_the_value_are_left_out_too():
    run = measured_run(slo=["mean(ttfat) <= 1s"])
    run.request_rows["first_answer_s"][100:110] = np.nan  # reasoning only
    summary = summarize(run)
    assert summary.verdict == "no_verdict"
    assert "(10 without TTFAT)" in summary.reasons[0]


def test_rescoring_has_the_same_rule():
    summary = summarize(ended(180, Status.http_error, ()), [MEAN])
    assert (summary.verdict, summary.reason_kinds[-1]) == ("no_verdict", "unanswered")


@pytest.mark.faults
def test_an_error_rate_is_not_met_by_requests_that_never_finished():
    slos = ["error_rate <= 5%"]
    assert summarize(cut_off(measured_run(slo=slos), slice(100, 110))).verdict == "met"
    summary = summarize(cut_off(measured_run(slo=slos), slice(100, 111)))
    assert summary.reasons == (
        "error_rate <= 5%: met at 0 %, but 11 of 200 due requests neither failed nor have an "
        "answer (11 unfinished); as failures they would miss it.",
    )
    assert summary.reason_kinds == ("unanswered",)
