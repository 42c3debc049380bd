"""The examples of the openai SDK's documentation against a server: `openai_examples.py URL`.

Runs in an environment with the openai package; scripts/client-check and tests/e2e/test_clients.py
start it. An assertion fails if an answer is not as documented.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable

import openai  # type: ignore[import-not-found, unused-ignore]  # not a dependency

MESSAGES = [
    {"role": "developer", "content": "Talk like a pirate."},
    {"role": "user", "content": "Are semicolons optional?"},
]


def refusal(call: Callable[[], object]) -> openai.APIStatusError:
    """The error of a call that the server refuses."""
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("the call was not refused")


def models(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    error = refusal(lambda: client.models.retrieve("no-such-model"))
    assert isinstance(error, openai.NotFoundError)
    assert (error.code, error.param) == ("model_not_found", "model")
    return str(model.id)


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=5)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content) == 5
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer._request_id


def chat_stream(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(text) == 5
    assert chunks[-1].choices[0].finish_reason == "length"
    assert not last.choices
    assert last.usage.completion_tokens == 5


def several_choices(client: openai.OpenAI, model: str) -> None:
    sent = {"model": model, "messages": MESSAGES, "max_tokens": 5, "n": 3, "seed": 7}
    answer = client.chat.completions.create(**sent)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 15
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**sent, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def log_probabilities(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.token == token.top_logprobs[0].token
        assert 0 < math.exp(token.logprob) <= 1
    completion = client.completions.create(model=model, prompt="abc", max_tokens=3, logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 3
    assert logprobs.text_offset == [0, 1, 2]
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert token in top


def completions(client: openai.OpenAI, model: str) -> None:
    sent = {"model": model, "prompt": "Say this is a test", "max_tokens": 7, "temperature": 0}
    answer = client.completions.create(**sent)
    assert answer.object == "text_completion"
    assert len(answer.choices[0].text) == 7
    assert answer.usage.prompt_tokens == 18
    chunks = client.completions.create(**sent, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    batch = client.completions.create(**{**sent, "prompt": ["Say this is a test", "abc"]})
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.choices[0].text == answer.choices[0].text
    ids = client.completions.create(**{**sent, "prompt": list(b"Say this is a test")})
    assert ids.choices[0].text == answer.choices[0].text


def sampling_parameters(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=30,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        seed=1,
        stop=["\n"],
        extra_body={"min_p": 0.05, "repetition_penalty": 1.1, "top_k": 20},
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def errors(client: openai.OpenAI, model: str) -> None:
    error = refusal(lambda: client.chat.completions.create(model=model, messages=MESSAGES, n=9))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "n"
    assert "[1, 8]" in error.message
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=1
    )
    assert raw.headers["x-request-id"]
    assert raw.parse().usage.completion_tokens == 1


async def asynchronous(url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        answer = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2)
        assert answer.usage.completion_tokens == 2
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=4, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert len(text) == 4


def main(url: str) -> None:
    """Run every example against the server at `url`, which ends with /v1."""
    with openai.OpenAI(base_url=url, api_key="none") as client:
        model = models(client)
        for example in (
            chat,
            chat_stream,
            several_choices,
            log_probabilities,
            completions,
            sampling_parameters,
            errors,
        ):
            example(client, model)
    asyncio.run(asynchronous(url, model))


if __name__ == "__main__":
    main(f"{sys.argv[1]}/v1")
