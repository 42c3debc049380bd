"""The preflight against servers outside the mock's script: redirects, repeated secrets, control
characters, refused connections.
"""

import asyncio
import json
import socket
from dataclasses import dataclass, field

import pytest

from targets.endpoint import read_target
from targets.openai_chat import OpenAIChat
from targets.preflight import preflight
from targets.probe_request import parse_models
from targets.safe_text import error_message, one_line

KEY = "sk-do-not-show-me"
SECRET = "gw-4711-secret"
MODELS = b'{"data":[{"id":"m"}]}'
TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


@dataclass
class RudeServer:
    """Answers each request with the bytes its path is given, and keeps what it was sent."""

    models: bytes = b""
    completion: bytes = b""
    requests: list[bytes] = field(default_factory=list)

    async def answer(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the reachability check sends nothing
            head = b""
        if head:
            self.requests.append(head)
            writer.write(self.models if head.startswith(b"GET") else self.completion)
            await writer.drain()
        writer.close()


def http(status, body, *headers):
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def sse(body):
    return http(200, body, "content-type: text/event-stream")


def run_preflight(server, other=None, *, lines="", path=""):
    """(preflight of `server`, URL of `other`). `{other}` in an answer stands for that URL."""

    async def run():
        async with await asyncio.start_server((other or server).answer, "127.0.0.1", 0) as second:
            there = f"http://127.0.0.1:{second.sockets[0].getsockname()[1]}".encode()
            server.models = server.models.replace(b"{other}", there)
            server.completion = server.completion.replace(b"{other}", there)
            async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as first:
                port = first.sockets[0].getsockname()[1]
                text = (
                    f"url: http://127.0.0.1:{port}{path}\nheaders: {{x-api-key: {SECRET}}}\n{lines}"
                )
                endpoint = read_target(text, "t.yaml", {"OPENAI_API_KEY": KEY})
                result = await preflight(
                    endpoint,
                    endpoint.adapter(),
                    max_input_tokens=10,
                    max_output_tokens=10,
                    timeout_s=5.0,
                )
                return result, there.decode()

    return asyncio.run(run())


def check(result, name):
    return next(check for check in result.checks if check.check == name)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirected_completion_stops_and_no_header_goes_to_the_other_origin(status):
    other = RudeServer(completion=sse(TOKEN))
    moved = http(status, b"", "location: {other}/v1/chat/completions")
    result, there = run_preflight(RudeServer(http(200, MODELS), moved), other)
    assert f"answers {status} to {there}/v1/chat/completions: use that URL as --t" in result.fatal
    assert result.fatal.endswith("use that URL as --target")
    assert check(result, "completion").ok is False
    assert other.requests == []


def test_a_redirected_list_of_models_stops_before_anything_else_is_sent():
    other = RudeServer(models=http(200, MODELS))
    server = RudeServer(models=http(307, b"", "location: {other}/v1/models"))
    result, there = run_preflight(server, other)
    assert f"GET /v1/models answers 307 to {there}/v1/models: use that URL" in result.fatal
    assert (other.requests, len(server.requests)) == ([], 1)


def test_a_relative_redirect_is_shown_as_a_whole_url():
    result, _ = run_preflight(RudeServer(models=http(308, b"", "location: /proxy/v1/models")))
    url = result.fatal.partition(": GET")[0]
    assert f"answers 308 to {url}/proxy/v1/models: use" in result.fatal


def test_exact_lengths_of_an_api_without_a_field_for_them_are_not_promised():
    """Sixteen tokens came, which a server that ignores `ignore_eos` may have sent too."""
    token = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    token += b'"delta":"x"}\n\n'
    end = b'data: {"type":"response.completed","response":{"status":"incomplete",'
    end += b'"usage":{"input_tokens":9,"output_tokens":16}}}\n\n'
    server = RudeServer(http(200, MODELS), sse(token * 16 + end))
    result, _ = run_preflight(server, lines="api: responses\n")
    assert (result.fatal, check(result, "ignore_eos").ok) == (None, None)
    assert "no field of this API: a server may ignore it" in check(result, "ignore_eos").detail


def test_an_empty_stream_is_reported_as_such():
    result, _ = run_preflight(RudeServer(http(200, MODELS), sse(b"")))
    assert "answered text/event-stream, but the body is empty" in result.fatal


def test_an_empty_list_of_models_is_reported_next_to_the_models_name():
    result, _ = run_preflight(RudeServer(http(200, b'{"data":[]}'), sse(TOKEN)), lines="model: m\n")
    assert check(result, "models").detail == "m; GET /v1/models lists no model"


def test_events_without_data_are_skipped():
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    server = RudeServer(http(200, MODELS), sse(b"data: \n\n" + TOKEN + b"data:\n\n" + end))
    result, _ = run_preflight(server)
    assert result.fatal is None
    assert check(result, "completion").detail.startswith("1 chunks")


def test_a_redirect_without_a_location_is_reported():
    result, _ = run_preflight(RudeServer(models=http(302, b"")))
    assert result.fatal.endswith("GET /v1/models answers 302 without a location")


@pytest.mark.parametrize(
    ("location", "shown"),
    [(b"http://[::1", "http://[::1"), (b"http://h/\xff\xfe", "http://h/\ufffd\ufffd")],
)
def test_a_location_that_is_no_url_is_shown_as_it_is(location, shown):
    answer = http(302, b"", "location: ?").replace(b"?", location)
    result, _ = run_preflight(RudeServer(models=answer))
    assert f"answers 302 to {shown}: use that URL" in result.fatal


def shown_text(result):
    return "\n".join([result.fatal or "", *(check.detail for check in result.checks)])


ECHO = f"you sent {KEY} and {SECRET}"
ERROR = json.dumps({"error": {"message": ECHO}}).encode()


@pytest.mark.parametrize(
    "server",
    [
        RudeServer(http(200, MODELS), http(400, ERROR)),
        RudeServer(http(200, MODELS), http(500, f"Bearer {KEY} {SECRET}".encode())),
        RudeServer(http(200, MODELS), http(500, b"x" * 190 + KEY.encode())),
        RudeServer(http(200, MODELS), http(307, b"", f"location: http://x/{KEY}?{SECRET}")),
        RudeServer(http(200, MODELS), sse(TOKEN + b"data: " + ERROR + b"\n\n")),
        RudeServer(http(200, MODELS), sse(f"data: {ECHO}\n\n".encode())),
        RudeServer(http(200, MODELS), sse(f"data: {'x' * 50}{KEY}\n\n".encode())),
        RudeServer(http(200, MODELS), http(200, ECHO.encode(), "content-type: text/plain")),
        RudeServer(http(200, MODELS), http(200, b"", f"content-type: text/{KEY}")),
        RudeServer(http(500, ERROR)),
        RudeServer(http(200, ECHO.encode())),
        RudeServer(f"HTTP/1.1 {KEY} {SECRET}\r\n\r\n".encode()),
        RudeServer(http(200, json.dumps({"data": [{"id": ECHO}]}).encode()), http(404, b"")),
    ],
    ids=lambda server: (server.completion or server.models)[-50:].decode(),
)
def test_the_preflight_shows_no_secret_that_the_server_repeats(server):
    result, _ = run_preflight(server)
    assert any(KEY.encode() in request for request in server.requests)
    assert any(SECRET.encode() in request for request in server.requests)
    for secret in (KEY, SECRET):
        assert secret[:8] not in shown_text(result)
    assert "[redacted]" in shown_text(result)


CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))


