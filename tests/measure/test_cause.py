"""The cause of the misses of a run: rows, errors and headers in, a kind and a sentence out.

The errors are those of public servers: vLLM, SGLang, TGI, llama.cpp, OpenAI, DeepSeek, OpenRouter.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.cause import is_too_long, kind_of, shown
from loadgen.measure.silence import silent_at_end
from loadgen.records import SERVER, Names, Status
from tests.runs import measured_run, with_manifest

SLO = ("ttft<=500ms", "attainment>=99%")
WARMUP = 20  # rows of `measured_run` before its window; 200 are due


def summarized(run) -> Any:
    """The summary, whose cause may be of any kind."""
    return summarize(run)


def failing(n, error, http_status=429, status=Status.http_error, slo=SLO, each=1, **columns):
    """A run of 200 due requests in 20 s. `n` failed, every `each`-th from the tenth on."""
    run = measured_run(slo=slo)
    failed = WARMUP + 10 + each * np.arange(n)
    rows = run.request_rows.copy()
    rows["status"][failed], rows["http_status"][failed] = status, http_status
    rows["error_id"][failed] = 2
    for name in ("first_token_s", "first_chunk_s", "first_answer_s", "last_token_s"):
        rows[name][failed] = np.nan
    for name in ("chunks", "output_tokens"):
        rows[name][failed] = 0
    rows["done_s"][failed] = rows["sent_s"][failed] + 0.01
    for name, value in columns.items():
        rows[name][failed] = value
    chunks = run.chunk_rows[~np.isin(run.chunk_rows["request_id"], rows["request_id"][failed])]
    names = Names(errors=("", "HTTP 503: overloaded", error), remotes=run.names.remotes)
    return replace(run, request_rows=rows, chunk_rows=chunks, names=names)


def test_a_rate_limit_is_named_with_its_limit_its_wait_and_the_rate_that_got_through():
    error = "HTTP 429: Rate limit reached: 10 per second (x-ratelimit-limit-requests: 10)"
    summary = summarized(failing(90, error, each=2, retry_after_s=1.0))
    cause = summary.cause
    assert cause.kind == summary.to_json()["cause"]["kind"] == "rate_limit"
    assert (cause.n, cause.http_status, cause.retry_after_s) == (90, 429, 1.0)
    assert cause.limit == "x-ratelimit-limit-requests: 10"
    assert cause.message == "Rate limit reached: 10 per second"
    # 10 requests/s are sent from 3 s to 21.9 s, every second of them is refused until 20.8 s
    assert cause.passed_per_s == pytest.approx(100 / 18.9, rel=1e-3)
    assert (
        summary.reasons[0]
        == cause.sentence
        == (
            "A rate limit, not latency: 90 of 200 requests were refused with HTTP 429 "
            "(x-ratelimit-limit-requests: 10; Retry-After 1 s); about 5.29 per second got through: "
            '"Rate limit reached: 10 per second".'
        )
    )
    assert summary.reason_kinds[0] == "cause"
    assert summary.verdict == "missed"


def test_a_limit_per_minute_states_no_rate_because_none_was_steady():
    cause = summarized(failing(150, "HTTP 429: slow down")).cause
    assert (cause.kind, cause.passed_per_s, cause.retry_after_s) == ("rate_limit", None, None)
    assert cause.sentence == (
        'A rate limit, not latency: 150 of 200 requests were refused with HTTP 429: "slow down".'
    )


def test_a_rate_that_changed_is_not_stated_as_the_rate_that_got_through():
    """40 of the first 95 requests got through, 10 of the last 95: a bucket that was filled."""
    run = failing(1, "HTTP 429: slow down")
    rows = run.request_rows.copy()
    refused = np.arange(WARMUP + 10, 220)
    passed = np.r_[refused[1:80:2], refused[95::10]]
    refused = np.setdiff1d(refused, passed)
    rows["status"][refused], rows["http_status"][refused] = Status.http_error, 429
    rows["error_id"][refused], rows["first_token_s"][refused] = 2, np.nan
    cause = summarized(replace(run, request_rows=rows)).cause
    assert (cause.kind, cause.n, cause.passed_per_s) == ("rate_limit", 140, None)


KINDS = [
    ("HTTP 402: Insufficient Balance", 402, "payment"),
    ("HTTP 429: You exceeded your current quota, please check your plan and billing details.",
     429, "payment"),
    ("HTTP 429: Rate limit reached for gpt-4o in organization org on tokens per min (TPM)", 429,
     "rate_limit"),
    ("HTTP 429: Too Many Requests", 429, "rate_limit"),
    ("HTTP 429: the queue is full (64 requests wait)", 429, "unavailable"),
    ("HTTP 503: Loading model", 503, "unavailable"),
    ("HTTP 529: Overloaded", 529, "unavailable"),
    ("HTTP 400: This model's maximum context length is 4096 tokens. However, you requested 5000",
     400, "too_long"),
    ("HTTP 400: The input (5000 tokens) is longer than the model's context length (4096 tokens).",
     400, "too_long"),
    ("HTTP 422: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000", 422, "too_long"),
    ("HTTP 400: the request exceeds the available context size, try increasing it", 400,
     "too_long"),
    ("HTTP 400: The decoder prompt (length 5000) is longer than the maximum model length of 4096",
     400, "too_long"),
    ("HTTP 413: prompt is too long: 210000 tokens > 200000 maximum", 413, "too_long"),
    ("HTTP 400: unknown field top_k", 400, "failed_alike"),
    ("HTTP 500: Internal server error", 500, "failed_alike"),
    ("HTTP 403: Forbidden", 403, "failed_alike"),
]  # fmt: skip
INSIDE = [
    ("error in the stream: Internal server error", "failed_alike"),
    ("error in the stream: Rate limit exceeded: free-models-per-min", "rate_limit"),
    ("error in place of a stream: Insufficient credits", "payment"),
    ("error in the answer: maximum context length is 4096 tokens", "too_long"),
    ("connection closed in the middle of the response", "failed_alike"),
]


@pytest.mark.parametrize(("error", "http_status", "kind"), KINDS)
def test_the_kind_of_an_http_error(error, http_status, kind):
    assert kind_of(Status.http_error, http_status, error) == kind
    assert is_too_long(http_status, error) is (kind == "too_long")


@pytest.mark.parametrize(("error", "kind"), INSIDE)
def test_the_kind_of_an_error_inside_a_200(error, kind):
    assert kind_of(Status.stream_error, 200, error) == kind


def test_a_failure_that_the_client_ended_says_nothing_of_its_cause():
    for status in (Status.timeout, Status.cancelled, Status.dropped, Status.truncated, Status.lost):
        assert kind_of(status, 0, "took longer than 5 s") is None
    assert kind_of(Status.connect_error, 0, "connect to h:1: refused") == "no_connection"


NO_LOAD_HELPS = [
    ("HTTP 402: Insufficient Balance", 402, "payment",
     'The account, not the server, was the limit: 40 of 200 requests were refused with HTTP 402: '
     '"Insufficient Balance".'),
    ("HTTP 429: slow down", 429, "rate_limit",
     "A rate limit, not latency: 40 of 200 requests were refused with HTTP 429; about 7.94 per "
     'second got through: "slow down".'),
    ("HTTP 400: maximum context length is 9 tokens", 400, "too_long",
     "Refused for length: 40 of 200 requests are longer than the server accepts, HTTP 400: "
     '"maximum context length is 9 tokens".'),
    ("HTTP 500: boom", 500, "failed_alike",
     '40 of 200 requests failed alike with HTTP 500: "boom".'),
]  # fmt: skip


@pytest.mark.parametrize(("error", "http_status", "kind", "sentence"), NO_LOAD_HELPS)
def test_no_capacity_is_advised_where_no_load_would_help(error, http_status, kind, sentence):
    run = with_manifest(
        failing(40, error, http_status, each=4),
        command=("slobench", "run", "--rate", "10", "--slo", "ttft<=500ms"),
    )
    summary = summarized(run)
    assert (summary.cause.kind, summary.cause.sentence) == (kind, sentence)
    assert summary.cause.advice
    assert summary.capacity_command == ""
    assert not summary.cause.is_about_load


def test_a_server_that_refuses_a_part_of_the_load_may_serve_less():
    run = with_manifest(
        failing(40, "HTTP 503: busy", 503, each=4),
        command=("slobench", "run", "--rate", "10", "--slo", "ttft<=500ms"),
    )
    summary = summarized(run)
    assert (summary.cause.kind, summary.cause.is_about_load) == ("unavailable", True)
    assert summary.capacity_command.startswith("slobench capacity")
    assert summary.cause.sentence == (
        "The server, or a gateway in front of it, refused a part of the load: 40 of 200 requests "
        'were refused with HTTP 503: "busy".'
    )
    assert "--wait-ready" in summary.cause.advice


def test_a_server_that_answers_nothing_but_503_did_not_serve_yet():
    run = failing(1, "HTTP 503: Loading model", 503, retry_after_s=5.0)
    rows = run.request_rows.copy()
    rows["status"], rows["http_status"], rows["error_id"] = Status.http_error, 503, 2
    cause = summarized(replace(run, request_rows=rows)).cause
    assert (cause.kind, cause.is_about_load) == ("unavailable", False)
    assert cause.sentence == (
        "The server, or a gateway in front of it, did not serve yet: 200 of 200 requests were "
        'refused with HTTP 503 (Retry-After 5 s): "Loading model".'
    )
    assert cause.advice == "--wait-ready 5m waits until a server that is still loading answers."


def test_prompts_that_are_too_long_are_named_by_file_and_line():
    run = failing(5, "HTTP 400: maximum context length is 4096 tokens", 400)
    places = ("data.jsonl:7", "data.jsonl:9", "data.jsonl:12", "data.jsonl:15", "data.jsonl:16")
    cause = summarized(with_manifest(run, too_long_at=places)).cause
    assert cause.places == places
    assert cause.sentence == (
        "Refused for length: 5 of 200 requests are longer than the server accepts (data.jsonl:7, "
        'data.jsonl:9, data.jsonl:12 and 2 more lines), HTTP 400: "maximum context length is 4096 '
        'tokens".'
    )


def test_errors_that_differ_in_their_numbers_fail_alike():
    run = failing(30, "error in the stream: request 17 failed", 200, Status.stream_error)
    rows = run.request_rows.copy()
    rows["error_id"][WARMUP + 10 : WARMUP + 20] = 3
    names = replace(run.names, errors=(*run.names.errors, "error in the stream: request 4 failed"))
    cause = summarized(replace(run, request_rows=rows, names=names)).cause
    assert (cause.kind, cause.n) == ("failed_alike", 30)
    assert cause.sentence == (
        '30 of 200 requests failed alike with an error inside the answer: "request 17 failed".'
    )


@pytest.mark.parametrize(("n", "is_cause"), [(2, False), (3, True)])
def test_failures_of_more_than_one_percent_are_a_cause(n, is_cause):
    assert (summarized(failing(n, "HTTP 500: boom", 500)).cause is not None) is is_cause


def test_failures_are_no_cause_where_most_misses_are_late():
    run = failing(10, "HTTP 429: slow down")
    rows = run.request_rows.copy()
    late = slice(100, 112)
    for name in ("first_token_s", "first_chunk_s", "first_answer_s", "last_token_s", "done_s"):
        rows[name][late] += 1.0
    assert summarized(replace(run, request_rows=rows)).cause is None


def test_a_run_that_met_its_slos_has_the_cause_of_its_failures_as_a_note():
    slo = ("ttft<=500ms", "attainment>=80%")
    summary = summarized(failing(10, "HTTP 429: slow down", slo=slo))
    assert summary.verdict == "met"
    assert summary.findings[0] == summary.cause.sentence
    assert "cause" not in summary.reason_kinds


def test_a_servers_sentence_is_on_one_line_and_bounded():
    assert shown("a\x1b[31m\n b\u202ec\t") == "a [31m b c"
    assert shown("x" * 201) == "x" * 199 + "…"
    assert shown("x" * 200) == "x" * 200


def on_addresses(run, of_row):
    rows = run.request_rows.copy()
    rows["remote_id"] = of_row
    remotes = ("", *(f"10.0.0.{k}:8000" for k in range(1, 5)))
    return replace(run, request_rows=rows, names=replace(run.names, remotes=remotes))


def test_a_sick_replica_is_named_with_its_address():
    run = failing(48, "HTTP 500: CUDA error", 500, each=4)  # row 30, 34, …: address 30 % 4 + 1
    summary = summarized(on_addresses(run, np.arange(220) % 4 + 1))
    assert (summary.cause.kind, summary.cause.address) == ("sick_replica", "10.0.0.3:8000")
    assert summary.cause.sentence == (
        "One of 4 addresses is sick, 10.0.0.3:8000: 48 of 50 requests to it were missed, 0 of 150 "
        'to the others: HTTP 500: "CUDA error".'
    )
    assert not summary.cause.is_about_load


def test_a_slow_replica_is_sick_by_its_ttft():
    run = on_addresses(measured_run(slo=SLO), np.arange(220) % 4 + 1)
    rows = run.request_rows.copy()
    slow = rows["remote_id"] == 2
    for name in ("first_token_s", "first_chunk_s", "first_answer_s", "last_token_s", "done_s"):
        rows[name][slow] += 2.0
    cause = summarized(replace(run, request_rows=rows)).cause
    assert cause.kind == "sick_replica"
    assert cause.sentence == (
        "One of 4 addresses is sick, 10.0.0.2:8000: 50 of 50 requests to it were missed, 0 of 150 "
        "to the others: median TTFT 2.1 s against 99.6 ms."
    )


def test_failures_that_are_spread_over_all_addresses_are_of_no_replica():
    run = on_addresses(failing(40, "HTTP 500: boom", 500), np.arange(220) % 4 + 1)
    assert summarized(run).cause.kind == "failed_alike"


def failed_rows_of(run, failed):
    """The run with those rows failed by HTTP 500."""
    rows = run.request_rows.copy()
    rows["status"][failed], rows["http_status"][failed] = Status.http_error, 500
    rows["error_id"][failed] = rows["chunks"][failed] = 0
    rows["first_token_s"][failed] = np.nan
    chunks = run.chunk_rows[~np.isin(run.chunk_rows["request_id"], rows["request_id"][failed])]
    return replace(run, request_rows=rows, chunk_rows=chunks)


@pytest.mark.parametrize(
    ("n_requests", "of_first", "of_second", "is_sick"),
    [
        (220, 70, 40, False),  # 100 requests each: 70 % is less than 3 times 40 %
        (220, 70, 20, True),
        (30, 3, 0, False),  # 5 requests each: may be chance
        (30, 5, 0, False),
        (60, 15, 0, True),
    ],
)
def test_a_replica_is_sick_if_it_misses_three_times_as_much_and_not_by_chance(
    n_requests, of_first, of_second, is_sick
):
    rows = np.arange(n_requests)
    run = on_addresses(measured_run(n_requests=n_requests, slo=SLO), rows % 2 + 1)
    first, second = (rows[WARMUP:][rows[WARMUP:] % 2 == k] for k in (0, 1))
    failed = np.r_[first[:of_first], second[:of_second]]
    assert (summarized(failed_rows_of(run, failed)).cause.kind == "sick_replica") is is_sick


def with_running(run, running, waiting=0.0):
    """The run with 20 readings of the server's own gauges."""
    server = np.zeros(40, SERVER)
    server["t_s"] = np.repeat(np.arange(2.5, 22.5), 2)
    server["series_id"] = np.tile([0, 1], 20)
    server["value"] = np.tile([running, waiting], 20)
    names = replace(run.names, series=("running", "waiting"))
    return replace(run, server_rows=server, names=names)


