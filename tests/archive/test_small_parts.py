"""Stop rules, payloads, the recorder's names and the live view."""

import json
import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.exchange import Exchange
from loadgen.archive.part_decoder import PartDecoder, claim, decode_left
from loadgen.archive.store import Ids, merge_parts, read_parts
from loadgen.drive.decoder_process import DecoderProcess
from loadgen.drive.instrument import waiting_s
from loadgen.drive.payloads import HttpHead, Payloads, rows_ahead
from loadgen.drive.prefork import may_fork
from loadgen.drive.recorder import ShardRecorder
from loadgen.records import SCHEDULE, Status
from loadgen.run.stop_rules import ErrorRate
from targets.base import Request
from targets.openai_chat import OpenAIChat
from tests.waits import wait_until


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


def payloads(n=4, tokens=10, render=None, **options):
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = 100 + np.arange(n)
    schedule["scheduled_s"] = np.arange(n) * 6.0
    schedule["input_tokens"] = tokens
    schedule["output_tokens"] = 7
    head = HttpHead("host:1", "/base", (("authorization", "Bearer secret"),))
    schedule["temperature"] = 0.5
    return Payloads(schedule, render or say, OpenAIChat(model="m"), head, "run", **options)


def say(row, answer, reasoning):
    return Request(f"prompt {row}", output_tokens=0)


def test_a_payload_is_one_http_request_with_its_ids():
    made = payloads()
    made.extend()
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


def test_of_large_requests_few_are_encoded_ahead():
    made, rendered = recorded_payloads(n=5, tokens=120_000_000)
    assert made.extend() is False
    assert rendered == [0, 1], "240 of at most 256 MiB"
    made.take(0), made.take(1)
    assert made.n_late == 0
    made.take(3)
    assert made.n_late == 1
    made.extend()
    made.take(2), made.take(4)
    assert made.n_late == 1
    assert rendered == [0, 1, 3, 2, 4], "a row that was sent before its turn is not encoded again"


def recorded_payloads(n, tokens=10):
    rendered = []

    def render(row, answer, reasoning):
        rendered.append(row)
        return say(row, answer, reasoning)

    return payloads(n, tokens, render=render), rendered


def test_of_many_requests_the_next_4096_are_encoded_ahead_in_order_of_time():
    made, rendered = recorded_payloads(n=6000)
    made.encode_first()
    assert rendered == list(range(4096))
    for row in range(1000):
        made.take(row)
    assert made.extend(for_s=-1.0) is True
    assert made.extend() is False
    assert rendered == list(range(5096))
    assert made.n_late == 0


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=60).map(sorted),
    st.floats(0.5, 50),
)
def test_the_rows_ahead_suffice_for_an_encoder_of_that_rate(times_s, per_s):
    """Walks through the schedule: the encoder may be at most that many rows ahead."""

    def is_enough(n_ahead):
        encoded, last_s = float(n_ahead), 0.0
        for n_due, time_s in enumerate(times_s, 1):
            encoded = min(encoded + per_s * (time_s - last_s), n_due - 1.0 + n_ahead)
            last_s = time_s
            if encoded < n_due - 1e-6:
                return False
        return True

    n_ahead = rows_ahead(np.array(times_s), per_s)
    assert is_enough(n_ahead)
    assert n_ahead <= 1 or not is_enough(n_ahead - 1)


def test_encoding_stops_when_its_time_is_up_and_says_so():
    made = payloads(n=4)
    assert made.extend(for_s=-1.0) is True
    assert made.extend() is False


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


def recorder_of(tmp_path, n=3, redact=str, adapter=None, **options):
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = 4 + np.arange(n)
    decoder = PartDecoder(1, adapter or OpenAIChat(), redact)
    return ShardRecorder(schedule, decoder, tmp_path / "shard-1.npz", **options)


