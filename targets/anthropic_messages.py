"""The codec of the Anthropic Messages API (`POST /v1/messages`, streamed).

Source: Anthropic's API reference, "Messages" and "Streaming messages"; the events that vLLM
(`entrypoints/anthropic`), SGLang (`srt/entrypoints/anthropic`) and llama.cpp (`server-task.cpp`,
`to_json_anthropic`) send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from loadgen.manifest.json_section import JsonObject
from loadgen.records import REASONING, FinishReason
from targets.base import Delta, HttpRequest, Request, Usage
from targets.openai_errors import stated_error
from targets.openai_usage import UsageWire
from targets.openai_wire import OpenAICodec, failed_finish, finish_reason, has_text, server_timings

_VERSION = ("anthropic-version", "2023-06-01")
_WITHOUT_TEXT = ("tool_use", "server_tool_use", "mcp_tool_use", "redacted_thinking")
_BLOCK_KEYS = tuple(f'"type":{s}"{kind}"'.encode() for kind in _WITHOUT_TEXT for s in ("", " "))
_TEXT_KEYS = (b'"text":', b'"thinking":', b'"partial_json":')
_WITHOUT_CONTENT = ("content_block_stop", "message_stop", "ping")
_STOP_REASONS = {
    "end_turn": FinishReason.stop,
    "tool_use": FinishReason.tool_calls,
    "refusal": FinishReason.content_filter,
    "model_context_window_exceeded": FinishReason.length,
}


class _Block(msgspec.Struct):
    """A content block, or a piece of one."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None  # of the `delta` of a `message_delta`


class _Message(msgspec.Struct):
    type: str | None = None
    content: list[_Block] | None = None
    stop_reason: str | None = None
    usage: UsageWire | None = None


class _Event(_Message):
    """An event, or a whole answer, which is a message."""

    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Block | None = None
    error: Any = None
    timings: JsonObject | None = None  # the bundled engine


class AnthropicMessages(OpenAICodec):
    """Messages. System messages become the field `system`. Usage comes without a request for it:
    the prompt's with the first event, the answer's with the last but one.
    """

    kind = "messages"
    path: ClassVar[str] = "/messages"
    names_events: ClassVar[bool] = True
    has_exact_lengths: ClassVar[bool] = False
    texts: ClassVar[frozenset[str]] = frozenset(("content", "partial_json", "text", "thinking"))
    decoder: ClassVar = msgspec.json.Decoder(_Event)
    include_usage: bool = False  # the API has no `stream_options.include_usage`

    def encode(self, request: Request) -> HttpRequest:
        encoded = super().encode(request)
        headers = (*encoded.headers, _VERSION)
        return HttpRequest(encoded.method, encoded.path, headers, encoded.body)

    def prompt_fields(self, request: Request) -> dict[str, object]:
        messages = request.messages or (("user", request.prompt),)
        system = "\n\n".join(text for role, text in messages if role in ("system", "developer"))
        talk = [pair for pair in messages if pair[0] not in ("system", "developer")]
        return {
            **({"system": system} if system else {}),
            "messages": _talk(talk),
            **request.fields,
            "max_tokens": request.output_tokens,
        }

    @staticmethod
    def to_delta(event: _Event) -> Delta:
        kind, piece, block = event.type, event.delta, event.content_block
        if event.error:
            return Delta(error=stated_error(event.error))
        if kind == "content_block_delta" and piece is not None:
            return _piece(piece)
        if kind == "content_block_start" and block is not None:
            return Delta(is_token=True) if block.type in _WITHOUT_TEXT else _piece(block)
        if kind == "message_start":
            begun = event.message or _Message()
            usage = event.usage or begun.usage  # vLLM also beside the message
            stated = None if usage is None else usage.read()
            # `output_tokens` here is a placeholder, not a count of the answer
            return Delta(
                usage=stated and Usage(stated.input_tokens, cached_tokens=stated.cached_tokens)
            )
        if kind == "message_delta":
            return _end(event, None if piece is None else piece.stop_reason)
        if kind == "message":
            return _whole(event)
        return Delta(is_done=kind == "message_stop", is_unknown=kind not in _WITHOUT_CONTENT)

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold a piece of a block that is not empty, or a call; a search for
        keys, without parsing."""
        return any(has_text(fragment, key) for key in _TEXT_KEYS) or any(
            key in fragment for key in _BLOCK_KEYS
        )

    def looks_like_answer(self, fragment: bytes) -> bool:
        """Whether the bytes hold a piece of text that is not empty."""
        return has_text(fragment, b'"text":')


def _talk(pairs: Sequence[tuple[str, str]]) -> list[JsonObject]:
    """The messages of a conversation. Reasoning is a block `thinking` before the answer's text; its
    signature is empty, for servers of open weights sign nothing."""
    messages: list[JsonObject] = []
    thinking: JsonObject | None = None
    for role, content in pairs:
        if role == REASONING:
            thinking = {"type": "thinking", "thinking": content, "signature": ""}
            continue
        blocks = [thinking, *([{"type": "text", "text": content}] if content else [])]
        messages.append({"role": role, "content": content if thinking is None else blocks})
        thinking = None
    return messages


def _piece(piece: _Block) -> Delta:
    """The text, the thinking or the arguments of a piece; a signature is no token."""
    if piece.text:
        return Delta(is_token=True, is_answer=True, text=piece.text)
    return Delta(is_token=bool(piece.thinking or piece.partial_json), text=piece.thinking or "")


def _end(event: _Event, word: str | None) -> Delta:
    """The finish reason and the usage of an answer that has ended."""
    return Delta(
        finish_reason=_STOP_REASONS.get(word or "", finish_reason(word)),
        usage=None if event.usage is None else event.usage.read(),
        error=failed_finish(word),
        server=server_timings(event.timings) if event.timings else {},
    )


def _whole(event: _Event) -> Delta:
    """A whole answer: its text, or its thinking if there is no text."""
    blocks = event.content or ()
    answer = "".join(block.text or "" for block in blocks)
    text = answer or "".join(block.thinking or "" for block in blocks)
    is_token = bool(text) or any(block.type in _WITHOUT_TEXT for block in blocks)
    end = _end(event, event.stop_reason)
    return msgspec.structs.replace(end, is_token=is_token, is_answer=bool(answer), text=text)
