"""The reasoning tokens of a stream: as the server states them, else by its events and its text."""

import json

import pytest

from loadgen.archive.decode import decode
from loadgen.archive.exchange import Exchange
from targets.openai_chat import OpenAIChat

CODEC = OpenAIChat(model="m")


def stream(pieces, usage=None):
    """A chat stream of (key, text) pieces, an event per read."""
    events = [{"choices": [{"index": 0, "delta": {key: text}}]} for key, text in pieces]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    parts = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    return Exchange(
        row=0, sent_ns=1, headers_ns=2, done_ns=10_000, http_status=200,
        content_type="text/event-stream", n_bytes=sum(map(len, parts)),
        times=[1000 * (k + 1) for k in range(len(parts))], parts=parts,
    )  # fmt: skip


THINK = [("reasoning_content", " hm"), ("reasoning_content", " so")]
SAY = [("content", " yes"), ("content", " it"), ("content", " is")]
COUNTS = {"prompt_tokens": 9, "completion_tokens": 5}


@pytest.mark.parametrize(
    ("pieces", "usage", "expected"),
    [
        (THINK + SAY, None, 2),  # an event a token
        (THINK + SAY, COUNTS, 2),
        (THINK + SAY, {**COUNTS, "completion_tokens_details": {"reasoning_tokens": 3}}, 3),
        (SAY, COUNTS, 0),
        (SAY, {"completion_tokens": 103, "completion_tokens_details": {"reasoning_tokens": 100}},
         100),  # hidden
        ([("reasoning_content", "a" * 30), ("content", "b" * 10)], {"completion_tokens": 12}, 9),
        (THINK, {"completion_tokens": 2}, 2),  # no answer
    ],
)  # fmt: skip
def test_reasoning_is_counted(pieces, usage, expected):
    assert decode(stream(pieces, usage), CODEC).reasoning_tokens == expected


def test_the_first_token_is_not_the_first_of_the_answer():
    found = decode(stream(THINK + SAY, COUNTS), CODEC)
    assert (found.first_token_ns, found.first_answer_ns) == (1000, 3000)


def test_a_whole_answer_has_the_stated_count():
    body = json.dumps(
        {
            "choices": [{"message": {"reasoning_content": "hm", "content": "yes"}}],
            "usage": {
                "completion_tokens": 9,
                "completion_tokens_details": {"reasoning_tokens": 6},
            },
        }
    ).encode()
    exchange = Exchange(
        row=0, sent_ns=1, headers_ns=2, done_ns=9, http_status=200,
        content_type="application/json", n_bytes=len(body), times=[8], parts=[body],
    )  # fmt: skip
    assert decode(exchange, OpenAIChat(model="m", stream=False)).reasoning_tokens == 6
