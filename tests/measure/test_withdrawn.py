"""Requests that were cancelled on purpose: counted, shown, and judged by no promise."""

from dataclasses import replace

import numpy as np

from loadgen.measure.aggregate import summarize
from loadgen.records import ON_PURPOSE, Names, Status
from tests.runs import measured_run


def withdrawn_run(slo=()):
    """220 requests, 20 of them warm-up. Five in the window are drawn: three were cancelled, one
    ended before, one failed; and one of the warm-up."""
    run = measured_run(slo=slo)
    run.schedule_rows["cancel_after_s"][[3, 100, 101, 102, 103, 104]] = 1.0
    rows = run.request_rows
    rows["status"][[100, 101, 102]] = Status.cancelled
    rows["error_id"][[100, 101, 102]] = 2
    rows["first_token_s"][101] = np.nan
    rows["status"][104], rows["error_id"][104] = Status.http_error, 1
    texts = ("", "HTTP 503: overloaded", f"{ON_PURPOSE} (while connecting)")
    return replace(run, names=replace(run.names, errors=texts))


def test_withdrawn_requests_are_counted_and_not_judged():
    summary = summarize(withdrawn_run(["ttft <= 500ms", "error_rate <= 0%"]))
    counts = summary.counts
    assert (counts["due"], counts["withdrawn"], counts["warmup"], counts["not_due"]) == (
        195, 5, 20, 0,
    )  # fmt: skip
    assert counts["scheduled"] == 220
    assert counts["cancelled"] == counts["http_error"] == 0
    assert (summary.attainment.met, summary.attainment.due) == (195, 195)
    assert summary.verdict == "met"
    assert summary.metrics["ttft_s"].n == 195


def test_what_became_of_them_is_told():
    told = (
        "5 requests were to be cancelled on purpose: 3 were cancelled, 1 succeeded before that, "
        "1 ended in another way. None of them counts for an SLO."
    )
    assert told in summarize(withdrawn_run()).findings
    assert not [f for f in summarize(measured_run()).findings if "on purpose" in f]


def test_an_accidental_cancel_is_a_miss_as_ever():
    run = measured_run(slo=["ttft <= 500ms"])
    run.request_rows["status"][100] = Status.cancelled
    named = replace(run, names=Names(errors=("", "still running"), remotes=run.names.remotes))
    summary = summarize(named)
    assert (summary.attainment.met, summary.counts["cancelled"]) == (199, 1)
    assert summary.counts["withdrawn"] == 0
