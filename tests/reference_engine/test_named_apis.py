"""`/v1/responses` and `/v1/messages` over a real socket, with the toy model, held against chats."""

import asyncio
import json

import pytest

from loadgen.archive.decode import decode
from loadgen.archive.exchange import Exchange
from loadgen.records import FinishReason, Status, TokenSource
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.named_calls import parse_message, parse_response
from reference_engine.serving.wire.named_events import MessageEncoder, ResponseEncoder
from reference_engine.serving.wire.wire_errors import WireError
from targets.base import TARGETS, Request
from tests.reference_engine.engine_kit import toy_output
from tests.reference_engine.engine_server import serving

pytestmark = pytest.mark.usefixtures("both_forms")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RENDERED = b"user: Hi\nassistant: "
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    RESPONSES: {"input": "Hi", "max_output_tokens": 5, "temperature": 0, "ignore_eos": True},
    MESSAGES: {"messages": HI, "max_tokens": 5, "temperature": 0, "ignore_eos": True},
}


def printable(tokens):
    return "".join(chr(t if 32 <= t < 127 else 32 + t % 95) for t in tokens)


TEXT = printable(toy_output(RENDERED, 5))


def stream(path, body):
    """The (name, data) of each event of a stream."""

    async def scene():
        async with (
            serving() as server,
            server.session.post(path, json={**body, "stream": True}) as response,
        ):
            assert response.status == 200
            return (await response.read()).decode()

    *events, rest = asyncio.run(scene()).split("\n\n")
    assert rest == ""
    pairs = [event.split("\n") for event in events]
    named = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in pairs]
    assert all(name == data["type"] for name, data in named)
    return named


def post(path, body, **headers):
    async def scene():
        async with serving() as server:
            return await server.post(path, body, **headers)

    return asyncio.run(scene())


