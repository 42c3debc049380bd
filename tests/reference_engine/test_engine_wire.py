"""Request and response bodies of the server, by example."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_engine.serving.wire.call import Call, parse_chat, parse_completion, parse_either
from reference_engine.serving.wire.response import (
    Chosen,
    Encoder,
    TokenUsage,
    WholeChoice,
    total_usage,
)
from reference_engine.serving.wire.wire_errors import WireError, error_body
from reference_engine.state.sequence import Sampling


def chat(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()


def completion(**fields):
    return json.dumps({"prompt": "Hi", **fields}).encode()


def test_a_full_chat_body_is_read():
    call = parse_chat(
        chat(
            model="tiny",
            max_tokens=7,
            min_tokens=3,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=11,
            stop=["a", "b"],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            ignore_eos=True,
            tenant="red",
            priority=-2,
            logprobs=True,
            top_logprobs=3,
            n=2,
            min_p=0.05,
            presence_penalty=-2,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            ttft_slo_ms=500,
            tpot_slo_ms=50.5,
            deadline_ms=9000,
            something_else={"x": 1},
        )
    )
    assert call == Call(
        model="tiny",
        messages=(("user", "Hi"),),
        max_tokens=7,
        min_tokens=3,
        sampling=Sampling(
            0.5,
            0.9,
            40,
            11,
            logprobs=True,
            min_p=0.05,
            top_logprobs=3,
            presence_penalty=-2.0,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
        ),
        n=2,
        has_seed=True,
        logprobs=True,
        stop=("a", "b"),
        ignore_eos=True,
        stream=True,
        include_usage=True,
        continuous_usage=True,
        tenant="red",
        priority=-2,
        ttft_slo_s=0.5,
        tpot_slo_s=0.0505,
        deadline_s=9.0,
    )


def test_the_tenant_header_takes_precedence_over_the_body():
    assert parse_chat(chat(user="u", tenant="t"), "h").tenant == "h"
    assert parse_chat(chat(user="u", tenant="t")).tenant == "t"
    assert parse_chat(chat(user="u")).tenant == "u"
    assert parse_completion(completion()).tenant == "default"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, (False, 0)), (0, (True, 0)), (1, (True, 1)), (20, (True, 20))]
)
def test_completions_enable_logprobs_with_a_number(value, expected):
    call = parse_completion(completion(logprobs=value))
    assert call.sampling is not None
    assert (call.sampling.logprobs, call.sampling.top_logprobs) == expected
    assert call.logprobs == expected[0]


@pytest.mark.parametrize("value", [21, -1, True, "1", 0.5])
def test_logprobs_of_a_completion_are_a_number_of_tokens(value):
    with pytest.raises(WireError, match=r"logprobs must be an integer in \[0, 20\], got") as caught:
        parse_completion(completion(logprobs=value))
    assert caught.value.param == "logprobs"


def test_a_call_has_a_choice_per_prompt_and_n_with_adjacent_seeds():
    call = parse_completion(completion(prompt=["a", [1, 2]], n=2, seed=5, best_of=2))
    choices = call.choices()
    assert [(choice.prompts, choice.n) for choice in choices] == [
        (("a",), 1), (("a",), 1), (((1, 2),), 1), (((1, 2),), 1)
    ]  # fmt: skip
    assert [choice.sampling and choice.sampling.seed for choice in choices] == [5, 6, 5, 6]
    assert {choice.max_tokens for choice in choices} == {16}
    of_a_chat = parse_chat(chat(n=3)).choices()
    assert [choice.messages for choice in of_a_chat] == [(("user", "Hi"),)] * 3
    assert parse_chat(chat()).choices() == [parse_chat(chat())]


def test_a_body_with_messages_is_a_chat():
    assert parse_either(chat()).is_chat
    assert not parse_either(completion()).is_chat


def test_max_completion_tokens_takes_precedence_over_max_tokens():
    assert parse_chat(chat(max_tokens=7, max_completion_tokens=5)).max_tokens == 5


def test_defaults_are_those_of_the_api():
    assert parse_chat(chat()).max_tokens is None
    assert parse_completion(completion()).max_tokens == 16
    assert parse_chat(chat()).sampling == Sampling(temperature=1.0)
    assert parse_chat(chat(top_k=-1)).sampling == Sampling(temperature=1.0, top_k=0)


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1e-46, 0.0), (9.9e-6, 0.0), (1e-5, 1e-5), (2, 2.0)]
)
def test_a_temperature_that_would_overflow_is_greedy(temperature, expected):
    sampling = parse_chat(chat(temperature=temperature, top_k=5)).sampling
    assert sampling == Sampling(temperature=expected, top_k=5)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert parse_chat(body).messages == (("user", "ab"),)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ("x",)),
        (["x"], ("x",)),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        (["x", "y"], ("x", "y")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["x"] * 256, ("x",) * 256),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_such(prompt, expected):
    assert parse_completion(completion(prompt=prompt)).prompts == expected


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b"[1]", None, "must be a JSON object, got list"),
        (b"{}", "messages", "non-empty list"),
        (chat(messages=[]), "messages", "non-empty list"),
        (chat(messages=["x"]), "messages[0]", "must be an object"),
        (chat(messages=[{"role": "cat", "content": "x"}]), "messages[0].role", "'cat'"),
        (chat(messages=[{"role": "user"}]), "messages[0].content", "must be a string"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0]",
            "the only supported kind of part",
        ),
        (chat(n=0), "n", r"an integer in \[1, 8\], got 0"),
        (chat(n=9), "n", r"an integer in \[1, 8\], got 9"),
        (chat(n=True), "n", "got True"),
        (chat(n=2, best_of=3), "best_of", r"equal to n \(2\), got 3"),
        (chat(best_of=2), "best_of", r"equal to n \(1\), got 2"),
        (chat(logprobs=1), "logprobs", "true or false"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", r"in \[0, 20\], got 21"),
        (chat(top_logprobs=2), "top_logprobs", "only allowed when logprobs is true"),
        (chat(presence_penalty=2.1), "presence_penalty", r"in \[-2, 2\], got 2.1"),
        (chat(frequency_penalty="1"), "frequency_penalty", r"in \[-2, 2\], got '1'"),
        (chat(repetition_penalty=0), "repetition_penalty", r"in \(0, 10\], got 0"),
        (chat(repetition_penalty=11), "repetition_penalty", r"in \(0, 10\], got 11"),
        (chat(min_p=1.5), "min_p", r"in \[0, 1\], got 1.5"),
        (chat(logit_bias={"1": 2}), "logit_bias", "not supported"),
        (chat(ttft_slo_ms=0), "ttft_slo_ms", r"in \(0, 86400000\], got 0"),
        (chat(tpot_slo_ms="50"), "tpot_slo_ms", "got '50'"),
        (chat(deadline_ms=-1), "deadline_ms", "got -1"),
        (chat(tenant="a\nb"), "tenant", "printable"),
        (chat(tenant="x" * 129), "tenant", "up to 128 printable characters, got 'x{99}$"),
        (chat(tools=[{"type": "function"}]), "tools", "not supported"),
        (chat(response_format={"type": "json_object"}), "response_format", "not supported"),
        (chat(max_tokens=0), "max_tokens", "at least 1, got 0"),
        (chat(max_tokens="5"), "max_tokens", "got '5'"),
        (chat(max_tokens=True), "max_tokens", "got True"),
        (chat(max_tokens=3, min_tokens=4), "min_tokens", "above max_tokens 3"),
        (chat(temperature=-1), "temperature", r"in \[0, 2\], got -1"),
        (chat(temperature=float("nan")), "temperature", "got nan"),
        (chat(top_p=0), "top_p", r"in \(0, 1\], got 0"),
        (chat(seed=1.5), "seed", "an integer of at least -9223372036854775808, got 1.5"),
        (chat(seed=1 << 63), "seed", r"below 2\^63, got 9223372036854775808"),
        (chat(stop=["a"] * 5), "stop", r"up to 4 non-empty strings, got \['a', 'a'"),
        (chat(stop=[""]), "stop", "non-empty"),
        (chat(stream="yes"), "stream", "true or false"),
        (chat(stream_options=[1]), "stream_options", "an object"),
        (
            chat(stream=True, stream_options={"include_usage": 1}),
            "stream_options.include_usage",
            "true or false",
        ),
        (chat(stream_options={"include_usage": True}), "stream_options", "when stream is true"),
        (chat(model=3), "model", "a string"),
    ],
)
def test_a_body_that_cannot_be_served_names_the_field(body, param, words):
    with pytest.raises(WireError, match=words) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_stream_options_need_a_stream():
    """As with vLLM and OpenAI; null and an empty object are allowed."""
    unstreamed: tuple[dict[str, bool | None], ...] = ({}, {"stream": False}, {"stream": None})
    for stream in unstreamed:
        with pytest.raises(WireError) as caught:
            parse_completion(completion(prompt="a", stream_options={"x": 1}, **stream))
        assert (caught.value.status, caught.value.param) == (400, "stream_options")
        assert not parse_chat(chat(stream_options=None, **stream)).include_usage
        assert not parse_chat(chat(stream_options={}, **stream)).include_usage


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], ["a", []], ["a", [[1]]], [1, "a"], [True], 5, ["a"] * 257]
)
def test_a_prompt_that_is_no_prompt_is_refused(prompt):
    with pytest.raises(
        WireError, match=r"a string, a non-empty list of token|limit of 256"
    ) as caught:
        parse_completion(completion(prompt=prompt))
    assert caught.value.param == "prompt"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "prompt", "max_tokens", "stop", "stream_options", "n", "seed"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
            max_leaves=5,
        ),
    )
)
def test_any_json_is_parsed_or_refused_with_a_wire_error(data):
    for parse in (parse_chat, parse_completion):
        with suppress(WireError):
            assert isinstance(parse(json.dumps(data).encode()), Call)


def test_a_lone_surrogate_becomes_a_question_mark_and_is_dropped_as_a_stop():
    call = parse_completion(rb'{"prompt": "a\ud800b", "stop": ["\udfff", "c"]}')
    assert (call.prompts, call.stop) == (("a?b",), ("c",))


@pytest.mark.parametrize("token", [1 << 32, -(1 << 32), 1 << 100])
def test_a_token_id_above_32_bits_is_refused(token):
    with pytest.raises(WireError, match=f"token id {token} is above 32 bits") as caught:
        parse_completion(completion(prompt=[1, token]))
    assert caught.value.param == "prompt"


USAGE = TokenUsage(5, 2, 0, queue_s=0.25, ttft_s=0.5, e2e_s=0.75)
COUNTS = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def events(data: bytes):
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [
        part[6:] if part == "data: [DONE]" else json.loads(part.removeprefix("data: "))
        for part in parts
    ]


def test_a_chat_stream_on_the_wire():
    encoder = Encoder(parse_chat(chat(stream=True)), "chatcmpl-1", "tiny", 1_700_000_000)
    head = {
        "id": "chatcmpl-1",
        "created": 1_700_000_000,
        "model": "tiny",
        "object": "chat.completion.chunk",
    }
    piece = encoder.text_writer(5, 0, has_counts=False)
    data = encoder.opening(5, 0) + piece('"é', 1) + encoder.event("", "stop") + encoder.end(USAGE)
    assert events(data) == [
        {
            **head,
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": ""},
                    "finish_reason": None,
                }
            ],
        },
        {**head, "choices": [{"index": 0, "delta": {"content": '"é'}, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {
            **head,
            "choices": [],
            "usage": COUNTS,
            "timings": {"queue_s": 0.25, "ttft_s": 0.5, "e2e_s": 0.75},
        },
        "[DONE]",
    ]


def test_a_completion_stream_on_the_wire():
    encoder = Encoder(parse_completion(completion(stream=True)), "cmpl-1", "tiny", 3)
    head = {"id": "cmpl-1", "created": 3, "model": "tiny", "object": "text_completion"}
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
    data = encoder.opening(5, 0) + encoder.event("a", "length", USAGE) + encoder.end(None)
    assert events(data) == [{**head, "choices": [choice], "usage": COUNTS}, "[DONE]"]


def test_a_whole_chat_answer():
    encoder = Encoder(parse_chat(chat()), "chatcmpl-1", "tiny", 3)
    body = json.loads(encoder.whole([WholeChoice("hello", "length")], USAGE))
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "logprobs": None,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": "hello"},
        }
    ]
    assert body["usage"] == COUNTS


def test_an_error_has_the_shape_of_the_api():
    error = WireError("too long", param="prompt", code="context_length_exceeded")
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }


def test_logprobs_on_the_wire():
    call = parse_chat(chat(logprobs=True))
    encoder = Encoder(call, "chatcmpl-1", "tiny", 3)
    first, second = Chosen("é", 0, -0.5), Chosen("", 1, -2.0)
    (event,) = events(encoder.event("é", None, chosen=first))
    entry = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}
    assert event["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}
    choice = WholeChoice("é", "stop", [first, second])
    whole = json.loads(encoder.whole([choice], USAGE))
    assert [token["logprob"] for token in whole["choices"][0]["logprobs"]["content"]] == [-0.5, -2]

    call = parse_completion(completion(logprobs=0))
    encoder = Encoder(call, "cmpl-1", "tiny", 3)
    whole = json.loads(encoder.whole([choice], USAGE))
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["é", ""],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }
    (event,) = events(encoder.event("", None, chosen=second))
    assert event["choices"][0]["logprobs"]["text_offset"] == [1]


def test_top_log_probabilities_on_the_wire():
    top = (("a", -0.25), ("b", -1.5))
    token = Chosen("é", 0, -2.0, top)
    encoder = Encoder(parse_chat(chat(logprobs=True, top_logprobs=2)), "chatcmpl-1", "tiny", 3)
    (event,) = events(encoder.event("é", None, chosen=token))
    (entry,) = event["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [97]},
        {"token": "b", "logprob": -1.5, "bytes": [98]},
    ]
    encoder = Encoder(parse_completion(completion(logprobs=2)), "cmpl-1", "tiny", 3)
    doubled = Chosen("a", 1, -0.25, (("a", -0.25), ("a", -3.0)))  # two tokens with one text
    whole = json.loads(encoder.whole([WholeChoice("éa", "stop", [token, doubled])], USAGE))
    tops = whole["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [{"é": -2.0, "a": -0.25, "b": -1.5}, {"a": -0.25}]


def test_the_choices_of_an_answer_have_their_index():
    encoder = Encoder(parse_chat(chat(stream=True, n=3)), "chatcmpl-1", "tiny", 3, index=2)
    piece = encoder.text_writer(5, 0, has_counts=False)
    data = encoder.opening(5, 0) + piece("a", 1) + encoder.event("", "stop")
    assert [event["choices"][0]["index"] for event in events(data)] == [2, 2, 2]
    whole = json.loads(encoder.whole([WholeChoice("a", "stop"), WholeChoice("b", "length")], USAGE))
    choices = whole["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "a", "stop"), (1, "b", "length")
    ]  # fmt: skip


def test_a_prompt_counts_once_and_every_output_counts():
    """Two prompts of 5 and 7 tokens with two choices each."""
    usages = [
        TokenUsage(5, 2, 0, 0.25, 0.5, 0.75),
        TokenUsage(5, 3, 4, 0.125, 0.625, 1.5),
        TokenUsage(7, 1, 2, 0.5, 1.0, 1.25),
        TokenUsage(7, 4, 6),
    ]
    assert total_usage(usages, 2) == TokenUsage(12, 10, 2, 0.125, 0.5, 1.5)


def test_an_error_may_carry_more():
    error = WireError("full", status=429, more={"predicted_wait_ms": 7}, retry_after_s=1)
    assert json.loads(error_body(error))["error"]["predicted_wait_ms"] == 7


ODD_TEXTS = st.text(st.characters(exclude_categories=()), min_size=1)  # lone surrogates, too


@given(ODD_TEXTS, st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_the_fast_text_event_equals_the_general_event(text, n_input, n_output, n_cached):
    usage = TokenUsage(n_input, n_output, n_cached)
    for call in (parse_chat(chat(stream=True)), parse_completion(completion(stream=True))):
        encoder = Encoder(call, "id-1", "tiny", 3)
        plain, counted = (
            encoder.text_writer(n_input, n_cached, has_counts) for has_counts in (False, True)
        )
        assert events(plain(text, n_output)) == events(encoder.event(text, None))
        assert events(counted(text, n_output)) == events(encoder.event(text, None, usage))


def test_the_bytes_of_a_text_event():
    encoder = Encoder(parse_completion(completion(stream=True)), "cmpl-1", "tiny", 3)
    assert encoder.text_writer(5, 2, has_counts=True)('"é\n', 7).decode() == (
        'data: {"id": "cmpl-1", "created": 3, "model": "tiny", "object": "text_completion",'
        '"choices":[{"index":0,"text":"\\"é\\n","logprobs":null,"finish_reason":null}],'
        '"usage":{"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, '
        '"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
    )
