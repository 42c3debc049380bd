"""The codecs against captured streams, and against arbitrary bytes."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadgen.records import REASONING, FinishReason
from targets.base import Delta, Request, Usage
from targets.openai_chat import OpenAIChat
from targets.openai_completions import OpenAICompletions
from targets.openai_wire import merge_body, server_timings

WIRE = Path(__file__).parent.parent / "golden" / "wire"
CODECS = {"chat": OpenAIChat(model="m"), "completions": OpenAICompletions(model="m")}
EITHER = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def problem_of(codec, event):
    """The message of the ValueError that an event raises; any other exception fails the test."""
    try:
        assert isinstance(codec.decode(event), Delta)
    except ValueError as error:
        return str(error)
    return None


def expected_delta(fields):
    return Delta(
        **{
            **fields,
            "finish_reason": FinishReason[fields.get("finish_reason", "none")],
            "usage": Usage(**fields["usage"]) if "usage" in fields else None,
        }
    )


@pytest.mark.parametrize("capture", sorted(WIRE.glob("*.sse")), ids=lambda path: path.stem)
def test_captured_streams_decode_to_the_golden_deltas(capture):
    lines = capture.read_bytes().splitlines()
    events = [line.removeprefix(b"data: ") for line in lines if line]
    written = json.loads(capture.with_suffix(".deltas.json").read_text())
    codec = CODECS[capture.stem.rsplit("_", 1)[1]]
    assert [codec.decode(event) for event in events] == [expected_delta(d) for d in written]


@EITHER
@given(event=st.binary(max_size=300))
@example(event=b"\xff\xfe")
@example(event=b'{"choices":[{"delta":{"content":"\xc3"},"text":"\xc3"}]}')
@example(event=b'{"choices":' + b"[" * 100_000)
@example(event=b'{"usage":{"prompt_tokens":-1}}')
@example(event=b'{"usage":{"completion_tokens":4294967296}}')
@example(event=b'{"choices":[],"timings":{"x_s":' + b"9" * 400 + b"}}")
@example(event=b'{"usage":{"completion_tokens":' + b"9" * 400 + b"}}")
@example(event=b'{"error":{"code":' + b"9" * 400 + b"}}")
@example(event=b"{}")
@example(event=b"")
@example(event=b"[DONE]")
def test_decoding_arbitrary_bytes_raises_nothing_but_value_error(codec, event):
    message = problem_of(codec, event)
    assert message is None or (len(message) < 300 and "\n" not in message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = ("choices", "usage", "error", "timings", "object", "message", "delta", "content", "text")


@EITHER
@given(event=st.dictionaries(st.sampled_from(KEYS), JSON))
def test_decoding_any_json_under_the_known_keys_raises_nothing_but_value_error(codec, event):
    problem_of(codec, json.dumps(event).encode())


@EITHER
@pytest.mark.parametrize(
    "event",
    [
        b"not json",
        b'{"choices":[{"delta":{"content":3},"text":3}]}',
        b'{"choices":[{"delta":{"content":{"a":1}},"text":{"a":1}}]}',
        b'{"choices":[{"delta":{"content":"\xff"},"text":"\xff"}]}',
        b'{"choices":[{"delta":{"content":"a"},"text":"a"}]',
    ],
)
def test_an_event_that_violates_the_api_is_a_value_error(codec, event):
    with pytest.raises(ValueError, match="not an event of this API"):
        codec.decode(event)


@EITHER
@pytest.mark.parametrize(
    "event",
    [
        b"{}",
        b"7",
        b'"text"',
        b"[]",
        b'[{"title":"a page"}]',
        b'{"id":"x"}',
        b'{"type":"ping"}',
        b'{"sources":[{"title":"a page"}]}',  # Open WebUI
        b'{"choices":{}}',
        b"ping",
        b"[PING]",
        b'{"message":"searching"}',
        b'{"code":0,"message":"ok","base_resp":{"status_code":0,"status_msg":""}}',
    ],
)
def test_an_event_without_a_known_member_is_unknown(codec, event):
    assert codec.decode(event) == Delta(is_unknown=True)


ODD_MEMBERS = [  # PHP's empty array, -1 for unknown, empty objects of typed gateways
    b'"usage":{"prompt_tokens":9,"completion_tokens":7,"prompt_tokens_details":[]}',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":-1}}',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7,"completion_tokens_details":"none"}',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7,"total_tokens":"?","cached_tokens":1.5}',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7},"timings":[]',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7},"x_groq":"req_1"',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7},"error":{}',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7},"error":""',
    b'"usage":{"prompt_tokens":9,"completion_tokens":7},"base_resp":[]',
]
ODD_IN_DELTA = [b'"tool_calls":{}', b'"tool_calls":""', b'"function_call":[]', b'"reasoning":{}',
                b'"reasoning_content":[]', b'"reasoning_details":{}', b'"refusal":false',
                b'"error":null', b'"thinking":0']  # fmt: skip


@EITHER
@pytest.mark.parametrize("odd", ODD_MEMBERS)
def test_an_optional_member_that_cannot_be_used_is_absent(codec, odd):
    event = b'{"choices":[{"delta":{"content":"a"},"text":"a"}],%b}' % odd
    expected = Delta(True, True, "a", usage=Usage(input_tokens=9, output_tokens=7))
    assert codec.decode(event) == expected


@pytest.mark.parametrize("odd", ODD_IN_DELTA)
def test_an_odd_member_of_a_delta_is_absent(odd):
    event = b'{"choices":[null,{"finish_reason":7,"delta":{"content":"a",%b}}]}'
    assert CODECS["chat"].decode(event % odd) == Delta(True, True, "a")


@EITHER
@pytest.mark.parametrize("empty", [b"false", b"0", b"{}"])
def test_an_empty_text_of_another_form_is_no_text(codec, empty):
    event = b'{"choices":[{"delta":{"content":%b},"text":%b}]}' % (empty, empty)
    assert codec.decode(event) == Delta()


def test_a_call_that_is_an_object_is_a_token():
    event = b'{"choices":[{"delta":{"tool_calls":{"index":0,"function":{"name":"f"}}}}]}'
    assert CODECS["chat"].decode(event) == Delta(is_token=True)


CACHED = [  # the names' sources stand in targets/openai_usage.py
    b'"prompt_tokens_details":{"cached_tokens":5}',
    b'"input_tokens_details":{"cached_tokens":5}',
    b'"prompt_cache_hit_tokens":5,"prompt_cache_miss_tokens":4',
    b'"cached_tokens":5',
    b'"cache_read_input_tokens":5,"cache_creation_input_tokens":0',
    b'"num_cached_tokens":5',
    b'"cached_content_token_count":5',
    b'"prompt_cache_hit_tokens":5,"prompt_tokens_details":{"cached_tokens":0}',
    b'"cached_tokens":"5"',
]


@EITHER
@pytest.mark.parametrize("stated", CACHED)
def test_cached_tokens_are_read_under_every_name(codec, stated):
    event = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,%b}}' % stated
    assert codec.decode(event).usage == Usage(9, 2, cached_tokens=5)


@EITHER
def test_llamacpp_states_cached_tokens_among_its_timings(codec):
    event = b'{"choices":[],"usage":{"prompt_tokens":9},"timings":{"cache_n":5,"prompt_ms":2}}'
    assert codec.decode(event).usage == Usage(9, cached_tokens=5)


@EITHER
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b'{"input_tokens":9,"output_tokens":2}', Usage(9, 2)),
        (  # Anthropic counts cached tokens apart
            b'{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":4,'
            b'"cache_creation_input_tokens":2}',
            Usage(9, 2, cached_tokens=4),
        ),
        (
            b'{"input_tokens":9,"output_tokens":8,"output_tokens_details":{"reasoning_tokens":6}}',
            Usage(9, 8, reasoning_tokens=6),
        ),
        (  # xAI: reasoning is not in completion_tokens, but in the total
            b'{"prompt_tokens":9,"completion_tokens":2,"total_tokens":17,'
            b'"completion_tokens_details":{"reasoning_tokens":6}}',
            Usage(9, 8, reasoning_tokens=6),
        ),
        (
            b'{"prompt_tokens":9,"completion_tokens":8,"total_tokens":17,"reasoning_tokens":6}',
            Usage(9, 8, reasoning_tokens=6),
        ),
    ],
)
def test_usage_in_the_words_of_other_apis(codec, usage, expected):
    assert codec.decode(b'{"choices":[],"usage":%b}' % usage).usage == expected


@EITHER
def test_a_stated_time_that_no_float_holds_is_skipped_and_the_others_kept(codec):
    digits = b"9" * 400
    event = b'{"choices":[],"timings":{"a_s":%s,"b_ms":-%s,"c_s":2,"d_ms":3.0}}' % (digits, digits)
    assert codec.decode(event).server == {"c_s": 2.0, "d_s": 0.003}


def test_timings_that_are_not_finite_are_skipped():
    assert server_timings({"a_s": float("inf"), "b_ms": float("nan"), "c_s": 0}) == {"c_s": 0.0}


@EITHER
def test_the_largest_accepted_count(codec):
    usage = codec.decode(b'{"usage":{"completion_tokens":2147483647}}').usage
    assert usage == Usage(output_tokens=2147483647)


@EITHER
@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (b'{"prompt_tokens":9.0,"completion_tokens":12.0}', (9, 12)),
        (b'{"prompt_tokens":"9","completion_tokens":"12"}', (9, 12)),
        (b'{"prompt_tokens":-1,"completion_tokens":-1}', (None, None)),  # unknown
        (b'{"prompt_tokens":9,"completion_tokens":-1}', (9, None)),
    ],
)
def test_counts_in_unusual_forms_are_read_or_unknown(codec, usage, counts):
    found = codec.decode(b'{"choices":[],"usage":%b}' % usage).usage
    assert (found.input_tokens, found.output_tokens) == counts


@EITHER
@pytest.mark.parametrize("usage", [b"[]", b'""', b"0", b'[{"prompt_tokens":9}]'])
def test_a_usage_that_is_no_object_is_no_usage(codec, usage):
    assert codec.decode(b'{"choices":[],"usage":%b}' % usage) == Delta()


def test_usage_inside_the_choice_and_inside_an_extension():
    inside = CODECS["chat"].decode(
        b'{"choices":[{"delta":{},"finish_reason":"stop","usage":{"completion_tokens":7}}]}'
    )
    assert inside == Delta(finish_reason=FinishReason.stop, usage=Usage(output_tokens=7))
    event = b'{"choices":[],"x_groq":{"id":"r","usage":{"completion_tokens":7}}%b}'
    assert CODECS["chat"].decode(event % b"").usage == Usage(output_tokens=7)
    both = CODECS["chat"].decode(event % b',"usage":{"completion_tokens":8}')
    assert both.usage == Usage(output_tokens=8)


@EITHER
def test_a_chunk_without_choices_keeps_the_connection_alive(codec):
    name = b"chat.completion.chunk" if codec.kind == "chat" else b"text_completion"
    assert codec.decode(b'{"id":"x","object":"%b","choices":null}' % name) == Delta()


@EITHER
def test_the_word_null_is_no_finish_reason(codec):
    event = b'{"choices":[{"delta":{"content":"x"},"text":"x","finish_reason":"null"}]}'
    assert codec.decode(event) == Delta(True, True, "x")


@pytest.mark.parametrize(
    "delta",
    [
        b'{"content":"","reasoning_details":[{"type":"reasoning.text","text":"hm"}]}',
        b'{"content":"","reasoning_details":[{"type":"reasoning.summary","summary":"hm"}]}',
        b'{"content":"","thinking":"hm"}',
        b'{"content":null,"reasoning":"hm","reasoning_details":[{"text":"hm"}]}',
    ],
)
def test_reasoning_under_the_keys_of_gateways(delta):
    event = b'{"choices":[{"delta":%b}]}' % delta
    assert CODECS["chat"].decode(event) == Delta(is_token=True, text="hm")
    assert CODECS["chat"].looks_like_token(event)
    assert not CODECS["chat"].looks_like_answer(event)


def test_encrypted_reasoning_is_no_token():
    details = b'[{"type":"reasoning.encrypted","data":"eyJ"},null]'
    event = b'{"choices":[{"delta":{"content":"","reasoning_details":%b}}]}' % details
    assert CODECS["chat"].decode(event) == Delta()


def test_typed_content_parts_are_answers_and_thoughts():
    event = b'{"choices":[{"delta":{"content":[{"type":"thinking","thinking":"hm"}]}}]}'
    thought = CODECS["chat"].decode(event)
    assert (thought.is_token, thought.is_answer) == (True, False)
    event = b'{"choices":[{"delta":{"content":[{"type":"text","text":"so"}]}}]}'
    assert CODECS["chat"].decode(event) == Delta(True, True, "so")


@EITHER
@pytest.mark.parametrize(
    ("written", "text"),
    [
        (rb"\ud83d", "\ufffd"),  # RFC 8259 section 8.2: the grammar allows half of a pair
        (rb"\uDE00 a", "\ufffd a"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d \udead", "\\ud83d \ufffd"),  # the first is a backslash and letters
    ],
)
def test_half_of_a_surrogate_pair_is_a_replacement_character(codec, written, text):
    event = b'{"choices":[{"delta":{"content":"%s"},"text":"%s"}]}' % (written, written)
    assert codec.decode(event) == Delta(True, True, text)


def test_legacy_function_calls_are_tokens():
    event = b'{"choices":[{"delta":{"function_call":{"arguments":"{"}}}]}'
    assert CODECS["chat"].decode(event) == Delta(is_token=True)


ERRORS = [  # the forms' sources stand in targets/openai_errors.py
    b'{"error":{"message":"out of memory","code":500}}',
    b'{"error":"out of memory"}',
    b'{"error":{"error":{"message":"out of memory"}}}',
    b'{"error":true,"message":"out of memory"}',
    b'{"choices":[{"index":0,"delta":{"content":""},"text":"","finish_reason":"error",'
    b'"error":{"code":502,"message":"out of memory"}}]}',
    b'{"choices":[{"index":0,"delta":{"content":"a"},"text":"a","error":"out of memory"}]}',
    b'{"choices":[{"error":{"message":"out of memory"}}],"usage":{"completion_tokens":2}}',
    b'{"choices":[],"x_groq":{"id":"req_1","error":"out of memory"}}',
    b'{"choices":[{"delta":{},"text":""}],"x_groq":{"error":{"message":"out of memory"}}}',
    b'{"object":"error","message":"out of memory","code":500}',
    b'{"type":"error","message":"out of memory"}',
    b'{"errors":[{"message":"out of memory"}]}',
    b'{"detail":"out of memory"}',
    b'{"error_code":18,"error_msg":"out of memory"}',
    b'{"code":"InternalError","message":"out of memory","request_id":"r"}',
    b'{"status":"failed","message":"out of memory"}',
    b'{"success":false,"msg":"out of memory"}',
    b'{"id":"x","object":"chat.completion.chunk","choices":null,'
    b'"base_resp":{"status_code":1004,"status_msg":"out of memory"}}',
]


@EITHER
@pytest.mark.parametrize("event", ERRORS)
def test_an_error_inside_a_200_has_the_servers_sentence(codec, event):
    assert codec.decode(event).error == "out of memory"


def test_an_error_in_a_delta_has_the_servers_sentence():
    event = b'{"choices":[{"delta":{"content":"a","error":{"message":"out of memory"}}}]}'
    assert CODECS["chat"].decode(event).error == "out of memory"


@EITHER
@pytest.mark.parametrize("empty", [b"null", b'""', b"{}", b"[]", b"false"])
def test_an_empty_error_beside_choices_is_none(codec, empty):
    event = b'{"choices":[{"delta":{"content":"a"},"text":"a","error":%b}],"error":%b}'
    assert codec.decode(event % (empty, empty)) == Delta(True, True, "a")


def test_an_error_without_a_message_is_shown_as_its_json_and_cut_short():
    assert CODECS["chat"].decode(b'{"error":{"code":7}}').error == '{"code":7}'
    long = CODECS["chat"].decode(b'{"error":"' + b"x" * 9999 + b'"}')
    assert long.error == "x" * 300


def body_of(codec, request):
    return json.loads(codec.encode(request).body)


def test_a_chat_request_requests_a_stream_of_exact_length_with_usage():
    sent = OpenAIChat(model="llama").encode(Request("hi", 32))
    assert (sent.method, sent.path) == ("POST", "/v1/chat/completions")
    assert dict(sent.headers) == {
        "content-type": "application/json",
        "accept": "text/event-stream",
    }
    assert json.loads(sent.body) == {
        "model": "llama",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 32,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "min_tokens": 32,
    }


def test_a_completions_request_sends_the_prompt_as_it_is():
    sent = OpenAICompletions(model="llama", ignore_eos=False).encode(
        Request("hi\n", 4, temperature=0.5, seed=3)
    )
    assert sent.path == "/v1/completions"
    assert json.loads(sent.body) == {
        "model": "llama",
        "prompt": "hi\n",
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@EITHER
@pytest.mark.parametrize(
    ("extra_body", "changes", "is_exact"),
    [
        ({}, {}, True),
        ({"ignore_eos": None, "min_tokens": None}, {}, False),
        ({"ignore_eos": False, "min_tokens": None}, {}, False),
        ({"ignore_eos": None}, {}, True),  # min_tokens is left
        ({}, {"ignore_eos": False}, False),
        ({}, {"min_tokens": False}, True),
        ({"min_tokens": 5, "ignore_eos": None}, {}, False),
    ],
)
def test_the_body_decides_whether_lengths_are_exact(codec, extra_body, changes, is_exact):
    changed = codec.model_copy(update={"extra_body": extra_body, **changes})
    assert changed.requests_exact_lengths is is_exact


def test_messages_replace_the_prompt():
    talk = Request("unused", 1, messages=(("user", "a"), ("assistant", "b"), ("user", "c")))
    sent = body_of(CODECS["chat"], talk)
    assert [(m["role"], m["content"]) for m in sent["messages"]] == list(talk.messages)
    assert body_of(CODECS["completions"], talk)["prompt"] == "a\n\nb\n\nc"


def test_the_newer_limit_field_replaces_the_older_one():
    sent = body_of(OpenAIChat(limit_field="max_completion_tokens"), Request("", 5))
    assert sent["max_completion_tokens"] == 5
    assert "max_tokens" not in sent


def test_the_fields_of_the_codec_decide_which_usage_is_requested():
    running = body_of(OpenAIChat(continuous_usage=True), Request("", 1))
    assert running["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    without = body_of(OpenAIChat(include_usage=False, continuous_usage=True), Request("", 1))
    assert "stream_options" not in without


def test_extra_body_is_merged_last_deeply_and_null_removes():
    extra = {"temperature": None, "max_tokens": 9, "stream_options": {"x": 1}, "lora": {"a": [1]}}
    sent = body_of(OpenAIChat(extra_body=extra), Request("", 5))
    assert "temperature" not in sent
    assert sent["max_tokens"] == 9
    assert sent["stream_options"] == {"include_usage": True, "x": 1}
    assert sent["lora"] == {"a": [1]}


@settings(max_examples=40)
@given(
    body=st.dictionaries(st.text(max_size=3), JSON),
    extra=st.dictionaries(st.text(max_size=3), JSON),
)
def test_merging_twice_changes_nothing_more_and_leaves_the_rest_alone(body, extra):
    once = merge_body(body, extra)
    assert merge_body(once, extra) == once
    assert {k: v for k, v in once.items() if k not in extra} == {
        k: v for k, v in body.items() if k not in extra
    }


@EITHER
@given(prompt=st.text(), tokens=st.integers(1, 10_000), seed=st.none() | st.integers(0, 2**32))
def test_any_text_survives_encoding(codec, prompt, tokens, seed):
    sent = body_of(codec, Request(prompt, tokens, seed=seed))
    text = sent["prompt"] if "prompt" in sent else sent["messages"][0]["content"]
    assert (text, sent["max_tokens"], sent.get("seed")) == (prompt, tokens, seed)


@pytest.mark.parametrize("capture", sorted(WIRE.glob("*.sse")), ids=lambda path: path.stem)
def test_the_cheap_guess_agrees_with_the_decoder_on_captures(capture):
    codec = CODECS[capture.stem.rsplit("_", 1)[1]]
    for line in capture.read_bytes().splitlines():
        if line:
            assert codec.looks_like_token(line) == codec.decode(line[6:]).is_token, line
            assert codec.looks_like_answer(line) == codec.decode(line[6:]).is_answer, line


@EITHER
@given(fragment=st.binary(max_size=200))
def test_the_cheap_guess_takes_any_bytes(codec, fragment):
    assert codec.looks_like_token(fragment) in (True, False)


def test_the_cheap_guess_finds_a_token_after_an_empty_role_chunk():
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    token = b'data: {"choices":[{"delta":{"content": "x"}}]}\n\n'
    assert not CODECS["chat"].looks_like_token(role)
    assert CODECS["chat"].looks_like_token(role + token)


def test_deltas_are_immutable():
    with pytest.raises(AttributeError):
        setattr(Delta(), "text", "x")  # noqa: B010 - an assignment mypy would refuse, rightly
    assert msgspec.structs.asdict(Delta())["server"] == {}


@EITHER
def test_an_answer_that_is_not_streamed_is_requested_and_read_as_a_whole(codec):
    whole = codec.model_copy(update={"stream": False, "continuous_usage": True})
    sent = whole.encode(Request("hi", 4))
    assert dict(sent.headers)["accept"] == "application/json"
    body = json.loads(sent.body)
    assert body["stream"] is False
    assert "stream_options" not in body
    answer = (
        b'{"id":"c","object":"chat.completion","choices":[{"index":0,"text":"so",'
        b'"message":{"role":"assistant","content":"so"},"finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":9,"completion_tokens":4}}'
    )
    expected = Delta(True, True, "so", FinishReason.length, usage=Usage(9, 4))
    assert whole.decode(answer) == expected


def test_a_delta_beside_a_message_is_the_text_of_the_event():
    """Perplexity repeats the answer so far in `message`."""
    event = b'{"choices":[{"delta":{"content":"b"},"message":{"content":"ab"}}]}'
    assert CODECS["chat"].decode(event) == Delta(True, True, "b")


def test_the_reasoning_of_an_earlier_answer_goes_where_the_api_has_it():
    talk = (("user", "Hi"), (REASONING, "hm"), ("assistant", "Ho"), ("user", "And?"))
    body = json.loads(CODECS["chat"].encode(Request("", 3, messages=talk)).body)
    assert body["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "user", "content": "And?"},
    ]