@pytest.mark.parametrize(
    ("running", "waiting", "kind"), [(2, 0, "gateway_queue"), (2, 18, None), (20, 0, None)]
)
def test_requests_that_the_server_does_not_have_wait_in_front_of_it(running, waiting, kind):
    run = measured_run(n_requests=220, ttft_s=2.0, slo=SLO)  # 10/s for 2.2 s: about 22 in flight
    cause = summarized(with_running(run, running, waiting)).cause
    assert (cause and cause.kind) == kind
    if cause is not None:
        assert cause.is_about_load
        assert cause.sentence.startswith("Requests waited in front of the server: 2")
        assert "but the server had 2 (running and waiting, by its own metrics)" in cause.sentence


def frozen(at_s=12.0, slo=SLO, **manifest):
    """A run of which no byte came after `at_s`, ended by that 12 s later."""
    run = measured_run(slo=slo)
    rows, chunks = run.request_rows.copy(), run.chunk_rows
    cut = rows["done_s"] > at_s
    rows["status"][cut] = Status.cancelled
    for name in ("headers_s", "first_token_s", "first_chunk_s", "first_answer_s", "last_token_s"):
        rows[name][cut & (rows[name] > at_s)] = np.nan
    rows["done_s"][cut] = at_s + 12.0
    chunks = chunks[chunks["received_s"] <= at_s]
    rows["chunks"] = np.bincount(chunks["request_id"], minlength=len(rows))
    frozen = replace(run, request_rows=rows, chunk_rows=chunks)
    end = {"ended": "stopped", "end_reason": "silence", "end_kind": "silent"}
    return with_manifest(frozen, **end, silent_since_s=at_s + 0.2, **manifest)


