"""What recorded bytes mean. The wire text is written by hand, in the shape of the OpenAI API."""

import json
import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.archive.decode import answer_texts, decode, ends_suspiciously, quick_status
from loadgen.archive.exchange import Exchange
from loadgen.records import FinishReason, Status, TokenSource
from targets.openai_chat import OpenAIChat
from targets.openai_completions import OpenAICompletions

ADAPTER = OpenAIChat(model="m")
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def token(text, field="content"):
    return b'data: {"choices":[{"index":0,"delta":{"%s":"%s"}}]}\n\n' % (
        field.encode(),
        text.encode(),
    )


FAILED_WORDS = ["abort", "error", "cancelled", "timeout", "insufficient_system_resource", "ABORT"]
FINE_WORDS = ["stop", "length", "tool_calls", "content_filter", "eos_token", "repetition", "new"]
FINISHES = [
    ("STOP", FinishReason.stop),
    ("Length", FinishReason.length),
    ("MAX_TOKENS", FinishReason.length),  # Gemini's own word
    ("repetition", FinishReason.other),
]


def ends(word, adapter=ADAPTER):
    """An answer of two tokens with this finish reason."""
    end = b'data: {"choices":[{"index":0,"delta":{},"text":"","finish_reason":"%s"}]}\n\n'
    first = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"text":"a"}]}\n\n'
    other = first.replace(b'"a"', b'"b"')
    return decode(exchange(first, other, end % word.encode(), DONE), adapter)


@pytest.mark.parametrize("adapter", [ADAPTER, OpenAICompletions(model="m")])
@pytest.mark.parametrize("word", FAILED_WORDS)
def test_an_answer_that_the_server_gave_up_is_a_failure_with_its_reason(word, adapter):
    found = ends(word, adapter)
    assert (found.status, found.output_tokens) == (Status.stream_error, 2)
    assert found.error == f"error in the stream: finish_reason {word}"


@pytest.mark.parametrize("adapter", [ADAPTER, OpenAICompletions(model="m")])
@pytest.mark.parametrize("word", FINE_WORDS)
def test_an_answer_that_ended_for_another_reason_is_none(word, adapter):
    assert ends(word, adapter).status is Status.ok


@pytest.mark.parametrize("adapter", [ADAPTER, OpenAICompletions(model="m")])
@pytest.mark.parametrize(("word", "reason"), FINISHES)
def test_a_finish_reason_counts_in_capitals_too(word, reason, adapter):
    assert ends(word, adapter).finish_reason is reason


def usage(n, cached=0):
    return (
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\n' % (n, cached)
    )


def exchange(*reads, status=200, content_type="text/event-stream; charset=utf-8", **fields):
    """Reads of 1 ms distance, the first at 10 ms."""
    made = Exchange(0, sent_ns=1, headers_ns=5_000_000, http_status=status, done_ns=99_000_000)
    made.content_type = content_type
    made.parts = list(reads)
    made.times = [10_000_000 + 1_000_000 * i for i in range(len(reads))]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_tokens_take_the_stamp_of_the_read_that_completed_them():
    whole = token("b")
    result = decode(
        exchange(ROLE, token("a"), whole[:10], whole[10:], FINISH, usage(2), DONE), ADAPTER
    )
    assert result.status is Status.ok
    assert result.chunk_ns == [11_000_000, 13_000_000]
    assert (result.first_token_ns, result.last_token_ns) == (11_000_000, 13_000_000)
    assert (result.output_tokens, result.token_source) == (2, TokenSource.usage)
    assert result.chunk_tokens == [1, 1]
    assert result.finish_reason is FinishReason.length
    assert result.input_tokens == 9


def test_an_empty_role_chunk_is_no_token():
    result = decode(exchange(ROLE, token("a"), FINISH, DONE), ADAPTER)
    assert result.first_token_ns == 11_000_000
    assert (result.output_tokens, result.token_source) == (1, TokenSource.chunks)


def test_reasoning_counts_for_the_first_token_and_not_for_the_first_answer():
    result = decode(exchange(token("hm", "reasoning_content"), token("a"), FINISH, DONE), ADAPTER)
    assert result.first_token_ns == 10_000_000
    assert result.first_answer_ns == 11_000_000


