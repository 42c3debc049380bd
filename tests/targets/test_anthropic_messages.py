"""The Messages codec against the events of four servers, written by hand from their documentation:
Anthropic ("Streaming messages"), vLLM (`entrypoints/anthropic`), SGLang
(`srt/entrypoints/anthropic`) and llama.cpp (`server-task.cpp`)."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import answer_texts, decode
from loadgen.archive.exchange import Exchange
from loadgen.records import REASONING, FinishReason, Status, TokenSource
from targets.anthropic_messages import AnthropicMessages
from targets.base import TARGETS, Delta, Request, Usage

CODEC = AnthropicMessages(model="m")


def event(kind, **fields):
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


def start(**usage):
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    return event("message_start", message={**message, "stop_reason": None, "usage": usage})


def block(index, **content):
    return event("content_block_start", index=index, content_block=content)


def piece(index, kind, **content):
    return event("content_block_delta", index=index, delta={"type": f"{kind}_delta", **content})


def text(words, index=0):
    return piece(index, "text", text=words)


def end(reason="end_turn", **usage):
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=delta, **({"usage": usage} if usage else {}))


CLOSE = event("content_block_stop", index=0)
STOP = event("message_stop")
PING = event("ping")
OPEN = block(0, type="text", text="")
DONE = b"data: [DONE]\n\n"


def decoded(*events):
    """The reads, 1 ms apart, the first at 10 ms."""
    made = Exchange(0, sent_ns=1, headers_ns=5_000_000, http_status=200, done_ns=99_000_000)
    made.content_type = "text/event-stream; charset=utf-8"
    made.parts, made.times = list(events), [(10 + i) * 1_000_000 for i in range(len(events))]
    return decode(made, CODEC), made


def test_anthropics_stream_states_the_prompt_first_and_the_answer_last():
    begun = start(
        input_tokens=25, cache_creation_input_tokens=5, cache_read_input_tokens=70, output_tokens=1
    )
    found, made = decoded(
        begun, OPEN, PING, text("Hello"), text("!"), CLOSE, end(output_tokens=2), STOP
    )
    assert (found.status, found.error, found.unknown_events) == (Status.ok, "", 0)
    assert found.chunk_ns == [13_000_000, 14_000_000]
    assert (found.input_tokens, found.cached_tokens) == (100, 70)
    assert (found.output_tokens, found.token_source) == (2, TokenSource.usage)
    assert (found.chunk_tokens, found.finish_reason) == ([1, 1], FinishReason.stop)
    assert found.first_answer_ns == 13_000_000
    assert answer_texts(made, CODEC)[0] == "Hello!"


def test_a_heartbeat_of_any_form_is_skipped():
    pong = b"event: ping\ndata: pong\n\n"
    found, _ = decoded(start(input_tokens=9), OPEN, pong, text("Hi"), end(output_tokens=1), STOP)
    assert (found.status, found.unknown_events, found.output_tokens) == (Status.ok, 1, 1)


def test_the_count_of_the_first_event_is_none_of_the_answer():
    found, _ = decoded(
        start(input_tokens=9, output_tokens=1), OPEN, text("a"), text("b"), CLOSE, end(), STOP
    )
    assert (found.output_tokens, found.token_source) == (2, TokenSource.chunks)


def test_thinking_is_no_answer_and_its_signature_no_token():
    found, made = decoded(
        start(input_tokens=9, output_tokens=0),
        block(0, type="thinking", thinking="", signature=""),
        piece(0, "thinking", thinking="hm"),
        piece(0, "signature", signature="EqQBCg"),
        CLOSE,
        block(1, type="text", text=""),
        text("Hi", 1),
        event("content_block_stop", index=1),
        end(output_tokens=2),
        STOP,
    )
    assert found.chunk_ns == [12_000_000, 16_000_000]
    assert (found.first_token_ns, found.first_answer_ns) == (12_000_000, 16_000_000)
    assert (found.output_tokens, answer_texts(made, CODEC)[0]) == (2, "Hi")


def test_redacted_thinking_is_tokens_of_unknown_text():
    hidden = block(0, type="redacted_thinking", data="EmwKAhgBEgy3va3p")
    found, _ = decoded(
        start(input_tokens=9), hidden, CLOSE, text("Hi", 1), end(output_tokens=700), STOP
    )
    assert (found.output_tokens, found.token_source) == (700, TokenSource.usage)
    assert found.first_token_ns == 11_000_000


def test_a_tool_call_is_tokens_without_text():
    found, made = decoded(
        start(input_tokens=9),
        block(0, type="tool_use", id="toolu_1", name="weather", input={}),
        piece(0, "input_json", partial_json=""),
        piece(0, "input_json", partial_json='{"city"'),
        CLOSE,
        end("tool_use", output_tokens=12),
        STOP,
    )
    assert found.chunk_ns == [11_000_000, 13_000_000]
    assert (found.finish_reason, found.output_tokens) == (FinishReason.tool_calls, 12)
    assert (found.first_answer_ns, answer_texts(made, CODEC)[0]) == (0, "")


def test_vllm_states_the_whole_usage_at_the_end_and_adds_done():
    begun = event(
        "message_start",
        message={"id": "chatcmpl-1", "content": [], "model": "m"},
        usage={"input_tokens": 0, "output_tokens": 0},
    )
    found, _ = decoded(
        begun,
        OPEN,
        text("Hi"),
        text("!"),
        CLOSE,
        end("max_tokens", input_tokens=37, output_tokens=2),
        STOP,
        DONE,
    )
    assert (found.status, found.input_tokens, found.output_tokens) == (Status.ok, 37, 2)
    assert found.finish_reason is FinishReason.length


def test_vllms_counts_beside_the_first_message_are_those_of_the_prompt():
    begun = event("message_start", message={"id": "chatcmpl-1", "content": []},
                  usage={"input_tokens": 37, "output_tokens": 0})  # fmt: skip
    found, _ = decoded(begun, OPEN, text("Hi"), CLOSE, end(output_tokens=1), STOP)
    assert (found.input_tokens, found.output_tokens) == (37, 1)


def test_llama_cpp_counts_cached_tokens_apart_and_only_at_the_start():
    begun = start(cache_read_input_tokens=30, input_tokens=7, output_tokens=0)
    found, _ = decoded(begun + OPEN + text("Hi"), text("!"), CLOSE + end(output_tokens=2) + STOP)
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (37, 30, 2)
    assert found.chunk_ns == [10_000_000, 11_000_000]


def test_sglang_repeats_the_prompts_count_at_the_end():
    begun = start(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
    found, _ = decoded(
        begun,
        OPEN,
        text("Hi"),
        CLOSE,
        end(input_tokens=37, output_tokens=1, cache_read_input_tokens=0),
        STOP,
    )
    assert (found.input_tokens, found.output_tokens) == (37, 1)


FAILURES = {
    "Anthropic": event("error", error={"type": "overloaded_error", "message": "Overloaded"}),
    "without a name": b'data: {"type":"error","error":{"message":"Overloaded"}}\n\n',
    "llama.cpp": b'error: {"code":503,"message":"Overloaded"}\n\n',
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_failure_in_the_stream_is_an_error_with_its_message(failure):
    found, _ = decoded(start(input_tokens=9), OPEN, text("Hi"), failure)
    assert (found.status, found.error) == (Status.stream_error, "error in the stream: Overloaded")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop_sequence", FinishReason.stop),
        ("refusal", FinishReason.content_filter),
        ("model_context_window_exceeded", FinishReason.length),
        ("pause_turn", FinishReason.other),
    ],
)
def test_every_documented_stop_reason_is_a_finish_reason(word, reason):
    found, _ = decoded(
        start(input_tokens=9), OPEN, text("Hi"), CLOSE, end(word, output_tokens=1), STOP
    )
    assert (found.status, found.finish_reason) == (Status.ok, reason)


def test_an_answer_that_the_server_gave_up_has_failed():
    found, _ = decoded(start(input_tokens=9), OPEN, text("Hi"), end("abort", output_tokens=1), STOP)
    assert found.error == "error in the stream: finish_reason abort"


def test_a_stream_without_its_last_events_was_cut():
    found, _ = decoded(start(input_tokens=9), OPEN, text("Hi"), CLOSE)
    assert found.status is Status.stream_error
    assert "stream ended after 1 token chunks" in found.error


BROKEN = {
    "not UTF-8": text("@").replace(b"@", b"\xff\xfe"),
    "not text": text("@").replace(b'"@"', b"[1]"),
    "thinking that is not text": piece(0, "thinking", thinking=[1]),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_piece_that_cannot_be_read_is_a_failure_although_the_event_has_a_name(broken):
    found, _ = decoded(start(input_tokens=9), OPEN, text("Hi"), broken, end(output_tokens=2), STOP)
    assert found.status is Status.stream_error
    assert found.error.startswith("event not understood")


def test_a_whole_answer_has_its_text_its_counts_and_its_end():
    content = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hi"},
    ]
    usage = {"input_tokens": 7, "cache_read_input_tokens": 2, "output_tokens": 4}
    body = {"type": "message", "role": "assistant", "stop_reason": "max_tokens", "usage": usage}
    assert CODEC.decode(json.dumps({**body, "content": content}).encode()) == Delta(
        True, True, "Hi", FinishReason.length, Usage(9, 4, 2)
    )
    only = CODEC.decode(json.dumps({**body, "content": content[:1]}).encode())
    assert (only.text, only.is_token, only.is_answer) == ("hm", True, False)


def test_what_is_sent_has_the_system_prompt_apart_and_the_version_of_the_api():
    talk = Request(
        "",
        64,
        messages=(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo"), ("user", "And?")),
    )
    sent = CODEC.encode(talk)
    assert (sent.method, sent.path) == ("POST", "/v1/messages")
    assert dict(sent.headers)["anthropic-version"] == "2023-06-01"
    assert json.loads(sent.body) == {
        "model": "m",
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo"},
            {"role": "user", "content": "And?"},
        ],
        "max_tokens": 64,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "min_tokens": 64,
    }
    plain = AnthropicMessages(ignore_eos=False, sends_temperature=False).encode(Request("Hi", 3))
    assert json.loads(plain.body) == {
        "model": "",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "stream": True,
    }


def test_the_live_view_sees_tokens_and_calls_only():
    call = block(0, type="tool_use", id="toolu_1", name="weather", input={})
    tokens = [
        text("Hi"),
        piece(0, "thinking", thinking="hm"),
        call,
        piece(0, "input_json", partial_json="{"),
    ]
    assert all(map(CODEC.looks_like_token, tokens))
    assert list(map(CODEC.looks_like_answer, tokens)) == [True, False, False, False]
    others = [
        start(input_tokens=9),
        OPEN,
        PING,
        block(0, type="thinking", thinking=""),
        piece(0, "signature", signature="EqQB"),
        CLOSE,
        end(output_tokens=2),
        STOP,
    ]
    assert not any(map(CODEC.looks_like_token, others))
    assert not any(map(CODEC.looks_like_answer, others))


def test_the_api_is_registered():
    assert TARGETS.get("messages") is AnthropicMessages


def data_of(event):
    return event.partition(b"data: ")[2].strip()


@given(st.text(min_size=1))
def test_any_text_arrives_as_it_was_sent(words):
    assert CODEC.decode(data_of(text(words))) == Delta(True, True, words)


@given(st.sampled_from([text("Hi"), OPEN, start(input_tokens=9), end(output_tokens=2)]), st.data())
def test_a_damaged_event_is_a_delta_or_a_value_error(event, data):
    whole = data_of(event)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]
    with suppress(ValueError):
        assert isinstance(CODEC.decode(damaged), Delta)


def test_the_reasoning_of_an_earlier_answer_goes_where_the_api_has_it():
    talk = (("user", "Hi"), (REASONING, "hm"), ("assistant", "Ho"), ("user", "And?"))
    body = json.loads(CODEC.encode(Request("", 3, messages=talk)).body)
    assert body["messages"] == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Ho"},
            ],
        },
        {"role": "user", "content": "And?"},
    ]