def test_a_server_that_stopped_answering_has_missed_and_was_not_overloaded():
    summary = summarized(frozen())
    assert (summary.verdict, summary.exit_code) == ("missed", 1)
    assert summary.cause.kind == "stopped_answering"
    assert summary.cause.since_s == pytest.approx(11.98, abs=0.02)
    assert (
        summary.reasons[0]
        == summary.cause.sentence
        == (
            "The server stopped answering at second 12: not a byte came after it, with 102 "
            "requests in flight."
        )
    )
    assert "overloaded" not in summary.reason_kinds
    assert "ended_early" not in summary.reason_kinds
    assert not any("pile up" in text or "verload" in text for text in summary.findings)
    assert not summary.cause.is_about_load


def ended_in_silence(for_s, at_s=12.0, sent_until_s=math.inf):
    """A run that ended as planned `for_s` after its last byte came at `at_s`."""
    run = frozen(at_s)
    rows = run.request_rows.copy()
    waiting = rows["status"] == Status.cancelled
    rows["done_s"][waiting] = at_s + for_s
    rows = rows[rows["sent_s"] < sent_until_s]
    chunks = run.chunk_rows[run.chunk_rows["request_id"] < len(rows)]
    end = {"ended": "completed", "end_reason": "", "end_kind": "other", "silent_since_s": None}
    return with_manifest(replace(run, request_rows=rows, chunk_rows=chunks), **end)


