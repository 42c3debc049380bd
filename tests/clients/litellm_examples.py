"""LiteLLM's examples for an OpenAI-compatible server: `litellm_examples.py URL`. Started by
scripts/client-check in an environment with the litellm package."""

from __future__ import annotations

import asyncio
import sys

import litellm  # type: ignore[import-not-found, unused-ignore]  # not a dependency

MESSAGES = [{"role": "user", "content": "Hey, how is it going?"}]


def chat(sent: dict[str, str]) -> None:
    answer = litellm.completion(**sent, messages=MESSAGES, max_tokens=5)
    assert len(answer.choices[0].message.content) == 5
    assert answer.usage.completion_tokens == 5
    several = litellm.completion(**sent, messages=MESSAGES, max_tokens=5, n=2)
    assert len(several.choices) == 2


def stream(sent: dict[str, str]) -> None:
    chunks = litellm.completion(**sent, messages=MESSAGES, max_tokens=5, stream=True)
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == 5


def text(sent: dict[str, str]) -> None:
    model = sent["model"].replace("openai/", "text-completion-openai/")
    answer = litellm.text_completion(**{**sent, "model": model}, prompt="abc", max_tokens=4)
    assert len(answer.choices[0].text) == 4


async def asynchronous(sent: dict[str, str]) -> None:
    answer = await litellm.acompletion(**sent, messages=MESSAGES, max_tokens=3)
    assert answer.usage.completion_tokens == 3


def main(url: str) -> None:
    """Run every example against the model `nano` of the server at `url`."""
    sent = {"model": "openai/nano", "api_base": f"{url}/v1", "api_key": "none"}
    chat(sent)
    stream(sent)
    text(sent)
    asyncio.run(asynchronous(sent))


if __name__ == "__main__":
    main(sys.argv[1])