def test_fewer_chunks_than_tokens_leave_the_tokens_per_chunk_unknown():
    result = decode(exchange(token("a"), token("bc"), FINISH, usage(5), DONE), ADAPTER)
    assert result.output_tokens == 5
    assert result.chunk_tokens == [0, 0]
    assert result.first_chunk_tokens == 2  # a third of the text
    assert result.token_source is TokenSource.usage


def four(*words, running=None):
    """A chunk of several words, with the running count if given."""
    text = "".join(f" {word}" for word in words)
    counts = f',"usage":{{"prompt_tokens":9,"completion_tokens":{running}}}' if running else ""
    return (
        f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]{counts}}}\n\n'.encode()
    )


WORDS = ["alpha", "bravo", "delta", "hotel"]


@pytest.mark.parametrize("finish", [FINISH, FINISH.replace(b"}]}", b'}],"x":1}')])
def test_the_tokens_of_the_first_chunk_follow_from_its_share_of_the_text(finish):
    even = decode(exchange(*[four(*WORDS)] * 5, four("alpha"), finish, usage(21), DONE), ADAPTER)
    assert (even.output_tokens, even.first_chunk_tokens) == (21, 4)
    single = decode(exchange(four("alpha"), *[four(*WORDS)] * 5, finish, usage(21), DONE), ADAPTER)
    assert (single.output_tokens, single.first_chunk_tokens) == (21, 1)


def test_each_later_chunk_keeps_a_token_of_its_own():
    """Nearly all of the text is in the first of three chunks, so 8 of 10 tokens are at most."""
    parts = token("x" * 96), token("a"), token("b"), FINISH, usage(10), DONE
    assert decode(exchange(*parts), ADAPTER).first_chunk_tokens == 8


@pytest.mark.parametrize("stated", [0, 1, 11])
def test_usage_below_the_chunks_seen_is_not_believed(stated):
    words = [token(f"w{k}") for k in range(12)]
    result = decode(exchange(*words, FINISH, usage(stated), DONE), ADAPTER)
    assert (result.status, result.output_tokens) == (Status.ok, 12)
    assert result.token_source is TokenSource.distrusted


def test_usage_above_what_the_text_can_hold_is_not_believed():
    words = [token(f"w{k % 10}") for k in range(12)]  # 24 bytes of text
    fits = decode(exchange(*words, FINISH, usage(24 + 16), DONE), ADAPTER)
    assert (fits.output_tokens, fits.token_source) == (40, TokenSource.usage)
    over = decode(exchange(*words, FINISH, usage(24 + 17), DONE), ADAPTER)
    assert (over.output_tokens, over.token_source) == (12, TokenSource.distrusted)


def test_tokens_without_text_have_no_upper_limit():
    call = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
    result = decode(exchange(token("a"), call, FINISH, usage(500), DONE), ADAPTER)
    assert (result.output_tokens, result.token_source) == (500, TokenSource.usage)


def test_a_total_that_every_chunk_repeats_is_no_running_count():
    chunks = [four(word, running=4) for word in WORDS]
    result = decode(exchange(*chunks, FINISH, usage(4), DONE), ADAPTER)
    assert (result.output_tokens, result.chunk_tokens) == (4, [1, 1, 1, 1])


