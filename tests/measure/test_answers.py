"""What answers in other forms count as: docs/metrics.md, "Answers in other forms"."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from loadgen.errors import UsageError
from loadgen.manifest.sections import PreflightLine
from loadgen.measure.aggregate import summarize
from loadgen.measure.truncated import REASON, with_truncated
from loadgen.records import Status, TokenSource
from tests.runs import measured_run, with_manifest, with_shard


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


def in_one_piece(run, rows):
    """The run with all tokens of some answers in a single read."""
    chunks = run.chunk_rows.copy()
    for row in rows:
        mine = chunks["request_id"] == row
        chunks["received_s"][mine] = last_s = chunks["received_s"][mine].max()
        run.request_rows["first_token_s"][row] = run.request_rows["last_token_s"][row] = last_s
    return replace(run, chunk_rows=chunks)


def in_blocks(run, n_events, n_bytes=100):
    """The run with the events of each answer delivered in blocks; `n_bytes` per event."""
    chunks = run.chunk_rows.copy()
    of_each = chunks["received_s"].reshape(len(run.request_rows), -1)
    n = of_each.shape[1]
    last = [min(n - 1, (k // n_events + 1) * n_events - 1) for k in range(n)]
    of_each[:] = of_each[:, last]
    run.request_rows["first_token_s"] = of_each[:, 0]
    run.request_rows["bytes"] = n * n_bytes
    return replace(run, chunk_rows=chunks)


def test_an_answer_in_one_piece_is_out_of_the_n_of_a_limit_on_tpot():
    run = in_one_piece(measured_run(slo=["tpot <= 1ms", "ttft <= 5s"]), [100, 101, 102])
    summary = summarize(run)
    of_tpot, of_ttft, _ = summary.slo
    assert (of_tpot.n, of_tpot.value, of_ttft.n) == (197, 0.0, 200)
    assert summary.metrics["tpot_s"].n == 197
    assert summary.metrics["tpot_s"].min > 0
    assert summary.attainment.met == 3  # by their other limit
    assert finding(summary, "one piece") == [
        "3 of 200 answers came in one piece (a single event or read), so that they have no TPOT "
        "and no ITL; SLOs on them leave these answers out."
    ]


@pytest.mark.parametrize(
    ("slo", "n_in_one_piece", "met"),
    [
        ("p50(tpot) <= 1ms", 10, False),  # 5 %: the measured answers decide
        ("p50(tpot) <= 1ms", 11, False),  # both ways missed
        ("p50(tpot) <= 1s", 11, True),  # both ways met
        ("p50(tpot) <= 1ms", 150, None),
        ("p99(tpot) <= 1s", 11, None),  # as misses they are more than 1 %
        ("p99(tpot) <= 1s", 10, True),
        ("p50(tpot) <= 1ms", 200, None),
        ("p99(max_itl) <= 1s", 20, None),
        ("p99(itl) <= 1s", 20, None),
        ("p99(max_stall) <= 1s", 200, None),  # no samples
        ("p99(e2e) <= 9s", 200, True),
    ],
)
def test_many_answers_in_one_piece_leave_open_what_they_decide(slo, n_in_one_piece, met):
    run = in_one_piece(measured_run(slo=[slo]), range(20, 20 + n_in_one_piece))
    summary = summarize(run)
    assert summary.slo[0].met is met
    assert summary.exit_code == {True: 0, False: 1, None: 3}[met]


def test_the_reason_names_the_answers_in_one_piece():
    run = in_one_piece(measured_run(slo=["tpot <= 1ms"]), range(20, 220))
    summary = summarize(run)
    assert (summary.verdict, summary.slo[0].n) == ("no_verdict", 0)
    assert summary.reasons == (
        "attainment >= 99%: 200 of 200 answers came in one piece and have no TPOT or ITL; as hits "
        "and as misses they lead to different verdicts.",
    )
    assert summary.marks["tpot_s"] == "n/a: every answer came in one piece"


@pytest.mark.parametrize(
    ("n_events", "n_bytes", "layer"),
    [
        (5, 110, "the server's own loop, that sends every 50.6 ms"),
        (5, 820, "a proxy's buffer of 4 kB"),
        (10, 820, "a proxy's buffer of 8 kB"),
    ],
)
def test_a_stream_in_blocks_has_no_itl_and_one_finding(n_events, n_bytes, layer):
    run = in_blocks(measured_run(itl_s=0.01, slo=["p99(itl) <= 1s"]), n_events, n_bytes)
    summary = summarize(run)
    reason = f"n/a: delivered in blocks of about {n_events} events"
    assert summary.metrics["itl_s"].n == summary.metrics["max_itl_s"].n == 0
    assert summary.marks["itl_s"] == summary.marks["max_itl_s"] == reason
    assert summary.reasons == (f"p99(itl) <= 1s: {reason}.",)
    assert summary.metrics["tpot_s"].percentiles["p50"].value == pytest.approx(0.01, rel=0.05)
    assert summary.metrics["icl_s"].n == 200 * (20 // n_events - 1)
    (found,) = finding(summary, "blocks")
    assert layer in found


def test_a_busy_client_delivers_no_blocks():
    """The event loop was late by half of the gap between reads: it may have joined the events."""
    run = in_blocks(measured_run(itl_s=0.01), 5)
    lag = {"n": 320, "p50": 0.001, "p99": 0.03, "max": 0.04}
    summary = summarize(with_shard(run, loop_lag_s=lag))
    assert summary.metrics["itl_s"].n == 200 * 15
    assert finding(summary, "blocks") == []


def test_two_events_in_fewer_than_half_of_the_reads_are_no_blocks():
    run = measured_run()
    chunks = run.chunk_rows.copy()
    of_each = chunks["received_s"].reshape(220, 20)
    of_each[:, 1:7:2] = of_each[:, 2:8:2]
    summary = summarize(replace(run, chunk_rows=chunks))
    assert summary.metrics["itl_s"].n == 200 * 19
    assert finding(summary, "blocks") == []


def test_several_tokens_in_one_event_are_no_block():
    run = measured_run()
    chunks = run.chunk_rows.copy()
    chunks["tokens"] = 4
    run.request_rows["output_tokens"] = 80
    summary = summarize(replace(run, chunk_rows=chunks))
    assert finding(summary, "blocks") == []
    assert summary.metrics["itl_s"].n == 200 * 19 * 4


def test_blocks_have_no_max_itl_and_keep_max_stall():
    run = in_blocks(measured_run(slo=["max_itl <= 1ms", "max_stall <= 1s"]), 5)
    summary = summarize(run)
    assert (summary.slo[0].n, summary.slo[1].value) == (0, 1.0)
    assert np.isnan(summary.metrics["max_itl_s"].mean)
    assert summary.metrics["max_stall_s"].n == 200


def test_hidden_reasoning_is_left_out_of_tpot_and_shown_with_both_counts():
    run = measured_run(itl_s=0.01, slo=["p50(tpot) <= 1s"])
    run.request_rows["output_tokens"], run.request_rows["hidden_tokens"] = 45, 25
    summary = summarize(run)
    assert summary.metrics["tpot_s"].percentiles["p50"].value == pytest.approx(0.01, rel=0.05)
    assert summary.throughput.output_tokens_per_s == pytest.approx(200, rel=0.02)
    assert summary.goodput.output_tokens_per_s == pytest.approx(200, rel=0.02)
    assert summary.marks["ttft_s"] == "after reasoning, not streamed"
    sent = summary.to_json()["stimulus"]
    assert (sent["output_tokens"]["got_mean"], sent["streamed_tokens"]["got_mean"]) == (45, 20)
    (found,) = finding(summary, "reasoning")
    assert found.startswith("200 of 200 answers have reasoning that was not streamed: 25 of 45")


def test_a_run_without_hidden_reasoning_has_one_count():
    summary = summarize(measured_run())
    assert summary.to_json()["stimulus"]["streamed_tokens"] is None
    assert "ttft_s" not in summary.marks


def exact(run, ok=True):
    """The run against a server that was proven to accept exact lengths."""
    line = PreflightLine("ignore_eos", ok=ok, detail="accepted: output_tokens are exact")
    manifest = msgspec.structs.replace(run.manifest, preflight=(line,))
    return replace(run, manifest=manifest)


def short_run(n_short, tokens=8, requested=64, slo=("e2e <= 10s",), ok=True):
    """200 due requests, of which the first `n_short` have fewer tokens than requested."""
    run = exact(measured_run(slo=slo), ok)
    run.schedule_rows["output_tokens"] = run.request_rows["output_tokens"] = requested
    run.request_rows["output_tokens"][20 : 20 + n_short] = tokens
    return with_truncated(run)


def test_a_short_answer_under_exact_lengths_is_a_failure_of_its_own_status():
    summary = summarize(short_run(100))
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert (summary.counts["truncated"], summary.counts["failed"]) == (100, 100)
    assert summary.attainment.met == 100
    assert finding(summary, "truncated") == [
        "100 of 200 requests (50 %) were truncated: their answers ended cleanly after 8 of 64 "
        "tokens on average, although the server accepted exact lengths in the preflight. They "
        "count as failed. If these are natural ends, which a server that ignores ignore_eos has: "
        "measure with extra_body: {ignore_eos: null, min_tokens: null} in a target file."
    ]
    run = short_run(100)
    assert run.names.errors[run.request_rows["error_id"][20]] == REASON


@pytest.mark.parametrize(
    ("requested", "tokens", "is_short"),
    [
        (64, 62, False), (64, 61, True),  # more than 2
        (200, 196, False), (200, 195, True),  # more than 2 %
        (3, 1, False), (4, 1, True), (64, 65, False), (64, 0, True),
    ],
)  # fmt: skip
def test_an_answer_is_short_by_more_than_two_tokens_and_two_percent(requested, tokens, is_short):
    run = short_run(1, tokens, requested)
    expected = Status.truncated if is_short else Status.ok
    assert run.request_rows["status"][20] == expected
    assert (run.request_rows["status"][21:] == Status.ok).all()


@pytest.mark.parametrize("ok", [None, False])
def test_without_proven_exact_lengths_every_end_is_natural(ok):
    assert summarize(short_run(100, ok=ok)).counts["truncated"] == 0


def test_only_the_count_of_the_server_shows_that_an_answer_is_short():
    run = short_run(0)
    run.request_rows["output_tokens"][20:120] = 8
    for source in (TokenSource.chunks, TokenSource.distrusted, TokenSource.none):
        run.request_rows["token_source"] = source
        assert with_truncated(run) is run
    run.request_rows["token_source"] = TokenSource.usage
    run.request_rows["status"][20] = Status.timeout
    statuses = with_truncated(run).request_rows["status"]
    assert (statuses[20], statuses[21]) == (Status.timeout, Status.truncated)


@pytest.mark.parametrize(("n_short", "verdict"), [(11, "met"), (12, "no_verdict")])
def test_a_run_that_is_met_with_many_tokens_missing_has_no_verdict(n_short, verdict):
    """11 of 200 answers of 8 instead of 64 tokens are 4.8 % of the tokens, 12 are 5.25 %."""
    summary = summarize(short_run(n_short, slo=("p50(e2e) <= 10s",)))
    assert summary.verdict == verdict
    if verdict == "no_verdict":
        assert summary.exit_code == 3
        assert summary.reasons == (
            "5.25 % of the 12\u202f800 requested output tokens are missing: shorter answers are "
            "faster, so that the SLOs were met with less work than planned.",
        )


def test_a_missed_run_stays_missed_with_many_tokens_missing():
    assert summarize(short_run(50, slo=("p50(e2e) <= 1ms",))).verdict == "missed"


@pytest.mark.parametrize("ok", [True, None])
def test_errors_after_some_tokens_are_named_with_the_servers_sentence(ok):
    run = exact(measured_run(slo=["e2e <= 1s"]), ok)
    run.schedule_rows["output_tokens"] = 128
    errors = (*run.names.errors, "error in the stream: Unexpected token")
    failed = slice(100, 150)
    run.request_rows["status"][failed] = Status.stream_error
    run.request_rows["error_id"][failed] = len(errors) - 1
    summary = summarize(replace(run, names=replace(run.names, errors=errors)))
    (found,) = finding(summary, "Unexpected token")
    assert found.startswith("50 of 200 requests failed after 20 of 128 tokens on average: ")
    assert ("ignore_eos" in found) is (ok is True)


def without_stream(slo=()):
    """A run whose answers were requested as a whole."""
    run = with_manifest(measured_run(slo=slo), target={"stream": False})
    for name in ("first_chunk_s", "first_token_s", "first_answer_s"):
        run.request_rows[name] = np.nan
    run.request_rows["chunks"] = 1
    last = np.searchsorted(run.chunk_rows["request_id"], np.arange(220), side="right") - 1
    return replace(run, chunk_rows=run.chunk_rows[last])


def test_without_a_stream_there_is_e2e_and_no_ttft_tpot_or_itl():
    summary = summarize(without_stream(["e2e <= 1s", "output_tokens_per_s >= 10/s"]))
    assert (summary.verdict, summary.attainment.met) == ("met", 200)
    assert summary.metrics["e2e_s"].n == 200
    for name in ("ttft_s", "ttft_from_send_s", "ttfat_s", "tpot_s", "itl_s", "icl_s", "max_itl_s"):
        found = summary.metrics[name]
        assert found.n == 0
        assert np.isnan(found.with_failures["p50"].value), name  # absent, neither 0 nor ∞
        assert summary.marks[name] == "n/a: the answers were requested as a whole"
    assert summary.throughput.output_tokens_per_s == pytest.approx(200, rel=0.02)
    assert summary.throughput.input_tokens_per_s == pytest.approx(1000, rel=0.02)
    assert finding(summary, "one piece") == []


@pytest.mark.parametrize("slo", ["ttft <= 1s", "p99(tpot) <= 1s", "mean(itl) <= 1s"])
def test_without_a_stream_other_slos_are_refused(slo):
    with pytest.raises(UsageError, match="are not streamed"):
        summarize(without_stream(), [slo])
