"""Events that need not be decoded: what is concluded from their shape is what decoding says."""

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.archive.decode import decode
from loadgen.archive.exchange import Exchange
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


def event(kind, text, ascii_only=True, api="chat", tokens=1, total=4, **fields):
    """One event as servers write them; `fields` are laid over it."""
    says = {"delta": {"content": text}} if api == "chat" else {"text": text}
    choice = {"index": 0, **says, "finish_reason": None}
    chunk = {"id": "m", "model": "m", "choices": [choice], **fields}
    if kind == "reasoning":
        choice["delta"] = {"content": "", "reasoning": text}
    if kind == "counted":
        chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": total}
    if kind == "usage":
        chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": 1}
    if kind == "finish":
        choice["finish_reason"] = "stop"
    if kind == "two":
        chunk["choices"] = [choice, {**choice, "index": 1}]
    return json.dumps(chunk, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


RARE = ["reasoning", "usage", "finish", "two"]
ONES = st.just(1)
KINDS = st.one_of(*(st.just([kind] * 12 + RARE) for kind in ("token", "counted")))
TOKENS = st.one_of(st.integers(0, 20), st.sampled_from([2**31 - 1, 2**31, 10**9 - 1, -1, 1.5]))


@st.composite
def events(draw, api):
    kinds = st.sampled_from(draw(KINDS))
    ids, tokens = (
        st.sampled_from(["m", "m", "m", "n"]),
        draw(st.sampled_from([TOKENS, TOKENS, ONES])),
    )
    one = st.builds(event, kinds, TEXTS, st.booleans(), st.just(api), tokens, TOKENS, id=ids)
    return draw(st.lists(one, min_size=2, max_size=12))


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
    asked = [event("token", "y"), event("token", ""), event("token", '"')]
    assert shape.read(asked) == [0, None, None]
    both = [event("token", text, id=text) for text in ("m", "x")]
    assert codec.shape(*both) is None  # the id varies with it


@pytest.mark.parametrize("codec", [fast for fast, _ in PAIRS])
def test_running_counts_are_read_without_decoding(codec):
    """Prompt tokens stay, the total grows along, and only completion tokens are counted."""
    counts = [1, 2, 7, 900_000_000]
    made = [event("counted", f"t{n}", True, codec.kind, n, n + 3) for n in counts]
    shape = codec.shape(*made[:2])
    assert shape is not None
    assert shape.count_index == 0
    assert shape.read(made) == counts
    wrong = [made[0].replace(b": 1,", b": " + other + b",") for other in (b"01", b"1.5", b"1e3")]
    assert shape.read([*wrong, made[0][:-1], made[0] + b" "]) == [None] * 5


def test_codecs_that_read_events_their_own_way_have_no_shapes():
    class Own(OpenAIChat):
        def decode(self, event):
            return super().decode(event)

    chunk = [b'{"choices":[{"delta":{"content":"%s"}}]}' % text for text in (b"a", b"b")]
    assert OpenAIChat(model="m").shape(*chunk) is not None
    assert Own(model="m").shape(*chunk) is None