def test_running_usage_gives_the_tokens_of_each_chunk():
    reads = [
        b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"usage":{"prompt_tokens":9,'
        b'"completion_tokens":%d}}\n\n' % n
        for n in (1, 4, 6)
    ]
    result = decode(exchange(*reads, FINISH, DONE), ADAPTER)
    assert result.chunk_tokens == [1, 3, 2]
    assert result.output_tokens == 6


def test_cached_tokens_are_kept():
    result = decode(exchange(token("a"), FINISH, usage(1, cached=7), DONE), ADAPTER)
    assert result.cached_tokens == 7


@pytest.mark.faults
@pytest.mark.parametrize("empty", [b"data:\n\n", b"data: \n\n", b"data:  \r\n\r\n"])
def test_an_event_without_data_is_skipped(empty):
    """Gateways send such events to keep a connection alive."""
    found = decode(exchange(empty, ROLE, empty, token("a"), token("b"), FINISH, DONE), ADAPTER)
    assert (found.status, found.output_tokens) == (Status.ok, 2)


@pytest.mark.faults
def test_done_without_a_finish_reason_is_a_complete_answer():
    result = decode(exchange(token("a"), token("b"), usage(2), DONE), ADAPTER)
    assert (result.status, result.error, result.output_tokens) == (Status.ok, "", 2)
    assert result.finish_reason is FinishReason.none


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ([token("a")], "without finish_reason and [DONE]"),
        ([token("a"), b'data: {"error":{"message":"out of memory"}}\n\n'], "out of memory"),
        ([token("a"), b'event: error\ndata: {"detail":"x"}\n\n', DONE], "error in the stream"),
        ([token("a"), b"data: \xff\xfe\n\n", DONE], "not understood"),
        ([token("a"), b"data: {half\n\n", DONE], "not understood"),
        ([FINISH, DONE], "without a single token"),
        ([], "without finish_reason"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_stream_error_and_keeps_its_tokens(reads, words):
    result = decode(exchange(*reads), ADAPTER)
    assert result.status is Status.stream_error
    assert words in result.error
    assert len(result.chunk_ns) == (1 if token("a") in reads else 0)


def test_a_missing_done_is_fine_where_a_finish_reason_came():
    assert decode(exchange(token("a"), FINISH), ADAPTER).status is Status.ok


def test_an_http_error_tells_the_servers_own_message():
    body = b'{"error":{"message":"model not found","type":"x","code":404}}'
    result = decode(exchange(body, status=404, content_type="application/json"), ADAPTER)
    assert result.status is Status.http_error
    assert result.error == "HTTP 404: model not found"


COUNTED = [ROLE, *[token("a")] * 70, FINISH, usage(64), DONE]
ENDS = [
    (COUNTED, 64, False),
    (COUNTED, 65, True),
    (COUNTED, 0, False),
    ([token("a"), b'data: {"error": {"message": "out of memory"}}\n\n'], 0, True),
    ([token("a"), b'data: {"error":"out of memory"}\n\n', DONE], 0, True),
    ([token("a"), b"event: error\ndata: out of memory\n\n"], 0, True),
    ([token("a"), b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"error":null}\n\n'], 0,
     False),
    ([token(r"\"error\": {"), FINISH, DONE], 0, False),  # in the text of the answer
    ([token("a"), FINISH, DONE], 64, False),  # no usage: nothing is known
    ([b'data: {"error":{"message":"early"}}\n\n', *[token("a")] * 30, FINISH, DONE], 0, False),
    ([token("a"), b'data: {"usage":{"output_tokens": 8,"input_tokens":70}}\n\n'], 64, True),
    ([], 64, False),
]  # fmt: skip


@pytest.mark.parametrize(("reads", "least_tokens", "is_suspicious"), ENDS)
def test_the_end_of_an_answer_shows_what_to_decode_during_the_run(
    reads, least_tokens, is_suspicious
):
    assert ends_suspiciously(exchange(*reads), least_tokens) is is_suspicious
    whole = exchange(b"".join(reads)) if reads else exchange()
    assert ends_suspiciously(whole, least_tokens) is is_suspicious


RATE_LIMITED = b'{"error":{"message":"slow down"}}'
LIMITS = [
    ("x-ratelimit-limit-requests: 10\nx-ratelimit-remaining-requests: 0\n",
     "x-ratelimit-limit-requests: 10"),
    ("anthropic-ratelimit-tokens-limit: 80000\nanthropic-ratelimit-tokens-reset: 2026\n",
     "anthropic-ratelimit-tokens-limit: 80000"),
    ('ratelimit-policy: "burst";q=100;w=60\nratelimit: "burst";r=0;t=30\n',
     'ratelimit-policy: "burst";q=100;w=60'),
    ("x-rate-limit-limit: 5\nratelimit-limit: 6\n", "x-rate-limit-limit: 5; ratelimit-limit: 6"),
]  # fmt: skip


@pytest.mark.parametrize(("limits", "shown"), LIMITS)
def test_the_error_of_a_failed_answer_states_its_limits_and_not_what_is_left(limits, shown):
    result = decode(exchange(RATE_LIMITED, status=429, limits=limits), ADAPTER)
    assert result.error == f"HTTP 429: slow down ({shown})"


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ("retry-after: 7\n", 7.0),
        ("retry-after-ms: 250\nretry-after: 1\n", 0.25),
        ("x-ratelimit-limit: 9\nretry-after: 0.5\n", 0.5),
        ("retry-after: Fri, 31 Dec 2027 23:59:59 GMT\n", math.nan),
        ("retry-after: -1\n", math.nan),
        ("", math.nan),
    ],
)
def test_retry_after_is_a_number_of_seconds(limits, seconds):
    result = decode(exchange(RATE_LIMITED, status=503, limits=limits), ADAPTER)
    assert (
        result.error == f"HTTP 503: slow down{' (x-ratelimit-limit: 9)' if 'x-' in limits else ''}"
    )
    assert result.retry_after_s == pytest.approx(seconds, nan_ok=True)


