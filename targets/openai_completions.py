"""The OpenAI completions API (`POST /v1/completions`, streamed) as a codec: a prompt as it is, no
chat template.

Source: the OpenAI API reference, "Completions (legacy)"; vLLM's additions as in openai_chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

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


class _TextChoice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


_DECODER = msgspec.json.Decoder(StreamEvent[_TextChoice])


class OpenAICompletions(Adapter):
    """Completions. Messages, when a request has them, are joined by blank lines: this API knows no
    roles.
    """

    kind = "completions"
    path: ClassVar[str] = "/v1/completions"

    def encode(self, request: Request) -> HttpRequest:
        contents = [content for _, content in request.messages]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": "\n\n".join(contents) if contents else request.prompt,
            **common_body(self, request, "max_tokens"),
        }
        encoded = msgspec.json.encode(merge_body(body, self.extra_body))
        return HttpRequest("POST", self.path, JSON_HEADERS, encoded)

    def decode(self, event: bytes) -> Delta:
        if event.strip() == b"[DONE]":
            return DONE
        return _delta(parse_event(_DECODER, event))

    def decode_all(self, events: Sequence[bytes]) -> list[Delta]:
        if type(self).decode is not OpenAICompletions.decode:  # a subclass reads events its own way
            return super().decode_all(events)
        chunks, done = split_done(events)
        return [*map(_delta, parse_events(_DECODER, chunks)), *done]

    def shape(self, first: bytes, second: bytes) -> Shape | None:
        if type(self).decode is not OpenAICompletions.decode:
            return None
        try:
            return shape_of(self.decode, first, second)
        except ValueError:
            return None

    def looks_like_token(self, fragment: bytes) -> bool:
        """True on a non-empty `text`; searches for the key, parses nothing."""
        return has_text(fragment, b'"text":')


def _delta(chunk: StreamEvent[_TextChoice]) -> Delta:
    text, finish = "", None
    for choice in chunk.choices or ():
        text += choice.text or ""
        finish = choice.finish_reason or finish
    has = bool(text)
    if chunk.choices and chunk.usage is None and chunk.error is None and chunk.timings is None:
        return Delta(has, has, text, finish_reason(finish))
    return Delta(has, has, text, finish_reason(finish), **tail(chunk))
