"""The codec of the OpenAI chat completions API (`POST /v1/chat/completions`, streamed).

Source: the OpenAI API reference, "Chat completions: streaming"; the additions of vLLM and SGLang:
`ignore_eos`, `min_tokens`, `reasoning_content`/`reasoning` and
`stream_options.continuous_usage_stats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from loadgen.manifest.json_section import JsonObject
from loadgen.records import REASONING
from targets.base import Delta, Request
from targets.openai_errors import stated_error
from targets.openai_usage import UsageWire
from targets.openai_wire import (
    OpenAICodec,
    StreamEvent,
    failed_finish,
    finish_reason,
    has_text,
    is_plain,
    joined_index,
    tail,
)


class _ChatMessage(msgspec.Struct):
    content: str | list[Any] | None = None  # a list of typed parts from some gateways
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None  # OpenRouter: typed parts, perhaps without the text
    thinking: str | None = None  # Ollama's own word, through gateways
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | dict[str, msgspec.Raw] | None = None
    function_call: dict[str, msgspec.Raw] | None = None
    error: Any = None


class _ChatChoice(msgspec.Struct):
    index: int | None = None
    delta: _ChatMessage | None = None
    message: _ChatMessage | None = None  # of a whole answer
    finish_reason: str | None = None
    usage: UsageWire | None = None
    error: Any = None


class OpenAIChat(OpenAICodec):
    """Chat completions. `limit_field` is the name of the output limit.

    The default is `max_tokens`, because every self-hosted server honours it and some ignore the
    newer `max_completion_tokens`: an ignored limit makes a run of unlimited answers. Hosted
    reasoning models reject `max_tokens`; the preflight then switches to the newer name.
    """

    kind = "chat"
    path: ClassVar[str] = "/chat/completions"
    decoder: ClassVar = msgspec.json.Decoder(StreamEvent[_ChatChoice])
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"

    def prompt_fields(self, request: Request) -> dict[str, object]:
        return {
            "messages": _messages(request.messages or (("user", request.prompt),)),
            **request.fields,
            self.limit_field: request.output_tokens,
        }

    @staticmethod
    def to_delta(event: StreamEvent[_ChatChoice]) -> Delta:
        choices = event.choices or ()
        is_bare = is_plain(event)
        if is_bare and len(choices) == 1 and _is_plain_choice(choices[0]):
            message = choices[0].delta  # nearly every event: one piece of text and nothing else
            if message is not None and message.content and isinstance(message.content, str):
                number = choices[0].index or 0
                return Delta(is_token=True, is_answer=True, text=message.content, choice=number)
        text = ""
        is_token = is_answer = False
        finish = usage = failure = None
        index: int | None = None
        for choice in choices:
            finish = choice.finish_reason or finish
            usage = choice.usage or usage
            failure = failure or stated_error(choice.error)
            message = choice.delta or choice.message
            if message is not None:
                failure = failure or stated_error(message.error)
                answer, reasoning = _texts(message)
                text += answer or reasoning
                is_answer = is_answer or bool(answer)
                if answer or reasoning or _has_call(message):
                    is_token, index = True, joined_index(index, choice.index)
        reason = finish_reason(finish)
        if choices and is_bare and usage is None:
            rest: JsonObject = {"error": failure or failed_finish(finish)}
        else:
            rest = tail(event, finish, usage, failure)
        return Delta(is_token, is_answer, text, reason, choice=index or 0, **rest)

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold a token's text under one of its keys, or a call; a search for
        keys, without parsing.
        """
        return any(has_text(fragment, key) for key in _TEXT_KEYS) or any(
            call in fragment for call in _CALLS
        )

    def looks_like_answer(self, fragment: bytes) -> bool:
        """Whether the bytes hold content, a refusal or a typed part of type `text`."""
        return any(has_text(fragment, key) for key in _ANSWER_KEYS) or any(
            part in fragment for part in _ANSWER_PARTS
        )


def _messages(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """The messages of a conversation. Reasoning goes into the assistant's message, under both names
    that servers read there: `reasoning` (vLLM from 0.12, OpenRouter) and `reasoning_content`
    (SGLang, llama.cpp, DeepSeek, older vLLM)."""
    messages: list[dict[str, str]] = []
    reasoning = ""
    for role, content in pairs:
        if role == REASONING:
            reasoning = content
            continue
        messages.append({"role": role, "content": content})
        if reasoning:
            messages[-1] |= {"reasoning": reasoning, "reasoning_content": reasoning}
            reasoning = ""
    return messages


def _is_plain_choice(choice: _ChatChoice) -> bool:
    """Whether a choice has neither a finish reason nor an error."""
    if choice.finish_reason is not None or choice.error:
        return False
    return choice.delta is None or not choice.delta.error


_TEXT_KEYS = (
    b'content":',  # also of `reasoning_content`
    b'"reasoning":',
    b'"refusal":',
    b'"text":',  # of a typed part
    b'"thinking":',
    b'"summary":',
)
_ANSWER_KEYS = (b'"content":', b'"refusal":')
_ANSWER_PARTS = (b'"content":[{"type":"text"', b'"content": [{"type": "text"')
_CALLS = (b'"tool_calls":[{', b'"tool_calls": [{', b'"function_call":{', b'"function_call": {')


def _texts(message: _ChatMessage) -> tuple[str, str]:
    """(answer text, reasoning text) of a delta. A typed part of type `text` is answer, and a part
    of any other type reasoning.
    """
    reasoning = message.reasoning_content or message.reasoning or message.thinking or ""
    if not reasoning and message.reasoning_details:
        reasoning = "".join(map(_text_of_part, message.reasoning_details))
    if not isinstance(message.content, list):
        return message.content or message.refusal or "", reasoning
    answer = ""
    for part in message.content:
        if isinstance(part, dict) and part.get("type") == "text":
            answer += str(part.get("text") or "")
        else:
            reasoning += str(part)
    return answer, reasoning


def _text_of_part(part: Any) -> str:
    """The text of a part of `reasoning_details`; encrypted parts have none."""
    if not isinstance(part, dict):
        return ""
    return str(part.get("text") or part.get("summary") or "")


def _has_call(message: _ChatMessage) -> bool:
    return bool(message.tool_calls or message.function_call)
