"""Requests that the end of the drain cancelled: misses, no failures, and a sign of overload."""

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.measure.load import falls_behind
from loadgen.measure.measures import Measured, measure
from loadgen.measure.per_request import per_request
from loadgen.records import Status
from reports.run.verdict_section import banner
from tests.runs import FROM_SERVER, cut_off, measured_run, two_classes, with_manifest


def test_an_unfinished_request_is_a_miss_and_no_error():
    run = measured_run(slo=["ttft <= 1s", "error_rate <= 6%"], n_failed=2)
    summary = summarize(cut_off(run, slice(100, 110)))
    counts = summary.counts
    assert (counts["due"], counts["ok"], counts["failed"], counts["unfinished"]) == (
        200,
        188,
        2,
        10,
    )
    assert (summary.attainment.met, summary.attainment.due) == (188, 200)
    assert summary.goodput.requests_per_s.value == pytest.approx(9.4)
    results = {result.metric: result for result in summary.slo}
    assert results["error_rate"].value == pytest.approx(0.01)
    assert results["error_rate"].met
    assert summary.metrics["ttft_s"].n == 188
    assert summary.metrics["ttft_s"].with_failures["p99"].value == np.inf


def test_the_error_rate_of_a_comparison_is_the_same():
    run = cut_off(measured_run(n_failed=2), slice(100, 110))
    found, error_rate = Measured(run), measure("error_rate")
    assert found.value(error_rate) == pytest.approx(0.01)
    assert found.estimate(error_rate, 0.95).value == pytest.approx(0.01)
    assert found.in_order(error_rate).sum() == 2


def test_unfinished_requests_are_counted_by_class():
    summary = summarize(cut_off(two_classes(), [103, 105, 107]))  # every fourth is rag
    assert summary.classes["rag"].counts["unfinished"] == 2
    assert summary.classes["chat"].counts["unfinished"] == 1


def test_a_finding_states_how_long_they_had():
    run = with_manifest(cut_off(measured_run(), slice(100, 110)), window={"drain_s": 10.0})
    told = "10 of 200 requests had not finished 10 s after the last was sent. They count as misses"
    assert any(told in finding for finding in summarize(run).findings)
    stopped = with_manifest(run, ended="interrupted")
    told = "10 of 200 requests had not finished when the run ended."
    assert any(told in finding for finding in summarize(stopped).findings)
    assert not any("had not finished" in finding for finding in summarize(measured_run()).findings)


def overloaded_run(**options):
    """TTFT grows by a second per second; what would have ended after 32 s is cut off."""
    run = measured_run(**options)
    rows = run.request_rows
    late_s = rows["released_s"] - 2.0
    for name in (*FROM_SERVER, "done_s"):
        rows[name] += late_s
    return cut_off(run, np.flatnonzero(rows["done_s"] > 32.0))


def test_an_overloaded_run_states_how_many_had_not_finished():
    summary = summarize(overloaded_run(slo=["p99(ttft) <= 500ms"]))
    n = summary.counts["unfinished"]
    assert 40 < n < 60
    assert summary.verdict == "missed"
    assert summary.reasons[0] == (
        f"Overloaded: {n} of 200 requests had not finished 10 s after the last was sent."
    )
    assert summary.reasons[1] == (
        "p99(ttft) <= 500ms: missed by far: half of the requests took longer than 10 s."
    )
    assert (summary.certainty, summary.slo[0].certainty) == ("clear", "clear")
    assert summary.is_overloaded
    assert summary.to_json()["is_overloaded"] is True


def test_a_run_that_misses_its_slo_without_a_queue_is_not_overloaded():
    summary = summarize(measured_run(slo=["p99(ttft) <= 10ms"]))
    assert (summary.verdict, summary.is_overloaded) == ("missed", False)


def test_an_overload_is_no_verdict_where_too_few_requests_were_successful():
    summary = summarize(overloaded_run(slo=["p99(ttft) <= 500ms"]), min_requests=190)
    assert (summary.verdict, summary.is_overloaded) == ("no_verdict", False)


@pytest.mark.parametrize("confidence", [None, 0.95])
def test_the_banner_of_an_overloaded_run_does_not_doubt_the_overload(confidence):
    run = overloaded_run(slo=["p99(ttft) <= 500ms"])
    shown = banner(summarize(run, confidence=confidence))
    assert (shown.word, shown.sure) == ("MISSED", "by far; the server was overloaded")


def test_a_few_requests_of_an_overloaded_server_are_enough():
    """30 requests, too few for the growth of a queue."""
    run = overloaded_run(n_requests=32, rate_per_s=1.6, slo=["p99(ttft) <= 500ms"])
    assert summarize(run).reasons[0].startswith("Overloaded: ")


@pytest.mark.parametrize("late", [[], [190, 200, 210], range(150, 220)])
def test_answers_that_always_last_longer_than_the_drain_are_no_overload(late):
    """Every answer takes 14 s, the drain 10 s."""
    run = measured_run(slo=["ttft <= 1s"])
    run.request_rows["done_s"] += 14.0
    run = cut_off(run, np.array(late, int), has_begun=True)
    assert not falls_behind(run, per_request(run), due_rows(run))
    assert not any("Overloaded" in reason for reason in summarize(run).reasons)


def test_a_single_answer_that_hangs_is_no_overload():
    run = cut_off(measured_run(), [215])
    assert not falls_behind(run, per_request(run), due_rows(run))


def test_a_drain_that_no_request_was_cut_off_by_shows_nothing():
    run = measured_run()
    assert not falls_behind(run, per_request(run), due_rows(run))


def test_a_queue_at_the_cap_of_the_client_is_overload():
    """A server that never answers: from 10 s on, 100 requests are in flight and others dropped."""
    run = cut_off(measured_run(slo=["ttft <= 1s"]), slice(0, 220))
    rows = run.request_rows
    rows["status"][100:], rows["sent_s"][100:], rows["done_s"][100:] = Status.dropped, None, None

    def reasons(cap):
        limits = {"limits": {"max_concurrency": cap}}
        return summarize(with_manifest(run, scenario={"resolved": limits})).reasons

    assert reasons(100)[0].startswith("Overloaded: 80 of 200 requests had not finished 10 s")
    assert not any("Overloaded" in reason for reason in reasons(1000))
