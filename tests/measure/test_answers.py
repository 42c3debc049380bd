"""What answers in other forms count as: docs/metrics.md, "Answers in other forms"."""

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