def test_a_response_is_one_event_per_token_between_its_opening_and_its_end():
    named = stream(RESPONSES, BODIES[RESPONSES])
    assert [name.removeprefix("response.") for name, _ in named] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    pieces = [data["delta"] for name, data in named if name.endswith("text.delta")]
    assert ([len(piece) for piece in pieces], "".join(pieces)) == ([1] * 5, TEXT)
    end = named[-1][1]
    assert end["response"]["usage"] == {
        "input_tokens": len(RENDERED), "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(RENDERED) + 5,
    }  # fmt: skip
    assert end["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert end["response"]["output"][0]["content"][0]["text"] == TEXT
    assert 0 <= end["timings"]["queue_s"] <= end["timings"]["ttft_s"] <= end["timings"]["e2e_s"]


def test_a_message_is_one_event_per_token_between_its_opening_and_its_end():
    named = stream(MESSAGES, BODIES[MESSAGES])
    assert [name for name, _ in named] == [
        "message_start", "content_block_start", *["content_block_delta"] * 5,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    pieces = [data["delta"]["text"] for name, data in named if name == "content_block_delta"]
    assert ([len(piece) for piece in pieces], "".join(pieces)) == ([1] * 5, TEXT)
    counts = {"input_tokens": len(RENDERED), "cache_read_input_tokens": 0}
    assert named[0][1]["message"]["usage"] == {**counts, "output_tokens": 0}
    assert named[-2][1]["usage"] == {**counts, "output_tokens": 5}
    assert named[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_has_the_text_of_the_stream(path):
    status, body = post(path, BODIES[path])
    assert status == 200
    content = body["content"] if path == MESSAGES else body["output"][0]["content"]
    assert [part["text"] for part in content] == [TEXT]
    assert body["usage"]["output_tokens"] == 5
    end = body["stop_reason"] if path == MESSAGES else body["status"]
    assert end == ("max_tokens" if path == MESSAGES else "incomplete")
    assert body["id"].startswith("msg-" if path == MESSAGES else "resp-")


@pytest.mark.parametrize("path", BODIES)
def test_the_id_of_an_answer_is_one_of_its_requests(path):
    async def scene():
        async with serving() as server:
            _, body = await server.post(path, BODIES[path])
            return await server.get(f"/debug/requests/{body['id']}")

    assert asyncio.run(scene())[0] == 200


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_the_load_generators_codec_reads_the_stream_as_its_own(api):
    """The two are written apart: a shared misunderstanding cannot cancel out."""
    codec = TARGETS.get(api)(model="nano")
    sent = codec.encode(Request("Hi", 5))

    async def scene():
        async with (
            serving() as server,
            server.session.post(sent.path, data=sent.body, headers=dict(sent.headers)) as response,
        ):
            return response.status, response.content_type, await response.read()

    status, content_type, body = asyncio.run(scene())
    made = Exchange(0, sent_ns=1, headers_ns=2, http_status=status, done_ns=9)
    made.content_type, made.parts, made.times = content_type, [body], [3]
    found = decode(made, codec)
    assert (found.status, found.error, found.unknown_events) == (Status.ok, "", 0)
    assert (found.output_tokens, found.token_source) == (5, TokenSource.usage)
    assert found.chunk_tokens == [1] * 5
    assert (found.input_tokens, found.cached_tokens) == (len(RENDERED), 0)
    assert found.finish_reason is FinishReason.length
    assert set(found.server) == {"queue_s", "ttft_s", "e2e_s"}


def test_a_message_counts_cached_tokens_apart():
    opening = MessageEncoder(Call("nano"), "msg-1", "nano", 3).opening(20, 16).decode()
    usage = json.loads(opening.split("\n")[1][6:])["message"]["usage"]
    assert usage == {"input_tokens": 4, "cache_read_input_tokens": 16, "output_tokens": 0}


@pytest.mark.parametrize(("api", "form"), [("responses", ResponseEncoder),
                                           ("messages", MessageEncoder)])  # fmt: skip
def test_an_error_after_the_status_line_is_one_of_the_api(api, form):
    body = form(Call("nano"), "id-1", "nano", 3).error(WireError("the engine failed", status=500))
    name, data = body.decode().strip().split("\n")
    assert name == "event: error"
    assert TARGETS.get(api)().decode(data[6:].encode()).error == "the engine failed"


def test_every_form_of_a_conversation_is_the_same_chat():
    talk = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo"), ("user", "And?"))
    items = [{"role": role, "content": content} for role, content in talk]
    kinds = {"user": "input_text", "assistant": "output_text"}
    typed = [
        {"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]}
        for role, text in talk[1:]
    ]
    blocks = [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in talk[1:]]
    calls = [
        parse_response(json.dumps({"input": items}).encode()),
        parse_response(json.dumps({"instructions": "Be brief.", "input": typed}).encode()),
        parse_message(json.dumps(
            {"system": "Be brief.", "messages": items[1:], "max_tokens": 3}).encode()),
        parse_message(json.dumps(
            {"system": [{"type": "text", "text": "Be brief."}], "messages": blocks,
             "max_tokens": 3}).encode()),
    ]  # fmt: skip
    assert {call.messages for call in calls} == {talk}
    assert [call.max_tokens for call in calls] == [None, None, 3, 3]
    assert all(call.include_usage for call in calls)


def test_stop_sequences_end_a_message():
    status, body = post(MESSAGES, {**BODIES[MESSAGES], "stop_sequences": [TEXT[2]]})
    assert (status, body["stop_reason"]) == (200, "end_turn")
    assert body["content"] == [{"type": "text", "text": TEXT[: TEXT.index(TEXT[2])]}]


REFUSED = [
    (parse_response, {}, "input"),
    (parse_response, {"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    (parse_response, {"input": "Hi", "tools": [{"type": "web_search"}]}, "tools"),
    (parse_response, {"input": "Hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
    (parse_response, {"input": [{"type": "function_call_output", "output": "1"}]}, "input[0]"),
    (parse_response, {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    (parse_message, {"messages": HI}, "max_tokens"),
    (parse_message, {"max_tokens": 3}, "messages"),
    (parse_message, {"messages": HI, "max_tokens": 3, "thinking": {"type": "enabled"}}, "thinking"),
    (
        parse_message,
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 3},
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("parse", "body", "param"), REFUSED, ids=[r[2] for r in REFUSED])
def test_a_field_that_is_not_supported_is_an_error_with_its_name(parse, body, param):
    with pytest.raises(WireError) as caught:
        parse(json.dumps(body).encode())
    assert caught.value.param == param
    assert caught.value.status == 400
    assert param in str(caught.value)