def test_text_of_a_server_loses_its_control_characters():
    in_json = json.dumps({"error": {"message": f"a{CONTROLS}b"}}).encode()
    raw = f"a{CONTROLS}b".encode()
    for words in (
        error_message(in_json),
        error_message(raw),
        one_line(raw),
        OpenAIChat().decode(in_json).error,
    ):
        assert words is not None
        assert words.replace(" ", "") == "ab"
        assert words.isprintable()
    models = json.dumps({"data": [{"id": f"m{CONTROLS}1", "max_model_len": 9}]}).encode()
    assert parse_models(models) == {"m1": 9}


@pytest.mark.parametrize(
    "server",
    [
        RudeServer(http(200, b'{"data":[{"id":"m\\u001b[2J"}]}'), sse(TOKEN)),
        RudeServer(http(200, MODELS), http(500, b"\x1b]0;owned\x07 \x9b31m")),
        RudeServer(http(200, MODELS), sse(b'data: {"error":"\\u001b[31m\\u009b"}\n\n')),
        RudeServer(http(200, MODELS), sse(b"data: \x1b[31m\n\n")),
        RudeServer(http(200, MODELS), http(307, b"", "location: http://h/\x1b[2J")),
        RudeServer(http(200, MODELS), http(200, b"x", "content-type: a/\x1b[2J")),
        RudeServer(b"HTTP/1.1 \x1b[2J 200\r\n\r\n"),
    ],
    ids=["model", "body", "event", "no event", "location", "content-type", "status line"],
)
def test_the_preflight_shows_no_control_characters(server):
    result, _ = run_preflight(server)
    assert result.fatal is not None
    for detail in (result.fatal, result.model, *(check.detail for check in result.checks)):
        assert detail.isprintable(), detail


@pytest.mark.parametrize("nested", [b"[" * 100_000, b'{"a":' * 100_000])
def test_json_that_is_too_deep_to_decode_is_shown_as_text(nested):
    assert error_message(nested) == nested[:200].decode()
    with pytest.raises(ValueError, match="too deep"):
        parse_models(nested)