def test_an_http_error_with_another_body_tells_its_head():
    result = decode(exchange(b"<h1>Bad\nGateway</h1>", status=502, content_type="x"), ADAPTER)
    assert result.error == "HTTP 502: <h1>Bad Gateway</h1>"
    assert decode(exchange(status=502, content_type=""), ADAPTER).error == "HTTP 502: empty body"


@pytest.mark.parametrize("content_type", ["", "text/plain; charset=utf-8", "application/json"])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b": ping\n\n", b"\nevent: message\n"])
def test_an_event_stream_of_another_content_type_is_read(content_type, before):
    reads = (before + ROLE, token("a"), token("b"), FINISH, DONE)
    result = decode(exchange(*reads, content_type=content_type), ADAPTER)
    assert (result.status, result.output_tokens) == (Status.ok, 2)


def test_a_200_that_is_no_event_stream_says_what_came():
    result = decode(exchange(b"<html>hello", content_type="text/html"), ADAPTER)
    assert result.status is Status.stream_error
    assert "text/html" in result.error
    assert "<html>hello" in result.error


def of_choice(index, text="a"):
    return b'data: {"choices":[{"index":%d,"delta":{"content":"%s"}}]}\n\n' % (
        index,
        text.encode(),
    )


def test_a_stream_of_several_choices_is_a_failure():
    """A server or gateway that sets n by itself."""
    reads = (of_choice(0), of_choice(1), of_choice(0), of_choice(1), FINISH, DONE)
    result = decode(exchange(*reads), ADAPTER)
    assert (result.status, len(result.chunk_ns)) == (Status.stream_error, 4)
    assert "several choices" in result.error
    both = b'data: {"choices":[{"index":0,"delta":{"content":"a"}},%b]}\n\n'
    both %= b'{"index":1,"delta":{"content":"b"}}'
    assert "several choices" in decode(exchange(both, FINISH, DONE), ADAPTER).error


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [1, 1, 1], [0, 0, 0], [7, 8, 8]])
def test_an_index_that_counts_tokens_is_one_choice(indices):
    """Older TGI numbers the tokens there (`router/src/server.rs`)."""
    reads = (*map(of_choice, indices), FINISH, DONE)
    assert decode(exchange(*reads), ADAPTER).status is Status.ok


def test_an_empty_choice_beside_the_answer_is_none():
    beside = b'data: {"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{}}]}\n\n'
    assert decode(exchange(beside, beside, FINISH, DONE), ADAPTER).status is Status.ok


def thinking(n, reasoning, details=True, **more):
    """A usage of n output tokens with reasoning tokens, as OpenAI or as SGLang states them."""
    stated = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    counts = {"prompt_tokens": 9, "completion_tokens": n, **more}
    counts |= stated if details else {"reasoning_tokens": reasoning}
    return b"data: " + msgspec.json.encode({"choices": [], "usage": counts}) + b"\n\n"


def counts_of(*reads):
    found = decode(exchange(*reads), ADAPTER)
    return found.output_tokens, found.hidden_tokens, found.token_source, found.chunk_tokens


SPOKEN = [token(f"word{k} ") for k in range(4)]
THOUGHTS = [token(f"word{k} ", "reasoning_content") for k in range(4)]
ENCRYPTED = (
    b'data: {"choices":[{"index":0,"delta":{"content":"","reasoning_details":'
    b'[{"type":"reasoning.encrypted","data":"eyJ"}]}}]}\n\n'
)


@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize("before", [(ROLE,), (ROLE, ENCRYPTED)])
def test_reasoning_that_is_counted_and_not_streamed_is_hidden(before, details):
    """OpenAI's and xAI's reasoning models; OpenRouter's encrypted reasoning."""
    found = counts_of(*before, *SPOKEN, FINISH, thinking(504, 500, details), DONE)
    assert found == (504, 500, TokenSource.usage, [1, 1, 1, 1])


