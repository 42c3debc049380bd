"""The mock's Responses and Messages, by their bytes, and the preflight of both APIs against it."""

import asyncio
import json
import socket

import pytest

from targets.embed import mock
from targets.endpoint import read_target
from targets.preflight import preflight

TEXT = "the model of latency token and server time is stream " * 400
APIS = ["messages", "responses"]
EITHER = pytest.mark.parametrize("api", APIS)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with mock({"ttft": "2ms", "itl": "1ms"}, tmp_path_factory.mktemp("named")) as served:
        yield served.endpoint.url


def post(url, api, body, script=""):
    """The head and the body of the response to a request on a bare socket."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/{api} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-mock: {script}\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    return raw.split(b"\r\n\r\n", 1)


def events(url, api, body, script=""):
    """The data of each event; its name must be its type."""
    lines = post(url, api, {**body, "stream": True}, script)[1].split(b"\n")
    names = [line[7:].decode() for line in lines if line.startswith(b"event: ")]
    data = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert names == [event["type"] for event in data]
    return data


def types(data):
    return [event["type"] for event in data]


def test_a_response_has_the_events_that_openai_documents(url):
    body = {"input": [{"role": "user", "content": "x" * 40}], "max_output_tokens": 2}
    data = events(url, "responses", body, "cached_tokens=3")
    assert types(data) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.get("delta", "") for event in data) == " the model"
    end = data[-1]["response"]
    assert end["usage"] == {
        "input_tokens": 18,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 20,
    }
    assert end["incomplete_details"] == {"reason": "max_output_tokens"}
    assert end["output"][0]["content"][0]["text"] == " the model"


def test_a_message_has_the_events_that_anthropic_documents(url):
    body = {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 3, "system": "yyyy"}
    data = events(url, "messages", body, "cached_tokens=3,reasoning=1")
    assert types(data) == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert data[0]["message"]["usage"] == {
        "input_tokens": 16,
        "cache_read_input_tokens": 3,
        "output_tokens": 1,
    }
    deltas = [event["delta"] for event in data if event["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": " the"}
    assert deltas[1]["type"] == "signature_delta"
    assert deltas[2:] == [
        {"type": "text_delta", "text": " model"},
        {"type": "text_delta", "text": " of"},
    ]
    assert data[-2]["delta"]["stop_reason"] == "max_tokens"
    assert data[-2]["usage"] == {"output_tokens": 3}


def test_a_message_is_refused_in_anthropics_form(url):
    head, body = post(url, "messages", {"model": "other", "messages": [], "max_tokens": 3})
    assert head.startswith(b"HTTP/1.1 404 ")
    assert json.loads(body)["type"] == "error"
    assert json.loads(body)["error"]["message"] == "The model `other` does not exist."


def preflight_of(url, api, script="", lines=""):
    headers = f"headers: {{x-mock: '{script}'}}\n" if script else ""
    endpoint = read_target(f"url: {url}/v1/{api}\n{headers}{lines}", "t.yaml", {})
    return asyncio.run(
        preflight(
            endpoint, endpoint.adapter(), max_input_tokens=100, max_output_tokens=50,
            timeout_s=5.0, text_of=lambda n_chars: TEXT[:n_chars],
        )
    )  # fmt: skip


def lines_of(result):
    return {check.check: (check.ok, check.detail) for check in result.checks}


@EITHER
def test_a_server_that_can_be_measured_passes_every_check(url, api):
    result = preflight_of(url, api)
    checks = lines_of(result)
    assert result.fatal is None
    assert checks["usage"] == (True, "27 in, 16 out, at the end")
    assert checks["finish_reason"] == (True, "length")
    assert checks["fields"] == (True, "all accepted")
    assert checks["ignore_eos"] == (True, "accepted: output_tokens are exact")
    assert checks["prompt_fit"][0] is True
    assert checks["streaming"][1].startswith("16 chunks")
    assert (result.adapter.include_usage, result.adapter.continuous_usage) == (False, False)


@EITHER
def test_reasoning_is_streamed_before_the_answer(url, api):
    result = preflight_of(url, api, "reasoning=5")
    assert lines_of(result)["streaming"][1].startswith("16 chunks")


@EITHER
def test_a_refused_field_is_left_out(url, api):
    result = preflight_of(url, api, "reject=ignore_eos,eos_after=9")
    assert result.fatal is None
    assert lines_of(result)["fields"] == (None, "refused and not sent: ignore_eos")
    assert lines_of(result)["ignore_eos"][0] is None


@EITHER
def test_whole_answers_can_be_measured(url, api):
    result = preflight_of(url, api, lines="stream: false\n")
    assert result.fatal is None
    assert lines_of(result)["usage"] == (True, "27 in, 16 out, at the end")


SICK = {
    "finish=abort": "reported an error in the stream: finish",
    "fail=inband": "reported an error in the stream: scripted failure in mid-stream",
    "fail=utf8": "not an event of this API: 'utf-8' codec",
    "fail=cut": "the connection was cut after 8 tokens",
    "fail=notsse": "answered text/html, not an event stream",
    "fail=500": "answered 500: scripted failure 500",
}


@EITHER
@pytest.mark.parametrize(("script", "message"), SICK.items(), ids=SICK)
def test_a_sick_server_is_not_measured(url, api, script, message):
    assert message in (preflight_of(url, api, script).fatal or "")


@EITHER
def test_a_wrong_usage_is_not_believed(url, api):
    ok, detail = lines_of(preflight_of(url, api, "usage=tenfold"))["usage"]
    assert ok is False
    assert "states 160 tokens of an answer of 16 chunks, which cannot be" in detail
