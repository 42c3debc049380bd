"""The OpenAI chat completions API (`POST /v1/chat/completions`, streamed) as a codec.

Source: the OpenAI API reference, "Chat completions: streaming"; vLLM's and SGLang's additions
`ignore_eos`, `min_tokens`, `reasoning_content`/`reasoning` and
`stream_options.continuous_usage_stats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from targets.base import Adapter, Delta, HttpRequest, Request, Shape
from targets.openai_wire import (
    DONE,
    JSON_HEADERS,
    StreamEvent,
    common_body,
    finish_reason,
    has_text,
    merge_body,
    parse_event,
    parse_events,
    shape_of,
    split_done,
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


_DECODER = msgspec.json.Decoder(StreamEvent[_ChatChoice])


class OpenAIChat(Adapter):
    """Chat completions. `limit_field` names the output limit.

    `max_tokens` is the default because every self-hosted server honours it while some ignore the
    newer `max_completion_tokens`, and an ignored limit is a run of unlimited answers. Hosted
    reasoning models refuse `max_tokens`; the probe then switches to the newer name.
    """

    kind = "chat"
    path: ClassVar[str] = "/v1/chat/completions"
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"

    def encode(self, request: Request) -> HttpRequest:
        messages = request.messages or (("user", request.prompt),)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            **common_body(self, request, self.limit_field),
        }
        encoded = msgspec.json.encode(merge_body(body, self.extra_body))
        return HttpRequest("POST", self.path, JSON_HEADERS, encoded)

    def decode(self, event: bytes) -> Delta:
        if event.strip() == b"[DONE]":
            return DONE
        return _delta(parse_event(_DECODER, event))

    def decode_all(self, events: Sequence[bytes]) -> list[Delta]:
        if type(self).decode is not OpenAIChat.decode:  # a subclass reads events its own way
            return super().decode_all(events)
        chunks, done = split_done(events)
        return [*map(_delta, parse_events(_DECODER, chunks)), *done]

    def shape(self, first: bytes, second: bytes) -> Shape | None:
        if type(self).decode is not OpenAIChat.decode:
            return None
        try:
            return shape_of(self.decode, first, second)
        except ValueError:
            return None

    def looks_like_token(self, fragment: bytes) -> bool:
        """True on a non-empty `content`, `reasoning…` or a tool call; searches for keys, parses
        nothing.
        """
        return (
            has_text(fragment, b'content":')
            or has_text(fragment, b'"reasoning":')
            or has_text(fragment, b'"refusal":')
            or b'"tool_calls":[{' in fragment
            or b'"tool_calls": [{' in fragment
        )


def _delta(chunk: StreamEvent[_ChatChoice]) -> Delta:
    choices = chunk.choices or ()
    is_bare = chunk.usage is None and chunk.error is None and chunk.timings is None
    if is_bare and len(choices) == 1 and choices[0].finish_reason is None:
        message = choices[0].delta  # nearly every event: one piece of an answer and nothing else
        if message is not None and message.content and isinstance(message.content, str):
            return Delta(is_token=True, is_answer=True, text=message.content)
    text = ""
    is_token = is_answer = False
    finish = None
    for choice in choices:
        finish = choice.finish_reason or finish
        if choice.delta is not None:
            answer, other = _parts(choice.delta)
            text += answer or other
            is_answer = is_answer or bool(answer)
            is_token = is_token or bool(answer or other) or _calls(choice.delta)
    if choices and is_bare:
        return Delta(is_token, is_answer, text, finish_reason(finish))
    return Delta(is_token, is_answer, text, finish_reason(finish), **tail(chunk))


def _parts(message: _ChatMessage) -> tuple[str, str]:
    """(answer text, reasoning text) of one delta. Of typed parts, `text` is answer and everything
    else reasoning.
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


def _calls(message: _ChatMessage) -> bool:
    return bool(message.tool_calls or message.function_call)
