"""The mock follows its script: checked by its bytes on a real socket and by its own log."""

import csv
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from loadgen.errors import UsageError
from targets.embed import mock


class Wire:
    """A bare HTTP/1.1 connection: the bytes sent and received."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, body=None, *, path="/v1/chat/completions", method="POST", **headers):
        content = json.dumps(body).encode() if isinstance(body, dict) else body or b""
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    def read_until(self, end):
        """Everything up to and including `end`, or up to the connection's end; the rest is kept."""
        while end not in self.rest:
            more = self.socket.recv(65536)
            if not more:
                data, self.rest = self.rest, b""
                return data
            self.rest += more
        data, _, self.rest = self.rest.partition(end)
        return data + end

    def read_response(self):
        """(status, body) of a response with a content length."""
        head = self.read_until(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        while len(self.rest) < length:
            self.rest += self.socket.recv(65536)
        body, self.rest = self.rest[:length], self.rest[length:]
        return int(head.split()[1]), body

    def read_events(self):
        """The parsed events of a chunked stream; `[DONE]` as text."""
        raw = self.read_until(b"0\r\n\r\n")
        lines = [line for line in raw.split(b"\n") if line.startswith(b"data: ")]
        return [
            json.loads(line[6:]) if line[6:].strip() != b"[DONE]" else "[DONE]" for line in lines
        ]


def request_body(tokens=4, **fields):
    return {
        "model": "mock-model",
        "messages": [{"role": "user", "content": "x" * 40}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def texts(events):
    """The non-empty contents in order."""
    deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]" and e["choices"]]
    return [d["content"] for d in deltas if d.get("content")]


def read_log(path):
    with path.open() as lines:
        return [
            {k: v if k in ("api", "outcome") else int(v) for k, v in row.items()}
            for row in csv.DictReader(lines)
        ]


def test_a_stream_has_a_role_tokens_a_finish_usage_and_done(mock_url):
    with Wire(mock_url) as wire:
        wire.send(request_body(3))
        events = wire.read_events()
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(events) == [" the", " model", " of"]
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["usage"] == {
        "prompt_tokens": 18,
        "total_tokens": 21,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert events[-1] == "[DONE]"


def test_completions_have_text_and_no_role(mock_url):
    with Wire(mock_url) as wire:
        body = {"prompt": "x" * 40, "max_tokens": 2, "stream": True}
        wire.send(body, path="/v1/completions")
        events = wire.read_events()
    assert [e["choices"][0]["text"] for e in events[:-1]] == [" the", " model", ""]
    assert events[-1] == "[DONE]"
    assert not [event for event in events[:-1] if "usage" in event]


def test_a_reply_that_is_not_streamed_is_one_body(mock_url):
    with Wire(mock_url) as wire:
        wire.send(request_body(2, stream=False))
        status, body = wire.read_response()
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == " the model"
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_running_usage_counts_coalesced_tokens(mock_url):
    options = {"include_usage": True, "continuous_usage_stats": True}
    with Wire(mock_url) as wire:
        wire.send(request_body(5, stream_options=options), x_mock="coalesce=2")
        events = wire.read_events()
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == [0, 2, 4, 5, 5, 5]
    assert texts(events) == [" the model", " of latency", " token"]


def test_reasoning_comes_before_content(mock_url):
    with Wire(mock_url) as wire:
        wire.send(request_body(3), x_mock="reasoning=2,role=off")
        events = wire.read_events()
    keys = [next(iter(e["choices"][0]["delta"]), None) for e in events[:3]]
    assert keys == ["reasoning_content", "reasoning_content", "content"]


def test_a_prompt_has_its_own_answer_and_always_the_same(mock_url):
    with Wire(mock_url) as wire:
        replies = []
        for number in range(32):
            said = {"messages": [{"role": "user", "content": f"prompt {number % 16}"}]}
            wire.send({**request_body(20), **said}, x_seq=str(number))
            replies.append("".join(texts(wire.read_events())))
    assert replies[:16] == replies[16:]
    assert len(set(replies)) == 16
    assert {reply.lower() for reply in replies} == {replies[0].lower()}


def test_one_connection_serves_many_requests_also_pipelined(mock_url):
    with Wire(mock_url) as wire:
        for _ in range(3):
            wire.send(request_body(2))
            assert len(texts(wire.read_events())) == 2
        wire.send(method="GET", path="/v1/models")
        assert json.loads(wire.read_response()[1])["data"][0]["id"] == "mock-model"
        wire.send(request_body(1))
        wire.send(method="GET", path="/health")
        assert texts(wire.read_events()) == [" the"]
        assert wire.read_response() == (200, b"{}")


@pytest.mark.parametrize(
    ("body", "script", "status", "message"),
    [
        (b"{", "", 400, "truncated"),
        (request_body(0), "", 400, "max_tokens is 0"),
        (request_body(1, model="other"), "", 404, "The model `other` does not exist."),
        (request_body(100), "max_model_len=100", 400, "maximum context length is 100 tokens"),
        (request_body(1, ignore_eos=True), "reject=ignore_eos", 400, "ignore_eos"),
        (request_body(1), "api_key=k", 401, "Incorrect API key"),
        (request_body(1), "fail=503", 503, "scripted failure 503"),
        (request_body(1), "nonsense=1", 400, "unknown mock option 'nonsense'"),
    ],
)
def test_a_rejected_request_is_an_error_body_and_the_connection_lives(
    mock_url, body, script, status, message
):
    with Wire(mock_url) as wire:
        wire.send(body, x_mock=script)
        actual, text = wire.read_response()
        assert actual == status
        assert message in json.loads(text)["error"]["message"]
        wire.send(request_body(1))
        assert texts(wire.read_events()) == [" the"]


def test_a_thousand_pipelined_refusals_are_each_answered(mock_url):
    body = json.dumps(request_body(1)).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-mock: fail=503\r\nx-seq: \xb2\r\n"
    with Wire(mock_url) as wire:
        wire.socket.sendall((one + b"content-length: %d\r\n\r\n" % len(body) + body) * 1000)
        wire.send(request_body(1))
        answers = wire.read_until(b"[DONE]")
    assert answers.count(b"HTTP/1.1 503 Service Unavailable") == 1000
    assert answers.count(b"HTTP/1.1 200 OK") == 1


def test_a_request_that_is_not_http_is_answered_with_400_and_closed(mock_url):
    with Wire(mock_url) as wire:
        wire.socket.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert wire.read_until(b"never").startswith(b"HTTP/1.1 400")


def test_scripted_failures_break_the_stream_as_scripted(mock_url):
    def raw(script):
        with Wire(mock_url) as wire:
            wire.send(request_body(8), x_mock=f"{script},itl=0ms")
            return wire.read_until(b"0\r\n\r\n")

    assert raw("fail=cut").count(b'"content":" ') == 4
    assert not raw("fail=cut").endswith(b"0\r\n\r\n")
    assert b"\xff\xfe" in raw("fail=utf8")
    assert raw("fail=utf8").endswith(b"0\r\n\r\n")
    inband = raw("fail=inband")
    assert inband.count(b'"content":" ') == 4
    assert b'data: {"error": {"message": "scripted failure in mid-stream"' in inband
    short = raw("fail=short")
    assert short.count(b'"content":" ') == 4
    assert b'"finish_reason":"stop"' in short
    assert short.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    with Wire(mock_url) as wire:
        wire.send(request_body(8), x_mock="fail=notsse")
        status, page = wire.read_response()
    assert (status, page[:15]) == (200, b"<!doctype html>")
    assert b"[DONE]" not in raw("done=off")
    with pytest.raises(ConnectionResetError):
        raw("fail=reset")


def test_the_log_holds_the_outcome_and_the_instants_of_each_request(tmp_path):
    """Structure only: writes come after their deadlines, in order, on the script's grid."""
    truth = tmp_path / "truth.csv"
    before_ns = time.monotonic_ns()
    with mock({"ttft": "20ms", "itl": "5ms", "fail": "cut:50%"}, tmp_path, truth=truth) as served:
        with Wire(served.endpoint.url) as wire:
            sent_ns = time.monotonic_ns()
            wire.send(request_body(6), x_seq=7, x_mock="role=early")
            assert wire.read_until(b" the")
            first_ns = time.monotonic_ns()
            wire.read_until(b"0\r\n\r\n")
        with Wire(served.endpoint.url) as wire:
            wire.send(request_body(1000), x_mock="fail=hang")
        with Wire(served.endpoint.url) as wire:
            wire.send(request_body(4), x_mock="fail=500")
            wire.read_response()
    first, hung, refused = read_log(truth)
    assert (first["seq"], first["number"], first["api"], first["asked_tokens"]) == (7, 0, "chat", 6)
    assert first["prompt_tokens"] == 18
    assert before_ns < sent_ns < first["read_ns"] < first["first_ns"] < first_ns
    assert first["due_ns"] - first["read_ns"] == 20_000_000
    assert first["first_ns"] >= first["due_ns"]
    sent, lasts_ns = first["sent_tokens"], first["last_ns"] - first["due_ns"]
    assert sent == {"ok": 6, "cut": 3}[first["outcome"]]
    assert lasts_ns >= (sent - 1) * 5_000_000
    assert first["done_ns"] >= first["last_ns"]
    assert first["late_max_ns"] >= first["first_ns"] - first["due_ns"]
    assert (hung["outcome"], hung["seq"], hung["first_ns"]) == ("aborted", -1, 0)
    assert (refused["outcome"], refused["sent_tokens"]) == ("500", 0)


def test_the_same_seed_fails_the_same_requests_in_any_order(tmp_path):
    outcomes = []
    for order in (range(20), reversed(range(20))):
        truth = tmp_path / "truth.csv"
        options = {"ttft": "0ms", "itl": "0ms", "fail": "500:30%;401:20%", "seed": "5"}
        with mock(options, tmp_path, truth=truth) as served, Wire(served.endpoint.url) as wire:
            for seq in order:
                wire.send(request_body(1, stream=False), x_seq=seq)
                wire.read_response()
        outcomes.append({row["seq"]: row["outcome"] for row in read_log(truth)})
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0].values()) == {"ok", "500", "401"}


def test_a_stall_holds_back_every_reply_until_its_end(tmp_path):
    truth = tmp_path / "truth.csv"
    options = {"ttft": "10ms", "itl": "10ms", "stall": "300ms@50ms"}
    with mock(options, tmp_path, truth=truth) as served, Wire(served.endpoint.url) as wire:
        wire.send(
            request_body(1)
        )  # without a number: the stall's clock starts at the first with one
        wire.read_events()
        wire.send(request_body(12), x_seq=0)
        wire.read_events()
    _, row = read_log(truth)
    start_ns = row["read_ns"]
    assert row["first_ns"] - start_ns >= 10_000_000
    # Tokens due from 50 to 120 ms were written at 350 ms or later; the grid itself did not move.
    assert row["last_ns"] - start_ns >= 350_000_000
    assert row["sent_tokens"] == 12


def test_the_server_starts_only_with_a_script_it_understands(tmp_path):
    with pytest.raises(UsageError, match="unknown mock option 'ttfs'; did you mean 'ttft'"):
        mock({"ttfs": "1s"}, tmp_path).__enter__()
    with pytest.raises(UsageError, match="mock: mock option ttft '5': '5' is not a duration"):
        mock({"ttft": "5"}, tmp_path).__enter__()


def test_a_busy_port_is_one_line(tmp_path):
    with mock({}, tmp_path) as served:
        port = served.endpoint.url.rsplit(":", 1)[1]
        with pytest.raises(UsageError, match=rf"cannot serve on 127\.0\.0\.1:{port}: .*in use"):
            mock({"port": port}, tmp_path / "second").__enter__()


def test_a_signal_ends_it_with_its_log_written(tmp_path):
    log = tmp_path / "log.csv"
    command = [
        sys.executable,
        "-u",
        "-m",
        "targets.mock_server",
        "--ttft",
        "1ms",
        "--log",
        str(log),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready, url = server.stdout.readline().split()
        with Wire(url) as wire:
            wire.send(request_body(1))
            wire.read_events()
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
    assert ready == "READY"
    assert [row["outcome"] for row in read_log(log)] == ["ok"]


def test_a_wrong_flag_is_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "targets.mock_server", "--tfft", "1ms"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: unrecognized arguments: --tfft 1ms\n"