def test_hidden_reasoning_does_not_raise_the_tokens_per_chunk():
    """Two tokens per event, of which the first has its share of the text."""
    reads = (token("aa aa "), token("aa aa "), token("aa aa "), FINISH, thinking(106, 100), DONE)
    found = decode(exchange(ROLE, *reads), ADAPTER)
    assert (found.output_tokens, found.hidden_tokens) == (106, 100)
    assert (found.chunk_tokens, found.first_chunk_tokens) == ([0, 0, 0], 2)


def test_hidden_reasoning_is_no_part_of_running_counts():
    first = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}],"usage":%b}\n\n'
    usages = [b'{"completion_tokens":%d}' % (100 + k) for k in (1, 2, 4)]
    reads = [first % (b"abcd", usage) for usage in usages]
    found = counts_of(ROLE, *reads, FINISH, thinking(104, 100), DONE)
    assert found == (104, 100, TokenSource.usage, [1, 1, 2])


@pytest.mark.parametrize(
    ("reads", "usage_event", "expected"),
    [
        ((*THOUGHTS, *SPOKEN), thinking(8, 4), (8, 0)),  # streamed
        ((*THOUGHTS, *SPOKEN), thinking(4, 4, total_tokens=17), (8, 0)),  # xAI: counted apart
        (SPOKEN, thinking(4, 500, total_tokens=513), (504, 500)),  # Gemini: apart and hidden
        (SPOKEN, thinking(4, 500), (504, 500)),  # more reasoning than output: apart
        (SPOKEN, thinking(4, 3), (4, 0)),  # in the content, between <think> and </think>
        ((*THOUGHTS[:2], *SPOKEN), thinking(504, 500), (504, 498)),  # a summary of it
        (SPOKEN, thinking(4, 0), (4, 0)),
    ],
)
def test_the_reasoning_that_counts_as_hidden(reads, usage_event, expected):
    found = decode(exchange(ROLE, *reads, FINISH, usage_event, DONE), ADAPTER)
    assert (found.output_tokens, found.hidden_tokens) == expected
    assert found.token_source is TokenSource.usage


ERROR_BODY = b'{"error":{"message":"out of memory","code":500}}'


@pytest.mark.faults
@pytest.mark.parametrize(
    "reads",
    [
        (ERROR_BODY,),
        (ERROR_BODY.replace(b",", b",\n "), b"\n"),
        (ROLE, token("a"), ERROR_BODY + b"\n\n"),
        (ROLE, token("a"), ERROR_BODY + b"\n\n", DONE),  # was a success
        (ROLE, token("a"), FINISH, ERROR_BODY + b"\n", DONE),
        (ROLE, token("a"), b"event: server_error\n" + b"data: " + ERROR_BODY + b"\n\n", DONE),
    ],
)
def test_an_error_body_in_an_event_stream_has_the_servers_sentence(reads):
    result = decode(exchange(*reads), ADAPTER)
    assert result.status is Status.stream_error
    assert result.error == "error in the stream: out of memory"


def test_an_error_body_in_place_of_a_stream_has_the_servers_sentence():
    result = decode(exchange(ERROR_BODY, content_type="application/json"), ADAPTER)
    assert result.status is Status.stream_error
    assert result.error == "error in place of a stream: out of memory"


def test_an_unasked_encoding_is_refused():
    result = decode(exchange(b"\x1f\x8b", content_encoding="gzip"), ADAPTER)
    assert "gzip" in result.error


UNKNOWN = [
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b"event: sources\ndata: not JSON\n\n",
    b'event: metadata\ndata: [{"title":"a page"}]\n\n',
    b"data: {}\n\n",
    b'data: {"sources":[]}\n\n',
    b"data: [PING]\n\n",
]


@pytest.mark.faults
@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_events_are_skipped_and_counted(unknown):
    """Anthropic and Cohere send pings, Open WebUI sends sources, Azure sends empty objects."""
    reads = (unknown, ROLE, token("a"), unknown, token("b"), FINISH, usage(2), DONE)
    result = decode(exchange(*reads), ADAPTER)
    assert (result.status, result.error, result.unknown_events) == (Status.ok, "", 2)
    assert (result.first_token_ns, result.output_tokens) == (12_000_000, 2)


