"""The Responses codec against the events of three servers, written by hand from their
documentation: OpenAI ("Responses: streaming events"), vLLM (`entrypoints/openai/responses`) and
llama.cpp (`server-task.cpp`)."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import answer_texts, decode
from loadgen.archive.exchange import Exchange
from loadgen.records import REASONING, FinishReason, Status, TokenSource
from targets.base import TARGETS, Delta, Request, Usage
from targets.openai_responses import OpenAIResponses

CODEC = OpenAIResponses(model="m")


def event(kind, **fields):
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


def text(piece, number, kind="output_text", item="msg_1"):
    place = {"item_id": item, "output_index": 0, "content_index": 0}
    return event(f"response.{kind}.delta", **place, delta=piece, sequence_number=number)


def ended(kind="completed", *, status="completed", usage=None, output=(), **fields):
    response = {"id": "resp_1", "object": "response", "status": status, "model": "m", "error": None}
    return event(
        f"response.{kind}", response={**response, "output": list(output), "usage": usage, **fields}
    )


def counts(given, out, cached=0, reasoning=0):
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": out,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + out,
    }


CREATED = event(
    "response.created",
    response={
        "id": "resp_1",
        "object": "response",
        "status": "in_progress",
        "model": "m",
        "error": None,
        "output": [],
        "usage": None,
    },
)
OPENED = [
    CREATED,
    event("response.in_progress", response={"id": "resp_1", "status": "in_progress"}),
    event(
        "response.output_item.added",
        output_index=0,
        item={"type": "message", "id": "msg_1", "role": "assistant", "content": []},
    ),
    event(
        "response.content_part.added",
        item_id="msg_1",
        part={"type": "output_text", "text": "", "annotations": []},
    ),
]
MESSAGE = {"type": "message", "content": [{"type": "output_text", "text": "Hi there"}]}
CLOSED = [
    event("response.output_text.done", item_id="msg_1", text="Hi there"),
    event("response.content_part.done", part={"type": "output_text", "text": "Hi there"}),
    event("response.output_item.done", item=MESSAGE),
]


def decoded(*events, codec=CODEC, **fields):
    """The reads, 1 ms apart, the first at 10 ms."""
    made = Exchange(0, sent_ns=1, headers_ns=5_000_000, http_status=200, done_ns=99_000_000)
    made.content_type = "text/event-stream; charset=utf-8"
    made.parts, made.times = list(events), [(10 + i) * 1_000_000 for i in range(len(events))]
    for name, value in fields.items():
        setattr(made, name, value)
    return decode(made, codec), made


def test_openais_stream_has_a_token_per_delta_and_the_counts_of_its_last_event():
    end = ended(usage=counts(37, 2, cached=16), output=[MESSAGE])
    found, made = decoded(*OPENED, text("Hi", 4), text(" there", 5), *CLOSED, end)
    assert (found.status, found.error) == (Status.ok, "")
    assert found.chunk_ns == [14_000_000, 15_000_000]  # neither `added` before nor `done` after
    assert found.first_answer_ns == 14_000_000
    assert (found.output_tokens, found.token_source) == (2, TokenSource.usage)
    assert (found.input_tokens, found.cached_tokens, found.chunk_tokens) == (37, 16, [1, 1])
    assert (found.finish_reason, found.unknown_events) == (FinishReason.stop, 0)
    assert answer_texts(made, CODEC)[0] == "Hi there"


def test_reasoning_tokens_that_are_not_streamed_are_hidden():
    end = ended(usage=counts(9, 130, reasoning=128))
    found, _ = decoded(*OPENED, text("Hi", 4), text(" there", 5), end)
    assert (found.output_tokens, found.hidden_tokens) == (130, 128)


@pytest.mark.parametrize("kind", ["reasoning_text", "reasoning_summary_text"])
def test_reasoning_is_no_answer(kind):
    found, made = decoded(CREATED, text("hm", 1, kind), text("Hi", 2), ended(usage=counts(9, 2)))
    assert (found.first_token_ns, found.first_answer_ns) == (11_000_000, 12_000_000)
    assert answer_texts(made, CODEC)[0] == "Hi"


def test_vllm_ends_a_truncated_answer_with_completed_of_a_status_incomplete():
    end = ended(
        status="incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=counts(9, 2)
    )
    found, _ = decoded(*OPENED, text("Hi", 4), text(" there", 5), end)
    assert (found.status, found.finish_reason) == (Status.ok, FinishReason.length)


def test_llama_cpps_stream_has_no_numbers_and_states_its_timings():
    data = ended(
        usage={
            "input_tokens": 9,
            "output_tokens": 2,
            "total_tokens": 11,
            "input_tokens_details": {"cached_tokens": 4},
        }
    )
    end = data.replace(b'"type":', b'"timings":{"prompt_ms":125.0,"predicted_n":2},"type":')
    first = event("response.output_text.delta", item_id="msg_1", delta="Hi")
    found, _ = decoded(CREATED, first, text("!", 1), end)
    assert (found.status, found.output_tokens, found.cached_tokens) == (Status.ok, 2, 4)
    assert found.server == {"prompt_s": 0.125}


def test_a_function_call_is_tokens_without_text():
    call = {"type": "function_call", "id": "fc_1", "name": "get_weather", "arguments": ""}
    piece = event("response.function_call_arguments.delta", item_id="fc_1", delta='{"city":')
    done = {**call, "arguments": '{"city":"Paris"}'}
    found, made = decoded(
        CREATED,
        event("response.output_item.added", item=call),
        piece,
        event("response.function_call_arguments.done", arguments=done["arguments"]),
        event("response.output_item.done", item=done),
        ended(usage=counts(9, 7), output=[done]),
    )
    assert found.chunk_ns == [11_000_000, 12_000_000]
    assert (found.first_answer_ns, answer_texts(made, CODEC)[0]) == (0, "")
    assert (found.finish_reason, found.output_tokens) == (FinishReason.tool_calls, 7)


def test_only_words_of_the_model_are_text():
    refusal = CODEC.decode(data_of(text("No.", 4, "refusal")))
    assert refusal == Delta(True, True, "No.")
    arguments = event("response.function_call_arguments.delta", item_id="fc_1", delta="{")
    assert CODEC.decode(data_of(arguments)) == Delta(is_token=True)
    of_mcp = event("response.mcp_call_arguments.delta", delta={"arguments": "{"})
    assert CODEC.decode(data_of(of_mcp)) == Delta(is_token=True)


FAILURES = {
    "failed": ended("failed", status="failed", error={"code": "server_error", "message": "no GPU"}),
    "typed error": event("error", code="server_error", message="no GPU", param=None),
    "OpenAI's older error": b'data: {"error":{"message":"no GPU","type":"server_error"}}\n\n',
}


@pytest.mark.parametrize("end", FAILURES.values(), ids=FAILURES)
def test_a_failure_in_the_stream_is_an_error_with_its_message(end):
    found, _ = decoded(*OPENED, text("Hi", 4), end)
    assert (found.status, found.error) == (Status.stream_error, "error in the stream: no GPU")


def test_a_response_that_was_cancelled_has_failed():
    found, _ = decoded(*OPENED, text("Hi", 4), ended("cancelled", status="cancelled"))
    assert found.error == "error in the stream: response cancelled"


def test_a_stream_without_its_last_event_was_cut():
    found, _ = decoded(*OPENED, text("Hi", 4), CLOSED[0])
    assert found.status is Status.stream_error
    assert "stream ended after 1 token chunks" in found.error


BROKEN = {
    "not UTF-8": text("@", 5).replace(b"@", b"\xff\xfe"),
    "not text": text("@", 5).replace(b'"@"', b"[1]"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_delta_that_cannot_be_read_is_a_failure_although_the_event_has_a_name(broken):
    found, _ = decoded(*OPENED, text("Hi", 4), broken, ended(usage=counts(9, 2)))
    assert found.status is Status.stream_error
    assert found.error.startswith("event not understood")


def test_a_whole_answer_has_its_text_its_counts_and_its_end():
    body = {
        "id": "resp_1",
        "object": "response",
        "status": "completed",
        "model": "m",
        "error": None,
        "usage": counts(9, 4, reasoning=1),
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            MESSAGE,
        ],
    }
    assert CODEC.decode(json.dumps(body).encode()) == Delta(
        True, True, "Hi there", FinishReason.stop, Usage(9, 4, 0, 1)
    )
    only = {
        **body,
        "output": body["output"][:1],
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
    }
    thought = CODEC.decode(json.dumps(only).encode())
    assert (thought.text, thought.is_token, thought.is_answer) == ("hm", True, False)
    assert thought.finish_reason is FinishReason.length


def test_what_is_sent_is_the_history_without_storage():
    talk = Request("", 64, messages=(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo")))
    sent = CODEC.encode(talk)
    assert (sent.method, sent.path) == ("POST", "/v1/responses")
    assert json.loads(sent.body) == {
        "model": "m",
        "input": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo"},
        ],
        "max_output_tokens": 64,
        "store": False,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "min_tokens": 64,
    }
    plain = OpenAIResponses(ignore_eos=False, sends_temperature=False).encode(Request("Hi", 3))
    assert json.loads(plain.body) == {
        "model": "",
        "input": [{"role": "user", "content": "Hi"}],
        "max_output_tokens": 3,
        "store": False,
        "stream": True,
    }


def test_the_live_view_sees_tokens_and_calls_only():
    call = event("response.output_item.added", item={"type": "function_call", "name": "f"})
    assert CODEC.looks_like_token(text("Hi", 4))
    assert CODEC.looks_like_token(call)
    assert CODEC.looks_like_token(call.replace(b'"type":', b'"type": '))
    assert CODEC.looks_like_answer(text("Hi", 4))
    assert CODEC.looks_like_answer(text("No", 4, "refusal"))
    assert not any(
        map(CODEC.looks_like_answer, [call, text("hm", 4, "reasoning_text"), *OPENED, *CLOSED])
    )
    assert not any(map(CODEC.looks_like_token, [*OPENED, *CLOSED, ended(usage=counts(9, 2))]))


def test_the_api_is_registered():
    assert TARGETS.get("responses") is OpenAIResponses


def data_of(event):
    return event.partition(b"data: ")[2].strip()


@given(st.text(min_size=1))
def test_any_text_arrives_as_it_was_sent(piece):
    assert CODEC.decode(data_of(text(piece, 7))) == Delta(True, True, piece)


@given(st.sampled_from([text("Hi", 4), *OPENED, ended(usage=counts(9, 2))]), st.data())
def test_a_damaged_event_is_a_delta_or_a_value_error(event, data):
    whole = data_of(event)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]
    with suppress(ValueError):
        assert isinstance(CODEC.decode(damaged), Delta)


def test_the_reasoning_of_an_earlier_answer_goes_where_the_api_has_it():
    talk = (("user", "Hi"), (REASONING, "hm"), ("assistant", "Ho"), ("user", "And?"))
    body = json.loads(CODEC.encode(Request("", 3, messages=talk)).body)
    assert body["input"] == [
        {"role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "And?"},
    ]