def test_a_server_that_was_silent_until_the_planned_end_had_stopped_answering():
    run = ended_in_silence(for_s=9.0)
    assert silent_at_end(run) == pytest.approx(11.98, abs=0.02)
    cause = summarized(run).cause
    assert cause.kind == "stopped_answering"
    assert cause.since_s == pytest.approx(11.98, abs=0.02)


def test_a_short_silence_or_one_that_nothing_was_sent_into_is_no_frozen_server():
    assert silent_at_end(ended_in_silence(for_s=2.9)) is None
    assert silent_at_end(ended_in_silence(for_s=3.1)) is not None
    # of the requests that wait, the last was sent before the last byte
    assert silent_at_end(ended_in_silence(for_s=9.0, sent_until_s=11.95)) is None
    assert silent_at_end(measured_run(slo=SLO)) is None


def test_a_silence_as_long_as_five_of_the_gaps_before_is_no_frozen_server():
    run = ended_in_silence(for_s=9.0)
    rows, chunks = run.request_rows.copy(), run.chunk_rows
    quiet = (rows["released_s"] > 4.0) & (rows["released_s"] < 6.5)
    kept = rows[~quiet]
    chunks = chunks[np.isin(chunks["request_id"], kept["request_id"])]
    # no byte for more than 2 s from second 4 on: 9 s are less than five times that
    assert silent_at_end(replace(run, request_rows=kept, chunk_rows=chunks)) is None


