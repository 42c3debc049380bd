"""What answers in other forms count as: docs/metrics.md, "Answers in other forms"."""

from dataclasses import replace

from loadgen.measure.aggregate import summarize
from tests.runs import measured_run


def finding(summary, word):
    """The findings that hold a word."""
    return [text for text in summary.findings if word in text]


def test_unknown_events_are_a_note_with_their_number():
    run = measured_run()
    run.request_rows["unknown_events"][100:103] = (1, 4, 2)
    run.request_rows["unknown_events"][3] = 9  # of the warm-up
    assert finding(summarize(run), "none of the API") == [
        "7 events in 3 answers are none of the API's (heartbeats, extensions of a gateway); they "
        "were skipped."
    ]
    assert finding(summarize(measured_run()), "none of the API") == []


def test_connections_that_ended_badly_after_done_are_a_note_and_no_failure():
    run = measured_run(slo=["error_rate <= 0%"])
    errors = (*run.names.errors, "complete at [DONE]; then the server held its connection open")
    run.request_rows["error_id"][100:104] = len(errors) - 1
    summary = summarize(replace(run, names=replace(run.names, errors=errors)))
    assert summary.verdict == "met"
    assert finding(summary, "[DONE]") == [
        "4 of 200 answers were complete at [DONE]; then the server held its connection open. They "
        "count as successful; each cost a connection."
    ]
