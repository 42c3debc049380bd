"""Stop rules, payloads, the recorder's names and the live view."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.drive.instrument import waiting_s
from loadgen.drive.payloads import HttpHead, Payloads
from loadgen.drive.progress import Progress
from loadgen.drive.recorder import Ids, ShardRecorder
from loadgen.drive.stop_rules import ErrorRate
from loadgen.drive.transport import Exchange
from loadgen.records import SCHEDULE, Status
from targets.base import Request
from targets.openai_chat import OpenAIChat


def test_a_failing_server_stops_the_run_after_the_window():
    rule = ErrorRate(limit=0.5, over_s=10.0)
    reasons = [rule.reason(t, n_ended=5 * t, n_failed=4 * t) for t in range(15)]
    assert reasons[:10] == [None] * 10
    assert reasons[10] == "40 of 50 requests failed in the last 10 s (stop_when.error_rate 50%)"


def test_a_share_of_failures_at_the_limit_does_not_stop_the_run():
    rule = ErrorRate(limit=0.5, over_s=10.0)
    assert [rule.reason(t, n_ended=4 * t, n_failed=2 * t) for t in range(15)] == [None] * 15


def test_an_old_failure_is_forgotten():
    rule = ErrorRate(limit=0.5, over_s=10.0)
    totals = [
        (t, 10 * t, min(10 * t, 40)) for t in range(60)
    ]  # everything fails for 4 s, then none
    assert all(rule.reason(*total) is None for total in totals)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=80))
def test_the_rule_agrees_with_a_walk_over_the_endings(steps):
    rule, history, now_s, ended, failed = ErrorRate(0.3, 20.0), [(0.0, 0, 0)], 0.0, 0, 0
    for n, is_failing in steps:
        now_s, ended, failed = now_s + 1.0, ended + n, failed + n * is_failing
        before = [entry for entry in history if entry[0] <= now_s - 20.0]
        expected = False
        if before:
            expected = ended - before[-1][1] >= 10
            expected &= failed - before[-1][2] > 0.3 * (ended - before[-1][1])
        assert (rule.reason(now_s, ended, failed) is not None) == expected
        history.append((now_s, ended, failed))


def payloads(n=4, tokens=10, **options):
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = 100 + np.arange(n)
    schedule["scheduled_s"] = np.arange(n) * 6.0
    schedule["input_tokens"] = tokens
    schedule["output_tokens"] = 7
    head = HttpHead("host:1", "/base", (("authorization", "Bearer secret"),))
    schedule["temperature"] = 0.5
    return Payloads(schedule, say, OpenAIChat(model="m"), head, "run", **options)


def say(row, answer):
    return Request(f"prompt {row}", output_tokens=0)


def test_a_payload_is_one_http_request_with_its_ids():
    made = payloads()
    made.extend(0.0)
    head, _, body = made.take(2).partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    assert first == "POST /base/v1/chat/completions HTTP/1.1"
    names = dict(field.split(": ", 1) for field in fields)
    assert names["host"] == "host:1"
    assert names["authorization"] == "Bearer secret"
    assert names["x-request-id"] == "332a2d18-cc10-5642-ae12-db53452f119e"
    assert names["x-seq"] == "102"
    assert names["accept-encoding"] == "identity"
    assert int(names["content-length"]) == len(body)
    said = json.loads(body)
    assert said["messages"][-1]["content"] == "prompt 2"
    assert (said["temperature"], said["stream"]) == (0.5, True)
    assert made.n_late == 0


def test_long_schedules_are_encoded_a_window_ahead():
    made = payloads(n=5, tokens=120_000_000)
    assert made.extend(0.0) is False
    made.take(0), made.take(1)
    assert made.n_late == 0
    made.take(3)
    assert made.n_late == 1
    made.extend(20.0)
    made.take(2), made.take(4)
    assert made.n_late == 1
    assert not made._ready, "a row that was sent before its turn is not encoded again"


def test_encoding_stops_when_its_time_is_up_and_says_so():
    made = payloads(n=4)
    assert made.extend(0.0, for_s=-1.0) is True
    assert made.extend(0.0) is False


def test_a_secret_is_in_no_repr():
    assert "secret" not in repr(HttpHead("h", "", (("authorization", "secret"),)))


def test_distinct_error_texts_cannot_fill_the_table():
    ids = Ids()
    first = [ids.id(f"error {i}") for i in range(5000)]
    assert first[0] == 1
    assert max(first) < 65536
    assert len(set(first)) < 1100
    assert "different texts" in ids.texts()[first[-1]]
    assert ids.id("") == 0


def exchange_of(row, body=b"", status=500):
    made = Exchange(row, sent_ns=1_000_000_000, http_status=status, headers_ns=1, done_ns=2)
    made.content_type = "text/event-stream"
    made.parts = [body[i : i + 7] for i in range(0, len(body), 7)]
    made.times = [1_000_000_000 + i for i in range(len(made.parts))]
    made.n_bytes = len(body)
    return made


def recorder_of(tmp_path, n=3, **options):
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = 4 + np.arange(n)
    return ShardRecorder(schedule, OpenAIChat(), 0, 1, tmp_path / "bodies", **options)


def test_bodies_past_the_memory_limit_go_to_disk_and_come_back(tmp_path):
    recorder = recorder_of(tmp_path, memory_bytes=50)
    for row in range(3):
        recorder.ended(exchange_of(row, b"x" * 20 + b"%d" % row * 10))
    assert recorder.spilled_bytes == 60
    rows, chunks, names = recorder.finish()
    assert rows["status"].tolist() == [Status.http_error] * 3
    assert rows["sent_s"].tolist() == [1.0] * 3
    assert set(rows["shard"]) == {1}
    assert len(chunks) == 0
    texts = [names.errors[i] for i in rows["error_id"]]
    assert texts == [f"HTTP 500: {'x' * 20}{str(row) * 10}" for row in range(3)]
    assert not (tmp_path / "bodies").exists()


def test_a_body_that_breaks_the_codec_costs_its_own_row_only(tmp_path):
    token = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'

    class Broken(OpenAIChat):
        def decode(self, event):
            raise OverflowError("a bug of a codec")

    schedule = np.zeros(2, SCHEDULE)
    recorder = ShardRecorder(schedule, Broken(), 0, 0, tmp_path / "bodies")
    recorder.ended(exchange_of(0, token, status=200))
    recorder.unsent(1, Status.dropped, "full")
    rows, _, names = recorder.finish()
    assert rows["status"].tolist() == [Status.stream_error, Status.dropped]
    assert "OverflowError: a bug of a codec" in names.errors[rows["error_id"][0]]


def test_a_count_no_server_can_mean_is_unknown(tmp_path):
    body = (
        b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":100000}}\n\ndata: [DONE]\n\n'
    ) % (b"x" * 100_000)
    recorder = recorder_of(tmp_path, n=1)
    recorder.ended(exchange_of(0, body, status=200))
    rows, chunks, _ = recorder.finish()
    assert rows["status"].tolist() == [Status.ok]
    assert rows["first_chunk_tokens"].tolist() == [0]
    assert chunks["tokens"].tolist() == [0]
    assert rows["output_tokens"].tolist() == [100_000]


def test_rows_nobody_accounted_for_are_lost_with_the_reason(tmp_path):
    recorder = recorder_of(tmp_path, n=2)
    recorder.ended(exchange_of(1, b"no"))
    rows, _, names = recorder.finish("the load generator failed: X")
    assert rows["status"].tolist() == [Status.lost, Status.http_error]
    assert names.errors[rows["error_id"][0]] == "the load generator failed: X"


def test_an_echoed_key_is_taken_out_of_what_is_kept(tmp_path):
    head = HttpHead("h", "", (("authorization", "Bearer SEKRET12345"), ("x-n", "7")))
    recorder = recorder_of(tmp_path, n=1, redact=head.redact)
    recorder.ended(exchange_of(0, b"bad key Bearer SEKRET12345 (7)"))
    rows, _, names = recorder.finish()
    assert names.errors[rows["error_id"][0]] == "HTTP 500: bad key [redacted] (7)"


def test_waking_up_is_no_contention_and_waiting_for_a_core_is():
    idle = waiting_s("1000000000 150000000 10000\n")  # 15 µs at each of 10 000 wake-ups
    shared = waiting_s("1000000000 4000000000 1000\n")  # 4 ms at each of 1 000
    assert idle == pytest.approx(-0.35)
    assert shared == pytest.approx(3.95)


def beat(now_s, **counts):
    by_status = [0] * len(Status)
    by_status[Status.ok], by_status[Status.timeout] = counts["ok"], counts["timeout"]
    by_status[Status.cancelled] = counts.get("cancelled", 0)
    return {
        "now_s": now_s, "released": counts["ok"] + counts["timeout"], "sent": 0, "in_flight": 3,
        "waiting": 0, "by_status": by_status, "ttft_s": [0.1] * 10, "lateness_s": [0.0001],
        "e2e_s": [], "withdrawn": counts.get("withdrawn", 0), "measured": 0,
    }  # fmt: skip


def test_the_live_view_sums_shards_and_prints_lines_without_a_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 100, 60.0, is_closed_loop=False) as progress:
        progress.begin()
        progress.beat(0, beat(4.0, ok=8, timeout=0))
        totals = progress.beat(1, beat(6.0, ok=6, timeout=2))
        progress.note("ending the run: because")
    assert (totals.released, totals.in_flight, totals.n_failed, totals.n_ended) == (16, 6, 2, 16)
    first, line, note = out.getvalue().splitlines()
    assert first == "sending 100 requests in 60 s"
    assert line.startswith("6/60 s · sent 16/100 (2.7/s, offered 1.7/s) · in flight 6")
    assert "failed 2" in line
    assert "TTFT p50 100 ms" in line
    assert note == "ending the run: because"


def test_the_live_view_of_a_closed_loop_shows_no_planned_rate():
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 100, 60.0, is_closed_loop=True) as progress:
        progress.begin()
        progress.beat(0, beat(6.0, ok=12, timeout=0))
    first, line = out.getvalue().splitlines()
    assert first == "sending up to 100 requests in 60 s"
    assert line.startswith("6/60 s · sent 12 (2.0/s) · in flight 3")


def test_what_was_cancelled_on_purpose_or_at_the_drain_has_not_failed():
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 100, 60.0, is_closed_loop=False) as progress:
        totals = progress.beat(0, beat(6.0, ok=6, timeout=2, cancelled=7, withdrawn=3))
    assert (totals.n_ended, totals.n_failed, totals.n_unfinished) == (15, 2, 4)
    assert "failed 2, unfinished 4, cancelled on purpose 3" in out.getvalue()


def test_the_live_view_draws_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Progress(console, 100, 60.0, is_closed_loop=False) as progress:
        progress.beat(0, beat(30.0, ok=50, timeout=0))
    assert "sent 50/100" in out.getvalue()
