"""The certainty of the SLOs of recorded runs: clear of the limit, missed by far, and the rules."""

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.slo_result import Margin
from reports.run.verdict_section import banner
from tests.runs import measured_run

FROM_SERVER = ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s")


def slower(run, extra_s, rows=slice(None)):
    """The run with this delay in front of each first token."""
    for name in FROM_SERVER:
        run.request_rows[name][rows] += extra_s
    return run


def waved(run):
    """Latencies that follow each other, so that no bound exists, but hardly the number in
    flight."""
    n = len(run.request_rows)
    return slower(run, 0.3 + 0.05 * np.sin(np.arange(n) / 8))


def test_a_run_far_from_its_limit_is_clear():
    summary = summarize(waved(measured_run(slo=["ttft <= 10s", "attainment >= 95%"])))
    (result,) = [r for r in summary.slo if r.metric == "attainment"]
    assert (result.met, result.proven, result.certainty) == (True, False, "clear")
    assert result.margin is not None
    assert result.margin == Margin(
        result.margin.ratio, True, "the slowest of 200 took 482 ms, 21 times below 10 s"
    )
    assert result.margin.ratio == pytest.approx(0.0125, abs=0.01)
    assert (summary.verdict, summary.exit_code, summary.certainty) == ("met", 0, "clear")
    assert summary.reasons[0].endswith(
        "Only a kind of slowness absent from the run could change this."
    )
    facts = summary.to_json()
    assert (facts["certainty"], facts["slo"][1]["certainty"]) == ("clear", "clear")


def test_a_run_too_short_for_its_margin_says_from_when_it_is_clear():
    """58 requests are one too few for "95 %", whatever the margin; a proof needs far more."""
    slo = ["ttft <= 10s", "attainment >= 95%"]
    run = waved(measured_run(n_requests=78, slo=slo, manifest={"window": {"measure_s": 5.8}}))
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert (result.n, result.certainty) == (58, "in_run")
    assert result.margin is not None
    assert (result.margin.is_clear, result.margin.n_clear, result.n_wanted) == (False, 59, 59)
    assert (
        summarize(run)
        .reasons[0]
        .endswith("; clear of the limit from about 59 samples, 5.9 s at this rate.")
    )
    assert "95 % confidence needs about" in summarize(run, confidence=0.95).reasons[0]


def test_no_length_of_run_is_advised_where_the_load_changed():
    run = measured_run(slo=["ttft <= 700ms", "attainment >= 95%"])
    slower(run, np.linspace(0, 0.5, len(run.request_rows)))
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert (result.n_needed, result.seconds_needed) == (None, None)
    assert (
        summarize(run)
        .reasons[0]
        .endswith("; no length of run is advised, because latency changed through the window.")
    )


def test_no_length_of_run_is_advised_within_one_day():
    run = measured_run(slo=["ttft <= 400ms", "attainment >= 95%"])
    rng = np.random.default_rng(2)
    at_s = np.sort(2 + 20 * rng.beta(3, 3, len(run.request_rows)))
    run.schedule_rows["scheduled_s"] = at_s
    for name in ("released_s", "sent_s", "connected_s", *FROM_SERVER):
        run.request_rows[name] += at_s - run.request_rows["released_s"]
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert result.no_length == "the rate of requests changed through the window"
    assert result.n_needed is None


def test_a_run_at_its_limit_is_met_in_this_run_alone():
    summary = summarize(waved(measured_run(slo=["ttft <= 700ms", "attainment >= 95%"])))
    assert (summary.verdict, summary.exit_code, summary.certainty) == ("met", 0, "in_run")


def test_a_required_certainty_leaves_weaker_results_without_a_verdict():
    clear = waved(measured_run(slo=["ttft <= 10s", "attainment >= 95%"]))
    close = waved(measured_run(slo=["ttft <= 700ms", "attainment >= 95%"]))
    assert summarize(clear, clear=True).verdict == "met"
    assert summarize(close, clear=True).exit_code == 3
    assert summarize(clear, confidence=0.95).exit_code == 3
    assert "95 % confidence needs about" in summarize(clear, confidence=0.95).reasons[0]


def test_a_latency_that_rises_through_the_window_is_never_clear():
    run = measured_run(slo=["ttft <= 10s", "attainment >= 95%"])
    slower(run, np.linspace(0, 0.4, len(run.request_rows)))
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert result.certainty != "clear"
    assert result.margin is not None
    assert not result.margin.is_clear
    assert result.margin.text in (
        "latency rose through the window", "requests in flight rose through the window",
    )  # fmt: skip


def test_waits_that_follow_a_queue_that_has_not_settled_are_never_clear():
    run = measured_run(slo=["ttft <= 10s", "attainment >= 95%"])
    slower(run, 0.3 + 0.2 * np.sin(np.arange(len(run.request_rows)) / 8))
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert result.certainty == "in_run"
    assert result.margin is not None
    assert result.margin.text == "the queue has not settled within 200 requests"