def test_a_length_that_is_no_number_of_tokens_is_not_stated():
    body = b'{"data":[{"id":"a","max_model_len":true},{"id":"b","max_model_len":-1}]}'
    assert parse_models(body) == {"a": None, "b": None}


def test_a_list_of_models_that_comes_in_pieces_is_read_whole():
    ids = [f"model-{number:05}" for number in range(20_000)]
    body = json.dumps({"data": [{"id": name} for name in ids]}).encode()
    assert 400_000 < len(body) < 1 << 20
    result, _ = run_preflight(RudeServer(http(200, body), http(404, b"")))
    assert "none of the first 8 of 20000 listed models answers" in check(result, "models").detail


def test_a_connection_refused_now_and_then_is_tried_again():
    """The port is closed at first and between any two answers; each pause opens it again."""
    server = RudeServer(http(200, MODELS), sse(TOKEN + b"data: [DONE]\n\n"))

    async def run():
        pauses: list[float] = []
        listening: list[asyncio.Server] = []
        with socket.socket() as kept:  # reserves the port
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
            port = kept.getsockname()[1]

            async def answer(reader, writer):
                listening.pop().close()  # until the next pause
                await server.answer(reader, writer)

            async def pause(seconds):
                pauses.append(seconds)
                listening.append(await asyncio.start_server(answer, "127.0.0.1", port))

            url = f"http://127.0.0.1:{port}"
            result = await preflight(
                read_target(f"url: {url}\n", "t.yaml", {}), OpenAIChat(),
                max_input_tokens=1, max_output_tokens=1, timeout_s=5, pause=pause,
            )  # fmt: skip
        return result, pauses

    result, pauses = asyncio.run(run())
    assert result.fatal is None
    assert result.model == "m"
    assert len(pauses) == 3  # before it was reached, before its models, before its answer
    assert {check.check: check.ok for check in result.checks}["completion"] is True


def test_a_refused_connection_is_tried_three_times():
    async def run():
        pauses: list[float] = []

        async def pause(seconds):
            pauses.append(seconds)

        with socket.socket() as bound:  # and does not listen
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            result = await preflight(
                read_target(f"url: {url}\n", "t.yaml", {}), OpenAIChat(),
                max_input_tokens=1, max_output_tokens=1, timeout_s=5, pause=pause,
            )  # fmt: skip
        return result.fatal, pauses

    fatal, pauses = asyncio.run(run())
    assert "connection refused" in fatal
    assert len(pauses) == 2


@dataclass
class OneBaseServer:
    """Has an API at a single base, with a query, and answers 404 elsewhere."""

    base: str
    query: str = ""
    has_models: bool = True
    requests: list[bytes] = field(default_factory=list)

    models = completion = b""

    async def answer(self, reader, writer):
        try:
            line, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b" HTTP/1.1")
        except asyncio.IncompleteReadError:  # the reachability check sends nothing
            line = b""
        if line:
            self.requests.append(line)
            answers = {f"POST {self.base}/chat/completions{self.query}": sse(16 * TOKEN + END)}
            if self.has_models:
                answers[f"GET {self.base}/models{self.query}"] = http(200, MODELS)
            writer.write(answers.get(line.decode(), http(404, b'{"error":"no such route"}')))
            await writer.drain()
        writer.close()


END = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("has_models", [True, False])
@pytest.mark.parametrize(
    ("path", "base", "query"),
    [
        ("", "/v1", ""),
        ("", "", ""),  # no version anywhere
        ("/gateway/v2/team", "/gateway/v2/team/v1", ""),
        ("/inference", "/inference", ""),
        ("/serving-endpoints?o=7", "/serving-endpoints", "?o=7"),
        ("/v1beta/openai", "/v1beta/openai", ""),
        ("/openai/deployments/m?api-version=1", "/openai/deployments/m", "?api-version=1"),
    ],
)
def test_the_api_is_found_with_and_without_a_version(path, base, query, has_models):
    server = OneBaseServer(base, query, has_models)
    result, _ = run_preflight(server, path=path, lines="model: m\n")
    assert result.fatal is None
    called = f"POST {base}/chat/completions{query}".encode()
    assert server.requests[-1] == called


def test_the_message_holds_the_paths_that_were_called():
    server = OneBaseServer("/elsewhere")
    result, _ = run_preflight(server, path="/a/b?c=1&key=sk-in-the-query", lines="model: m\n")
    assert result.fatal.endswith(
        "/a/b?c=1&key=[redacted]: POST /a/b/v1/chat/completions?c=1&key=[redacted] answered 404: "
        "no such route; POST /a/b/chat/completions?c=1&key=[redacted] is absent too; check the URL "
        "and api: chat"
    )
    listed, _ = run_preflight(server, path="/a/b?c=1")
    assert "GET /a/b/v1/models?c=1 answered 404: no such route; name the model" in listed.fatal