def test_an_answer_of_unknown_events_alone_is_a_failure():
    result = decode(exchange(*UNKNOWN, DONE), ADAPTER)
    assert (result.status, result.unknown_events) == (Status.stream_error, 6)
    assert "without a single token" in result.error


def test_a_stream_cut_after_the_word_null_is_no_success():
    event = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"null"}]}\n\n'
    result = decode(exchange(event, event), ADAPTER)
    assert (result.status, len(result.chunk_ns)) == (Status.stream_error, 2)


def test_a_transport_failure_wins_and_keeps_the_tokens_before_it():
    cut = exchange(token("a"), outcome=Status.timeout, error="no complete answer")
    result = decode(cut, ADAPTER)
    assert (result.status, result.error) == (Status.timeout, "no complete answer")
    assert len(result.chunk_ns) == 1


def test_the_quick_status_needs_no_decoding():
    assert quick_status(exchange(first_guess_ns=1)) is Status.ok
    assert quick_status(exchange()) is Status.stream_error
    assert quick_status(exchange(status=429)) is Status.http_error
    assert quick_status(exchange(outcome=Status.cancelled)) is Status.cancelled


EVENTS = [
    ROLE, token("a"), token("b", "reasoning_content"), token(""), token("é\\n\\u00e9"), FINISH,
    usage(2), DONE, b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"y"}}],"usage":{"completion_tokens":3}}\n\n',
    b'data: {"error":{"message":"out of memory"}}\n\n', b"data: {half\n\n", b"data: \n\n",
    b'data: {"choices":[]} {"choices":[]}\n\n', b'data: {"choices":\n\n', b"data: []}\n\n",
    b"data: \xff\n\n", b"event: error\ndata: {}\n\n", b": a comment\n\n", b"\n", b"data:{}\n\n",
    b'data: {"choices":[],"timings":{"queue_s":0.5}}\r\n\r\n', b"data: [DONE] \n\n", b"data: x",
]  # fmt: skip


class ChatOneByOne(OpenAIChat):
    def decode_all(self, events):
        raise ValueError("not at once")


class CompletionsOneByOne(OpenAICompletions):
    def decode_all(self, events):
        raise ValueError("not at once")


@given(
    events=st.lists(st.sampled_from(EVENTS), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    apis=st.sampled_from(
        [(OpenAIChat(), ChatOneByOne()), (OpenAICompletions(), CompletionsOneByOne())]
    ),
)
def test_reading_a_body_at_once_says_what_reading_it_piece_by_piece_says(events, cuts, apis):
    body = b"".join(events)
    ends = sorted({min(cut, len(body)) for cut in cuts} | {len(body)})
    reads = [body[start:end] for start, end in pairwise([0, *ends])]

    at_once, one_by_one = (decode(exchange(*reads), api) for api in apis)
    assert at_once == one_by_one


def test_a_codec_that_reads_events_its_own_way_is_asked_for_each():
    class Shouting(OpenAIChat):
        def decode(self, event):
            delta = super().decode(event)
            return msgspec.structs.replace(delta, is_token=delta.is_token or delta.is_done)

    result = decode(exchange(token("a"), FINISH, DONE), Shouting())
    assert result.chunk_ns == [10_000_000, 12_000_000]


WHOLE = OpenAIChat(model="m", stream=False)


def whole(message, finish="length", n=4, **more):
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    usage_of = {"prompt_tokens": 9, "completion_tokens": n, "total_tokens": 9 + n}
    body = {"object": "chat.completion", "choices": choices, "usage": usage_of, **more}
    return msgspec.json.encode(body)


def decoded_whole(*reads):
    return decode(exchange(*reads, content_type="application/json"), WHOLE)


def test_a_whole_answer_has_an_end_and_no_first_token():
    body = whole({"role": "assistant", "content": "a b c d", "reasoning_content": "hm"})
    result = decoded_whole(body[:20], body[20:])
    assert (result.status, result.error) == (Status.ok, "")
    assert (result.first_chunk_ns, result.first_token_ns, result.first_answer_ns) == (0, 0, 0)
    assert (result.last_token_ns, result.chunk_ns) == (11_000_000, [11_000_000])
    assert (result.output_tokens, result.token_source) == (4, TokenSource.usage)
    assert (result.input_tokens, result.finish_reason) == (9, FinishReason.length)
    assert answer_texts(exchange(body), WHOLE)[0] == "a b c d"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"out of memory"}}', "error in the answer: out of memory"),
        (whole({"content": "a"}, "error"), "error in the answer: finish_reason error"),
        (whole({"content": ""}, n=0), "without a single token"),
        (b"<html>hello", "not a whole answer: <html>hello"),
        (b"data: {}\n\n", "not a whole answer: data: {}"),
        (b"{}", "not a whole answer"),
    ],
)
def test_a_whole_answer_that_is_none_is_a_failure(body, words):
    result = decoded_whole(body)
    assert result.status is Status.stream_error
    assert words in result.error


