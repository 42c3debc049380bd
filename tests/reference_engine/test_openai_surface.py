"""The API around an answer: several choices, log-probabilities, models, tokens, and browsers."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from reference_engine.serving.build import build
from reference_engine.serving.serve_options import ServeOptions
from tests.reference_engine.engine_kit import toy_output
from tests.reference_engine.engine_server import serving

pytestmark = pytest.mark.usefixtures("both_forms")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "http://page.example:3000"


def printable(tokens: list[int]) -> str:
    return "".join(chr(t if 32 <= t < 127 else 32 + t % 95) for t in tokens)


def nano() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    return build(ServeOptions(shape="nano", device="cpu", kv_blocks=256))


def test_every_prompt_of_a_list_gets_its_answer():
    """Texts and lists of token ids; greedy answers are those of the prompt alone."""

    async def scene():
        async with serving() as server:
            body = {"prompt": ["abc", [100, 101], "x"], "max_tokens": 4, "temperature": 0}
            answer = await server.post(COMPLETIONS, body)
            await server.idle()
            return answer

    status, answer = asyncio.run(scene())
    assert status == 200
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, printable(toy_output(b"abc", 4))),
        (1, printable(toy_output(bytes([100, 101]), 4))),
        (2, printable(toy_output(b"x", 4))),
    ]
    counts = answer["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (3 + 2 + 1, 12)
    assert counts["total_tokens"] == 18


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_n_choices_differ_and_the_prompt_counts_once(path):
    async def scene():
        async with serving() as server:
            prompt = HI if path == CHAT else {"prompt": "abc"}
            body = {**prompt, "n": 8, "max_tokens": 5, "seed": 3}
            first = await server.post(path, body, **{"x-request-id": "mine"})
            alone = await server.post(path, {**body, "n": 1, "seed": 5})
            await server.idle()
            return first, alone

    (status, answer), (_, alone) = asyncio.run(scene())
    assert status == 200
    assert answer["id"].endswith("cmpl-mine")
    texts = [c["message"]["content"] if path == CHAT else c["text"] for c in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert len(set(texts)) == 8
    single = alone["choices"][0]
    assert texts[2] == (single["message"]["content"] if path == CHAT else single["text"])
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_a_stream_of_several_choices_has_each_choice_in_order_and_one_end():
    async def scene():
        async with serving() as server:
            body = {**HI, "n": 3, "max_tokens": 6, "seed": 1}
            options = {"stream_options": {"include_usage": True}}
            events = await server.events(CHAT, {**body, **options})
            _, whole = await server.post(CHAT, body)
            await server.idle()
            return events, whole

    (*events, usage, done), whole = asyncio.run(scene())
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 18
    assert usage["usage"]["prompt_tokens"] == len(b"user: Hi\nassistant: ")
    by_index: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for event in events:
        (choice,) = event["choices"]
        by_index[choice["index"]].append(choice)
    for index, choices in by_index.items():
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_choice_that_cannot_be_served_refuses_the_whole_body():
    async def scene():
        async with serving(max_model_len=64) as server:
            refused = await server.post(COMPLETIONS, {"prompt": ["ab", "x" * 100], "max_tokens": 4})
            await server.idle()
            return refused

    status, body = asyncio.run(scene())
    assert status == 400
    assert body["error"]["param"] == "prompt"
    assert body["error"]["code"] == "context_length_exceeded"


def test_a_client_that_leaves_frees_every_choice():
    async def scene():
        async with serving(executor_args={"step_s": 0.01}) as server:
            body = {**HI, "n": 4, "max_tokens": 1000, "stream": True}
            async with server.session.post(CHAT, json=body) as response:
                await response.content.readline()
            return await server.idle()

    assert asyncio.run(scene())["running"] == 0


def test_an_estimate_is_for_a_single_choice():
    async def scene():
        async with serving() as server:
            several = await server.post("/v1/estimate", {**HI, "n": 2})
            prompts = await server.post("/v1/estimate", {"prompt": ["a", "b"]})
            return several, prompts

    (status, several), (_, prompts) = asyncio.run(scene())
    assert (status, several["error"]["param"]) == (400, "n")
    assert prompts["error"]["param"] == "prompt"


def test_top_log_probabilities_of_a_model_are_a_distribution():
    """The chosen token of a greedy answer is the most likely, and the top tokens come in order."""

    async def scene():
        async with serving(nano()) as server:
            body = {**HI, "max_tokens": 4, "temperature": 0, "logprobs": True}
            _, chat = await server.post(CHAT, {**body, "top_logprobs": 20})
            events = await server.events(CHAT, {**body, "top_logprobs": 2})
            _, text = await server.post(
                COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "temperature": 0, "logprobs": 5}
            )
            return chat, events, text

    chat, events, text = asyncio.run(scene())
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    for token in content:
        values = [entry["logprob"] for entry in token["top_logprobs"]]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert token["token"] == token["top_logprobs"][0]["token"]
        assert token["logprob"] == pytest.approx(values[0])
        assert 0 < sum(map(math.exp, values)) < 1
    streamed = [
        token
        for event in events
        if event != "[DONE]"
        for token in (event["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert [len(token["top_logprobs"]) for token in streamed] == [2] * 4
    assert [token["token"] for token in streamed] == [token["token"] for token in content]
    tops = text["choices"][0]["logprobs"]["top_logprobs"]
    assert len(tops) == 3
    assert all(1 <= len(top) <= 6 for top in tops)


def test_a_penalty_changes_the_answer_of_a_model():
    """Of 40 greedy tokens of this model, fewer repeat with a penalty."""

    async def scene():
        async with serving(nano()) as server:
            answers = []
            for penalty in ({}, {"presence_penalty": 2}, {"repetition_penalty": 10}):
                body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "logprobs": 0}
                _, answer = await server.post(COMPLETIONS, {**body, **penalty})
                answers.append(answer["choices"][0]["text"])
            return answers

    plain, present, repeated = asyncio.run(scene())
    assert len(set(plain)) < min(len(set(present)), len(set(repeated)))


def test_a_device_without_logits_has_only_the_chosen_token():
    """Penalties and min_p are accepted and have no effect."""

    async def scene():
        async with serving() as server:
            body = {**HI, "max_tokens": 2, "temperature": 0}
            refused = await server.post(CHAT, {**body, "logprobs": True, "top_logprobs": 2})
            _, one = await server.post(CHAT, {**body, "logprobs": True, "top_logprobs": 1})
            _, plain = await server.post(CHAT, body)
            _, same = await server.post(CHAT, {**body, "presence_penalty": 2, "min_p": 0.5})
            return refused, one, plain, same

    (status, refused), one, plain, same = asyncio.run(scene())
    assert (status, refused["error"]["param"]) == (400, "top_logprobs")
    assert "device" in refused["error"]["message"]
    for token in one["choices"][0]["logprobs"]["content"]:
        (top,) = token["top_logprobs"]
        assert top["logprob"] == token["logprob"]
    assert same["choices"] == plain["choices"]


def test_a_model_is_found_by_its_id():
    async def scene():
        async with serving(model_name="org/toy") as server:
            _, listed = await server.get("/v1/models")
            found = await server.get("/v1/models/org/toy")
            quoted = await server.get("/v1/models/org%2Ftoy")
            missing = await server.get("/v1/models/gpt-4")
            return listed, found, quoted, missing

    listed, found, quoted, missing = asyncio.run(scene())
    (model,) = listed["data"]
    assert model["id"] == "org/toy"
    assert found == quoted == (200, model)
    status, body = missing
    assert status == 404
    assert body["error"]["type"] == "invalid_request_error"
    assert (body["error"]["param"], body["error"]["code"]) == ("model", "model_not_found")
    assert "'gpt-4'" in body["error"]["message"]


def test_ping_and_version():
    async def scene():
        async with serving() as server:
            statuses = []
            for method in ("GET", "POST"):
                async with server.session.request(method, "/ping") as response:
                    statuses.append((response.status, await response.read()))
            return statuses, await server.get("/version")

    statuses, (status, version) = asyncio.run(scene())
    assert statuses == [(200, b"")] * 2
    assert status == 200
    assert list(version) == ["version"]


def test_text_becomes_tokens_and_comes_back():
    text = "Grüße\n!"

    async def scene():
        async with serving() as server:
            _, tokens = await server.post("/tokenize", {"prompt": text, "return_token_strs": True})
            back = await server.post("/detokenize", {"tokens": tokens["tokens"]})
            chat = await server.post("/tokenize", HI)
            return tokens, back, chat

    tokens, back, (_, chat) = asyncio.run(scene())
    assert tokens["tokens"] == list(text.encode())
    assert tokens["count"] == 9
    assert tokens["max_model_len"] == chat["max_model_len"] > 0
    assert tokens["token_strs"][:2] == ["G", "r"]
    assert back == (200, {"prompt": text})
    assert bytes(chat["tokens"]) == b"user: Hi\nassistant: "
    assert chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [320]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, 400, "tokens"),
    ],
)
def test_a_token_request_that_cannot_be_served_names_the_field(path, body, status, param):
    async def scene():
        async with serving() as server:
            return await server.post(path, body)

    answer, error = asyncio.run(scene())
    assert (answer, error["error"]["param"]) == (status, param)


async def preflight(server: Any, origin: str) -> tuple[int, dict[str, str]]:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with server.session.options(CHAT, headers=headers) as response:
        return response.status, dict(response.headers)


def test_browsers_of_other_origins_are_refused_unless_allowed():
    async def scene():
        async with serving() as server:
            async with server.session.get("/v1/models", headers={"Origin": PAGE}) as response:
                plain = dict(response.headers)
            return await preflight(server, PAGE), plain

    (status, headers), plain = asyncio.run(scene())
    assert status == 405
    assert not [name for name in (*headers, *plain) if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    ("cors", "origin", "expected"),
    [(PAGE, PAGE, PAGE), ("*", PAGE, "*"), (PAGE, "http://evil.example", None)],
)
def test_a_page_of_an_allowed_origin_can_read_streams_and_errors(cors, origin, expected):
    """A browser sends no API key with its preflight request."""

    async def scene():
        async with serving(api_key="secret", cors=cors) as server:
            status, headers = await preflight(server, origin)
            sent = {"Origin": origin, "Authorization": "Bearer secret"}
            body = json.dumps({**HI, "stream": True, "max_tokens": 2})
            async with server.session.post(CHAT, data=body, headers=sent) as response:
                streamed = response.status, dict(response.headers)
                await response.read()
            async with server.session.post(CHAT, data=body, headers={"Origin": origin}) as response:
                refused = response.status, dict(response.headers)
            return status, headers, streamed, refused

    status, headers, streamed, refused = asyncio.run(scene())
    assert status == 204
    assert headers.get("Access-Control-Allow-Origin") == expected
    assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert [code for code, _ in (streamed, refused)] == [200, 401]
    for _, other in (streamed, refused):
        assert other.get("Access-Control-Allow-Origin") == expected
        assert "x-request-id" in other["Access-Control-Expose-Headers"]
        assert other.get("Vary") == (None if cors == "*" else "Origin")
