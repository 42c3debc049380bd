"""The codec of the OpenAI completions API (`POST /v1/completions`, streamed): a prompt without a
chat template.

Source: the OpenAI API reference, "Completions (legacy)"; vLLM's additions as in `openai_chat`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from targets.base import Delta, Request
from targets.openai_errors import stated_error
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


class _TextChoice(msgspec.Struct):
    index: int | None = None
    text: str | None = None
    finish_reason: str | None = None
    error: Any = None


class OpenAICompletions(OpenAICodec):
    """Completions. The contents of a request's messages, if it has any, are joined by blank lines,
    for this API has no roles.
    """

    kind = "completions"
    path: ClassVar[str] = "/completions"
    decoder: ClassVar = msgspec.json.Decoder(StreamEvent[_TextChoice])

    def prompt_fields(self, request: Request) -> dict[str, object]:
        contents = [content for _, content in request.messages]
        prompt = "\n\n".join(contents) if contents else request.prompt
        return {"prompt": prompt, **request.fields, "max_tokens": request.output_tokens}

    @staticmethod
    def to_delta(event: StreamEvent[_TextChoice]) -> Delta:
        text, finish, failure, index = "", None, None, None
        for choice in event.choices or ():
            if choice.text:
                text += choice.text
                index = joined_index(index, choice.index)
            finish = choice.finish_reason or finish
            failure = failure or stated_error(choice.error)
        has = bool(text)
        if event.choices and is_plain(event):
            error = failure or failed_finish(finish)
            return Delta(has, has, text, finish_reason(finish), error=error, choice=index or 0)
        rest = tail(event, finish, error_in_choice=failure)
        return Delta(has, has, text, finish_reason(finish), choice=index or 0, **rest)

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold a non-empty `text`; a search for the key, without parsing."""
        return has_text(fragment, b'"text":')