def test_a_frozen_server_without_an_slo_gives_no_verdict_and_fails():
    summary = summarized(frozen(slo=()))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reasons[0] == summary.cause.sentence


def test_a_run_that_was_refused_from_its_first_request_on_is_not_said_twice():
    run = failing(1, "HTTP 400: bad field", 400)
    rows = run.request_rows.copy()
    rows["status"], rows["http_status"], rows["error_id"] = Status.http_error, 400, 2
    end = {"ended": "stopped", "end_reason": "refused: HTTP 400: bad field", "end_kind": "refused"}
    summary = summarized(with_manifest(replace(run, request_rows=rows), **end))
    assert (summary.verdict, summary.exit_code) == ("no_verdict", 3)
    assert summary.reasons == (
        '200 of 200 requests failed alike with HTTP 400: "bad field".',
        "The run was stopped, because its first requests all failed alike.",
    )


def dropping(n, slo=SLO):
    """A run with at most 8 requests in flight, of whose 200 due requests `n` were not sent."""
    run = measured_run(slo=slo)
    rows = run.request_rows.copy()
    dropped = WARMUP + 10 + np.arange(n)
    rows["status"][dropped] = Status.dropped
    for name in ("sent_s", "first_token_s", "first_chunk_s", "first_answer_s", "last_token_s"):
        rows[name][dropped] = np.nan
    rows["chunks"][dropped] = rows["output_tokens"][dropped] = 0
    chunks = run.chunk_rows[~np.isin(run.chunk_rows["request_id"], rows["request_id"][dropped])]
    limits = {"max_concurrency": 8, "when_full": "drop"}
    run = with_manifest(run, scenario={"resolved": {"limits": limits}})
    return replace(run, request_rows=rows, chunk_rows=chunks)