def finished(recorder, tmp_path, lost=""):
    """The rows, chunks and names that a recorder writes."""
    recorder.finish(lost)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"] * len([*tmp_path.iterdir()])
    parts = read_parts(tmp_path)
    schedule = np.zeros(sum(len(rows) for rows, _, _ in parts), SCHEDULE)
    schedule["request_id"] = 4 + np.arange(len(schedule))
    return merge_parts(schedule, parts)


def assert_these_failed(part, n):
    rows, chunks, names = part
    assert rows["status"].tolist() == [Status.http_error] * n
    assert rows["sent_s"].tolist() == [1.0] * n
    assert rows["released_s"].tolist() == [0.5 + row for row in range(n)]
    assert set(rows["shard"]) == {1}
    assert len(chunks) == 0
    texts = [names.errors[i] for i in rows["error_id"]]
    assert texts == [f"HTTP 500: {'x' * 20}{str(row) * 10}" for row in range(n)]


def end_rows(recorder, rows):
    for row in rows:
        recorder.released(row, 0.5 + row)
        recorder.ended(exchange_of(row, b"x" * 20 + b"%d" % row * 10))


@pytest.mark.parametrize("n_written", [0, 1, 2, 3, 5, 9])
def test_a_full_part_goes_to_a_file_and_no_row_is_lost_wherever_the_run_ends(tmp_path, n_written):
    recorder = recorder_of(tmp_path, n=7, part_requests=3)
    end_rows(recorder, range(n_written // 2))
    for k in range(n_written // 2, 7):
        end_rows(recorder, [k])
        if k < n_written:
            recorder.write(for_s=-1.0)
    assert_these_failed(finished(recorder, tmp_path), 7)
    assert recorder.n_reads == 7 * 5


def test_parts_are_bounded_in_bytes_and_written_as_they_were_received(tmp_path):
    recorder = recorder_of(tmp_path, n=5, part_bytes=60)
    end_rows(recorder, range(5))
    assert recorder.write() is False
    assert recorder.written_bytes == 120
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "shard-1-0000.raw",
        "shard-1-0001.raw",
    ]
    assert_these_failed(finished(recorder, tmp_path), 5)


def test_what_a_dead_shard_wrote_is_decoded_up_to_the_last_whole_record(tmp_path):
    recorder = recorder_of(tmp_path, n=8, part_requests=2)
    end_rows(recorder, range(6))
    recorder.write()
    third = tmp_path / "shard-1-0002.raw"
    content = third.read_bytes()
    third.rename(third.with_suffix(".partial")).write_bytes(content[:-1])
    assert claim(tmp_path / "shard-1-0001.raw")
    decode_left(tmp_path)
    merged = merge_parts(rows_4_to(9), read_parts(tmp_path))
    assert_these_failed(merged, 5)
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}


def rows_4_to(end):
    schedule = np.zeros(end - 4, SCHEDULE)
    schedule["request_id"] = np.arange(4, end)
    return schedule


@pytest.mark.skipif(not may_fork(), reason="this process has other threads")
def test_without_an_idle_core_a_helper_decodes_after_the_run_only(tmp_path):
    helper = DecoderProcess(PartDecoder(1, OpenAIChat()), is_idle=False)
    recorder = recorder_of(tmp_path, n=7, part_requests=2, helper=helper)
    end_rows(recorder, range(7))
    recorder.write()
    assert {path.suffix for path in tmp_path.iterdir()} == {".raw"}
    assert_these_failed(finished(recorder, tmp_path), 7)
    assert recorder.helper_cpu_s > 0


@pytest.mark.faults
@pytest.mark.skipif(not may_fork(), reason="this process has other threads")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_helper_decodes_full_parts_meanwhile_and_its_death_costs_no_row(tmp_path, is_killed):
    helper = DecoderProcess(PartDecoder(1, OpenAIChat()), is_idle=True)
    recorder = recorder_of(tmp_path, n=7, part_requests=2, helper=helper, decodes_meanwhile=True)
    if is_killed:
        os.kill(helper.pid, signal.SIGKILL)
    end_rows(recorder, range(6))
    recorder.write()
    if not is_killed:
        wait_until(lambda: len([*tmp_path.glob("*.npz")]) == 3, 20.0, "no three parts")
    assert os.sched_getscheduler(helper.pid) == os.SCHED_IDLE or is_killed
    end_rows(recorder, [6])
    assert_these_failed(finished(recorder, tmp_path), 7)
    assert is_killed or recorder.helper_cpu_s > 0


def test_rows_that_were_never_sent_are_written_in_parts_too(tmp_path):
    n = 70_000
    recorder = recorder_of(tmp_path, n=n)
    for row in range(n - 2):
        recorder.unsent(row, Status.not_released, f"reason {row % 3}")
    end_rows(recorder, [n - 1])
    rows, _, names = finished(recorder, tmp_path)
    assert np.bincount(rows["status"]).tolist() == [0, 1, 0, 0, 0, 0, 0, n - 2, 1]
    texts = [names.errors[i] for i in rows["error_id"][[0, 1, 2, 3, n - 3, n - 2]]]
    assert texts == [
        "reason 0", "reason 1", "reason 2", "reason 0", "reason 1", "no end was recorded"
    ]  # fmt: skip
    assert len(read_parts(tmp_path)) == 2


def test_a_body_that_breaks_the_codec_costs_its_own_row_only(tmp_path):
    token = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'

    class Broken(OpenAIChat):
        def decode(self, event):
            raise OverflowError("a bug of a codec")

    recorder = recorder_of(tmp_path, n=2, adapter=Broken())
    recorder.ended(exchange_of(0, token, status=200))
    recorder.unsent(1, Status.dropped, "full")
    rows, _, names = finished(recorder, tmp_path)
    assert rows["status"].tolist() == [Status.stream_error, Status.dropped]
    assert "OverflowError: a bug of a codec" in names.errors[rows["error_id"][0]]


def test_a_count_no_server_can_mean_is_unknown(tmp_path):
    body = (
        b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":100000}}\n\ndata: [DONE]\n\n'
    ) % (b"x" * 100_000)
    recorder = recorder_of(tmp_path, n=1)
    recorder.ended(exchange_of(0, body, status=200))
    rows, chunks, _ = finished(recorder, tmp_path)
    assert rows["status"].tolist() == [Status.ok]
    assert rows["first_chunk_tokens"].tolist() == [0]
    assert chunks["tokens"].tolist() == [0]
    assert rows["output_tokens"].tolist() == [100_000]


def test_rows_nobody_accounted_for_are_lost_with_the_reason(tmp_path):
    recorder = recorder_of(tmp_path, n=2)
    recorder.ended(exchange_of(1, b"no"))
    rows, _, names = finished(recorder, tmp_path, "the load generator failed: X")
    assert rows["status"].tolist() == [Status.lost, Status.http_error]
    assert names.errors[rows["error_id"][0]] == "the load generator failed: X"


def test_an_echoed_key_is_taken_out_of_what_is_kept(tmp_path):
    head = HttpHead("h", "", (("authorization", "Bearer SEKRET12345"), ("x-n", "7")))
    recorder = recorder_of(tmp_path, n=1, redact=head.redact)
    recorder.ended(exchange_of(0, b"bad key Bearer SEKRET12345 (7)"))
    rows, _, names = finished(recorder, tmp_path)
    assert names.errors[rows["error_id"][0]] == "HTTP 500: bad key [redacted] (7)"


def test_waking_up_is_no_contention_and_waiting_for_a_core_is():
    idle = waiting_s("1000000000 150000000 10000\n")  # 15 µs at each of 10 000 wake-ups
    shared = waiting_s("1000000000 4000000000 1000\n")  # 4 ms at each of 1 000
    assert idle == pytest.approx(-0.35)
    assert shared == pytest.approx(3.95)
