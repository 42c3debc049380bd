"""The codec of the OpenAI chat completions API (`POST /v1/chat/completions`, streamed).

Source: the OpenAI API reference, "Chat completions: streaming"; the additions of vLLM and SGLang:
`ignore_eos`, `min_tokens`, `reasoning_content`/`reasoning` and
`stream_options.continuous_usage_stats`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from targets.base import Delta, Request
from targets.openai_wire import (
    OpenAICodec,
    StreamEvent,
    failed_finish,
    finish_reason,
    has_text,
    tail,
)


class _ChatMessage(msgspec.Struct):
    content: str | list[Any] | None = None  # a list of typed parts from some gateways
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: dict[str, msgspec.Raw] | None = None


class _ChatChoice(msgspec.Struct):
    delta: _ChatMessage | None = None
    finish_reason: str | None = None


class OpenAIChat(OpenAICodec):
    """Chat completions. `limit_field` is the name of the output limit.

    The default is `max_tokens`, because every self-hosted server honours it and some ignore the
    newer `max_completion_tokens`: an ignored limit makes a run of unlimited answers. Hosted
    reasoning models reject `max_tokens`; the preflight then switches to the newer name.
    """

    kind = "chat"
    path: ClassVar[str] = "/v1/chat/completions"
    decoder: ClassVar = msgspec.json.Decoder(StreamEvent[_ChatChoice])
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"

    def prompt_fields(self, request: Request) -> dict[str, object]:
        messages = request.messages or (("user", request.prompt),)
        return {
            "messages": [{"role": role, "content": content} for role, content in messages],
            self.limit_field: request.output_tokens,
        }

    @staticmethod
    def to_delta(event: StreamEvent[_ChatChoice]) -> Delta:
        choices = event.choices or ()
        is_bare = event.usage is None and event.error is None and event.timings is None
        if is_bare and len(choices) == 1 and choices[0].finish_reason is None:
            message = choices[0].delta  # nearly every event: one piece of text and nothing else
            if message is not None and message.content and isinstance(message.content, str):
                return Delta(is_token=True, is_answer=True, text=message.content)
        text = ""
        is_token = is_answer = False
        finish = None
        for choice in choices:
            finish = choice.finish_reason or finish
            if choice.delta is not None:
                answer, reasoning = _texts(choice.delta)
                text += answer or reasoning
                is_answer = is_answer or bool(answer)
                is_token = is_token or bool(answer or reasoning) or _has_call(choice.delta)
        if choices and is_bare:
            error = failed_finish(finish)
            return Delta(is_token, is_answer, text, finish_reason(finish), error=error)
        return Delta(is_token, is_answer, text, finish_reason(finish), **tail(event, finish))

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold a non-empty `content`, `reasoning…` or `refusal`, or a tool call;
        a search for keys, without parsing.
        """
        return (
            has_text(fragment, b'content":')
            or has_text(fragment, b'"reasoning":')
            or has_text(fragment, b'"refusal":')
            or b'"tool_calls":[{' in fragment
            or b'"tool_calls": [{' in fragment
        )


def _texts(message: _ChatMessage) -> tuple[str, str]:
    """(answer text, reasoning text) of a delta. A typed part of type `text` is answer, and a part
    of any other type reasoning.
    """
    reasoning = message.reasoning_content or message.reasoning or ""
    if not isinstance(message.content, list):
        return message.content or message.refusal or "", reasoning
    answer = ""
    for part in message.content:
        if isinstance(part, dict) and part.get("type") == "text":
            answer += str(part.get("text") or "")
        else:
            reasoning += str(part)
    return answer, reasoning


def _has_call(message: _ChatMessage) -> bool:
    return bool(message.tool_calls or message.function_call)
