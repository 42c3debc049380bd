"""Events that need not be decoded: what is concluded from their shape is what decoding says."""

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.drive.decode import decode
from loadgen.drive.exchange import Exchange
from targets.base import Adapter
from targets.openai_chat import OpenAIChat
from targets.openai_completions import OpenAICompletions


class SlowChat(OpenAIChat):
    def shape(self, first, second):
        return None


class SlowCompletions(OpenAICompletions):
    def shape(self, first, second):
        return None


PAIRS: list[tuple[Adapter, Adapter]] = [
    (OpenAIChat(model="m"), SlowChat(model="m")),
    (OpenAICompletions(model="m"), SlowCompletions(model="m")),
]
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "m", ":", ",", '"', "\\", "a\nb", "é", "\x7f", "content", "a", " b", "}"]),
)


def event(kind, text, ascii_only=True, api="chat", **fields):
    """One event as servers write them; `fields` are laid over it."""
    says = {"delta": {"content": text}} if api == "chat" else {"text": text}
    choice = {"index": 0, **says, "finish_reason": None}
    chunk = {"id": "m", "model": "m", "choices": [choice], **fields}
    if kind == "reasoning":
        choice["delta"] = {"content": "", "reasoning": text}
    if kind == "usage":
        chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": 1}
    if kind == "finish":
        choice["finish_reason"] = "stop"
    if kind == "two":
        chunk["choices"] = [choice, {**choice, "index": 1}]
    return json.dumps(chunk, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


KINDS = st.sampled_from(["token"] * 12 + ["reasoning", "usage", "finish", "two"])


def events(api):
    ids = st.sampled_from(["m", "m", "m", "n"])
    one = st.builds(event, KINDS, TEXTS, st.booleans(), st.just(api), id=ids)
    return st.lists(one, min_size=2, max_size=12)


def exchange(parts):
    made = Exchange(0, headers_ns=1, http_status=200, content_type="text/event-stream", done_ns=9)
    made.parts, made.times = list(parts), [10 + i for i in range(len(parts))]
    made.n_bytes = sum(map(len, parts))
    return made


@pytest.mark.parametrize(("fast", "slow"), PAIRS)
@settings(max_examples=60)
@given(data=st.data(), done=st.booleans())
def test_shapes_say_what_decoding_each_event_says(fast, slow, data, done):
    said = data.draw(events(fast.kind))
    parts = [b"data: " + one + b"\n\n" for one in [*said, *([b"[DONE]"] if done else [])]]
    assert decode(exchange(parts), fast) == decode(exchange(parts), slow)


@pytest.mark.parametrize(("fast", "slow"), PAIRS)
@settings(max_examples=60)
@given(data=st.data())
def test_bytes_changed_at_random_are_judged_alike(fast, slow, data):
    said = data.draw(events(fast.kind))
    wire = bytearray(b"".join(b"data: " + one + b"\n\n" for one in said))
    ends = [0, *accumulate(len(one) + 8 for one in said)]
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(
            st.sampled_from([*b'"\\\n\r{}[]:, x0', 0x00, 0xC3, 0xFF])
        )
    parts = [bytes(wire[a:b]) for a, b in pairwise(ends)]
    assert decode(exchange(parts), fast) == decode(exchange(parts), slow)


def test_a_run_of_tokens_keeps_the_instant_of_each():
    parts = [b"data: " + event("token", text) + b"\n\n" for text in ("a", "b", "c", 'd"', "e")]
    found = decode(exchange([*parts, b"data: [DONE]\n\n"]), PAIRS[0][0])
    assert found.chunk_ns == [10, 11, 12, 13, 14]
    assert found.error == ""


def test_a_shape_is_found_where_another_string_reads_like_the_text():
    """The model is called like the first token: only one of the two places may vary."""
    codec = PAIRS[0][0]
    shape = codec.shape(event("token", "m"), event("token", "x"))
    assert shape is not None
    assert shape.before.endswith(b'"content": "')
    assert shape.fits([event("token", "y"), event("token", ""), event("token", '"')]) == [
        True,
        False,
        False,
    ]
    both = [event("token", text, id=text) for text in ("m", "x")]
    assert codec.shape(*both) is None  # the id varies with it


def test_codecs_that_read_events_their_own_way_have_no_shapes():
    class Own(OpenAIChat):
        def decode(self, event):
            return super().decode(event)

    chunk = [b'{"choices":[{"delta":{"content":"%s"}}]}' % text for text in (b"a", b"b")]
    assert OpenAIChat(model="m").shape(*chunk) is not None
    assert Own(model="m").shape(*chunk) is None