def test_a_pace_that_follows_the_requests_in_flight_is_no_queue():
    """A step takes longer with more requests in it: TPOT waits for nothing."""
    run = measured_run(slo=["tpot <= 10s", "attainment >= 95%"])
    n = len(run.request_rows)
    run.request_rows["last_token_s"] += 2 + 1.5 * np.sin(np.arange(n) / 8)
    run.request_rows["done_s"] = run.request_rows["last_token_s"]
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert result.certainty == "clear"


@pytest.mark.parametrize(("wave_s", "proven"), [(0.0, True), (1.5, False)])
def test_nothing_is_proven_met_while_many_requests_in_flight_have_not_settled(wave_s, proven):
    """20 in flight on average, and a slow wave of their number that first tokens do not show."""
    run = measured_run(slo=["p90(ttft) <= 1s"])
    n = len(run.request_rows)
    answer_s = 2.0 + wave_s * np.sin(np.arange(n) / 30)
    run.request_rows["done_s"] = run.request_rows["last_token_s"] + answer_s
    (result,) = summarize(run).slo
    assert (result.met, result.proven) == (True, proven)
    assert (result.high is None, result.n_needed is not None) == (not proven, not proven)


def test_a_kind_of_request_with_two_answers_is_named():
    run = waved(measured_run(slo=["ttft <= 10s", "attainment >= 95%"]))
    run.schedule_rows["input_tokens"] = 100
    run.schedule_rows["input_tokens"][:20] = 5000  # the warm-up, and two requests
    run.schedule_rows["input_tokens"][[50, 90]] = 5000
    (result,) = [r for r in summarize(run).slo if r.metric == "attainment"]
    assert result.certainty == "in_run"
    assert result.margin is not None
    assert result.margin.text == "only 2 answers of inputs of 5\u202f000 tokens and more"


def chat(n_sessions_of):
    """A run of conversations: `n_sessions_of[k]` of them have k + 1 turns, the others one."""
    run = waved(measured_run(slo=["ttft <= 10s", "attainment >= 95%"]))
    schedule, at = run.schedule_rows, 20  # behind the warm-up
    schedule["session_id"], schedule["context"] = np.arange(220), 0
    for n_turns, n_sessions in enumerate(n_sessions_of, start=1):
        for _ in range(n_sessions):
            turns = slice(at, at + n_turns)
            schedule["session_id"][turns] = 1000 + at
            schedule["context"][turns] = np.arange(n_turns) > 0
            at += n_turns
    return run


@pytest.mark.parametrize(
    ("n_sessions_of", "text"),
    [
        ([0, 10, 5, 1, 1], None),  # a single answer of turn 5, two of turn 4
        ([0, 0, 2], None),
        ([0, 2], "only 2 answers of later turns of a conversation"),
        ([0, 0, 1], "only 2 answers of later turns of a conversation"),
    ],
)
def test_later_turns_are_one_kind(n_sessions_of, text):
    """The deepest turn of a chat hardly ever has three answers."""
    (result,) = [r for r in summarize(chat(n_sessions_of)).slo if r.metric == "attainment"]
    assert result.margin is not None
    assert result.margin.is_clear is (text is None)
    assert text is None or result.margin.text == text


def test_most_requests_late_is_missed_by_far():
    run = measured_run(slo=["p99(ttft) <= 500ms"])
    slower(waved(run), 5.0, np.arange(220) % 3 > 0)
    summary = summarize(run)
    (result,) = summary.slo
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert result.margin is not None
    assert result.margin.is_clear
    ttft_s = run.request_rows["first_token_s"] - run.request_rows["released_s"]
    median_s = np.sort(ttft_s[20:])[99]
    text = f"half of the requests took longer than {median_s:.2f} s"
    assert result.margin.text == text
    assert summary.reasons == (f"p99(ttft) <= 500ms: missed by far: {text}.",)


def test_late_answers_of_one_quarter_are_not_missed_by_far():
    run = measured_run(slo=["p90(ttft) <= 500ms"])
    slower(run, 5.0, slice(20, 65))
    (result,) = summarize(run).slo
    assert (result.met, result.margin) == (False, None)


def test_the_default_share_never_weakens_the_word_of_stated_slos():
    """200 requests cannot prove 99 %, which nobody stated."""
    summary = summarize(measured_run(slo=["p90(ttft) <= 1s", "tpot <= 1s"]))
    assert [r.certainty for r in summary.slo] == ["proven", None, "in_run"]
    assert (summary.verdict, summary.certainty) == ("met", "proven")
    assert banner(summary).sure == "with 95 % confidence"
    assert summary.reasons[1] == (
        "attainment >= 99%: met at 100 %, n = 200; the share of 99 % is a default: "
        "--slo 'attainment >= 95%' sets another."
    )


def test_limits_without_a_share_have_a_headline_without_a_doubt():
    summary = summarize(measured_run(slo=["ttft <= 1s"]))
    assert (summary.verdict, summary.exit_code, summary.certainty) == ("met", 0, "in_run")
    assert (banner(summary).word, banner(summary).sure) == ("MET", "")
    assert summarize(measured_run(slo=["ttft <= 1s"]), confidence=0.95).exit_code == 3


def test_the_default_share_still_misses_a_run():
    summary = summarize(slower(measured_run(slo=["ttft <= 1s"]), 5.0, slice(100, 110)))
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