def test_requests_that_were_dropped_are_the_cause_and_stand_once():
    summary = summarized(dropping(90))
    cause = summary.cause
    assert (cause.kind, cause.n, cause.is_about_load) == ("dropped", 90, False)
    assert (
        summary.reasons[0]
        == cause.sentence
        == (
            "90 of 200 requests were dropped, because 8 were in flight when they were due "
            "(limits.max_concurrency); they count as failed."
        )
    )
    assert "--concurrency 8 without --rate and --max-concurrency" in cause.advice
    assert cause.sentence not in summary.findings
    met = summarized(dropping(10, ("ttft<=500ms", "attainment>=80%")))
    assert met.findings.count(met.cause.sentence) == 1


def test_few_dropped_requests_are_no_cause_but_a_note():
    summary = summarized(dropping(1))
    assert summary.cause is None
    assert any("1 of 200 requests were dropped" in note for note in summary.findings)


def test_an_overload_is_a_cause_and_stands_once():
    run = measured_run(slo=SLO)
    rows = run.request_rows.copy()
    late_s = np.maximum(0.0, rows["released_s"] - 2.0) * 0.9
    for name in ("headers_s", "first_token_s", "first_chunk_s", "first_answer_s", "last_token_s",
                 "done_s"):  # fmt: skip
        rows[name] += late_s
    summary = summarized(replace(run, request_rows=rows))
    assert summary.cause.kind == "overload"
    assert summary.reasons.count(summary.cause.sentence) == 1
    assert summary.reason_kinds[0] == "overloaded"


def test_no_delay_of_the_load_generator_explains_a_frozen_server():
    run = frozen()
    late = run.request_rows.copy()
    late["sent_s"] += 0.6  # beyond the limit of 500 ms
    summary = summarized(replace(run, request_rows=late))
    assert (summary.verdict, summary.validity.trusted) == ("missed", True)