def of_model(model, text="a", first=b""):
    """An answer of two tokens whose events state a model; `first` comes before them."""
    head = b'data: {"id":"x","model":%s,"choices"' % json.dumps(model).encode()
    tokens = [token(word).replace(b'data: {"choices"', head) for word in (text, "b")]
    return decode(exchange(first, *tokens, FINISH, DONE), ADAPTER)


@pytest.mark.faults
def test_an_answer_of_another_model_has_a_note_with_its_name():
    found = of_model("small")
    assert (found.status, found.error) == (Status.ok, "answered by model small")
    assert of_model('a "b" é').error == 'answered by model a "b" é'
    assert of_model("m").error == ""


def test_an_answer_that_states_no_model_has_no_note():
    assert decode(exchange(token("a"), FINISH, DONE), ADAPTER).error == ""
    assert of_model(None).error == of_model("").error == of_model(7).error == ""
    assert of_model("m", text='{\\"model\\": \\"small\\"}').error == ""


def test_the_first_event_that_states_a_model_counts():
    filters = b'data: {"model":"","choices":[],"prompt_filter_results":[]}\n\n'  # Azure
    assert of_model("small", first=filters).error == "answered by model small"
    assert of_model("small", first=ROLE.replace(b"{", b'{"model":"m",', 1)).error == ""


def test_the_model_of_the_extra_body_is_the_model_that_was_requested():
    adapter = OpenAIChat(model="m", extra_body={"model": "small"})
    answer = exchange(ROLE.replace(b"{", b'{"model":"small",', 1), token("a"), FINISH, DONE)
    assert decode(answer, adapter).error == ""
    assert decode(answer, ADAPTER).error == "answered by model small"
    assert decode(answer, OpenAIChat()).error == ""  # decoded from a file without the model


def test_a_failure_and_a_bad_end_come_before_the_note_on_the_model():
    answer = ROLE.replace(b"{", b'{"model":"small",', 1)
    assert "without finish_reason" in decode(exchange(answer, token("a")), ADAPTER).error
    ended = exchange(answer, token("a"), FINISH, DONE, error="complete at [DONE]; then reset")
    assert decode(ended, ADAPTER).error == "complete at [DONE]; then reset"


def crc_of(*words, adapter=ADAPTER):
    return decode(exchange(ROLE, *map(token, words), FINISH, DONE), adapter).answer_crc32


def test_answers_are_compared_by_the_first_128_bytes_of_their_text():
    """CRC-32 by the check value of its definition: 0xCBF43926 for "123456789"."""
    assert crc_of("1234", "567", "89") == crc_of("123456789") == 0xCBF43926
    assert crc_of() == 0
    long = ["word "] * 40  # 200 bytes, by their shape
    assert crc_of(*long) == crc_of(*long, "x") == crc_of(*["wo", "rd "] * 40)
    assert crc_of(*long) == crc_of("".join(long)) == crc_of(*["word word "] * 20)
    assert crc_of(*long) != crc_of(*long[:24])
    assert crc_of(*long) != crc_of("x", *long)


def test_reasoning_belongs_to_the_text_that_is_compared():
    def answer(first):
        return decode(exchange(token(first, "reasoning"), token("b"), FINISH, DONE), ADAPTER)

    assert answer("a").answer_crc32 != answer("c").answer_crc32


def test_a_whole_answer_is_compared_and_states_its_model_too():
    body = (
        b'{"model":"small","choices":[{"index":0,"message":{"content":"123456789"},'
        b'"finish_reason":"stop"}]}'
    )
    found = decode(
        exchange(body, content_type="application/json"), OpenAIChat(model="m", stream=False)
    )
    assert (found.status, found.answer_crc32) == (Status.ok, 0xCBF43926)
    assert found.error == "answered by model small"
