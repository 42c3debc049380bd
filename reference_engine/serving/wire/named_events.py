"""Response bodies of OpenAI's Responses and Anthropic's Messages, whole or as events with names.

Sources: the OpenAI API reference, "Responses: streaming events"; Anthropic's "Streaming messages".
Where OpenAI's chats have `timings`, the last events with counts have them too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence

from loadgen.manifest.json_section import JsonObject
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.response import (
    Chosen,
    TokenUsage,
    WholeChoice,
    WriteText,
    quoted,
    timings_of,
)
from reference_engine.serving.wire.wire_errors import WireError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def _event(kind: str, **content: object) -> bytes:
    """An event; its name is also the `type` of its data."""
    data = json.dumps({"type": kind, **content}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class _Named(ABC):
    """An answer whose text events are constant bytes around the text."""

    before: bytes
    after: bytes

    def __init__(self, call: Call, response_id: str, model: str, created: int) -> None:
        self._id, self._model, self._created = response_id, model, created
        self._texts: list[str] = []
        self._finish = "stop"

    @abstractmethod
    def opening(self, n_input: int, n_cached: int) -> bytes: ...

    @abstractmethod
    def end(self, usage: TokenUsage | None) -> bytes: ...

    def text_writer(self, n_input: int, n_cached: int, has_counts: bool) -> WriteText:
        """An encoder of events that carry only text. Neither API has running counts."""
        before, after, texts = self.before, self.after, self._texts

        def write(text: str, n_output: int) -> bytes:
            texts.append(text)
            return b"".join((before, quoted(text), after))

        return write

    def event(
        self,
        text: str,
        finish_reason: str | None,
        usage: TokenUsage | None = None,
        chosen: Chosen | None = None,
    ) -> bytes:
        """The event of a piece of text; empty without text. The finish reason is written at the
        end."""
        self._finish = finish_reason or self._finish
        return self.text_writer(0, 0, False)(text, 0) if text else b""


class ResponseEncoder(_Named):
    """The answer to `/v1/responses`."""

    def __init__(self, call: Call, response_id: str, model: str, created: int) -> None:
        super().__init__(call, response_id, model, created)
        self._item_id = f"msg-{response_id}"
        kind, name = "response.output_text.delta", json.dumps(self._item_id)
        head = f'event: {kind}\ndata: {{"type":"{kind}","item_id":{name},"output_index":0,'
        self.before = f'{head}"content_index":0,"delta":'.encode()
        self.after = b"}\n\n"

    def opening(self, n_input: int, n_cached: int) -> bytes:
        response = self._response("in_progress", "", None)
        item = {**self._item(""), "status": "in_progress", "content": []}
        part = self._item("")["content"][0]
        return b"".join(
            (
                _event("response.created", response=response),
                _event("response.in_progress", response=response),
                _event("response.output_item.added", output_index=0, item=item),
                _event("response.content_part.added", item_id=self._item_id, part=part),
            )
        )

    def end(self, usage: TokenUsage | None) -> bytes:
        text = "".join(self._texts)
        item, status = self._item(text), _status(self._finish)
        response = self._response(status, text, usage)
        timings = {} if usage is None else {"timings": timings_of(usage)}
        return b"".join(
            (
                _event("response.output_text.done", item_id=self._item_id, text=text),
                _event("response.content_part.done", part=item["content"][0]),
                _event("response.output_item.done", output_index=0, item=item),
                _event(f"response.{status}", response=response, **timings),
            )
        )

    def error(self, error: WireError) -> bytes:
        return _event("error", code=error.code or error.type, message=error.message, param=None)

    def whole(self, choices: Sequence[WholeChoice], usage: TokenUsage) -> bytes:
        text, finish, _ = choices[0]
        body = self._response(_status(finish), text, usage)
        return json.dumps({**body, "timings": timings_of(usage)}).encode()

    def _item(self, text: str) -> JsonObject:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        head = {"type": "message", "id": self._item_id, "role": "assistant"}
        return {**head, "status": "completed", "content": content}

    def _response(self, status: str, text: str, usage: TokenUsage | None) -> JsonObject:
        is_over = status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": [self._item(text)] if is_over else [],
            "store": False,
            "usage": None if usage is None else _response_usage(usage),
        }


class MessageEncoder(_Named):
    """The answer to `/v1/messages`."""

    before = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":'
    )
    after = b"}}\n\n"

    def opening(self, n_input: int, n_cached: int) -> bytes:
        usage = {**_prompt_usage(n_input, n_cached), "output_tokens": 0}
        start = _event("message_start", message=self._message([], None, usage))
        block = {"type": "text", "text": ""}
        return start + _event("content_block_start", index=0, content_block=block)

    def end(self, usage: TokenUsage | None) -> bytes:
        delta = {"stop_reason": _STOP_REASONS.get(self._finish, self._finish)}
        counts: JsonObject = {}
        if usage is not None:
            counts = {"usage": _message_usage(usage), "timings": timings_of(usage)}
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta={**delta, "stop_sequence": None}, **counts),
                _event("message_stop"),
            )
        )

    def error(self, error: WireError) -> bytes:
        return _event("error", error={"type": "api_error", "message": error.message})

    def whole(self, choices: Sequence[WholeChoice], usage: TokenUsage) -> bytes:
        text, finish, _ = choices[0]
        content = [{"type": "text", "text": text}]
        reason = _STOP_REASONS.get(finish, finish)
        body = self._message(content, reason, _message_usage(usage))
        return json.dumps({**body, "timings": timings_of(usage)}).encode()

    def _message(
        self, content: Sequence[JsonObject], reason: str | None, usage: JsonObject
    ) -> JsonObject:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        end = {"stop_reason": reason, "stop_sequence": None, "usage": usage}
        return {**head, "content": list(content), **end}


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _response_usage(usage: TokenUsage) -> JsonObject:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _prompt_usage(n_input: int, n_cached: int) -> JsonObject:
    """Cached tokens are counted apart, as Anthropic does."""
    return {"input_tokens": n_input - n_cached, "cache_read_input_tokens": n_cached}


def _message_usage(usage: TokenUsage) -> JsonObject:
    prompt = _prompt_usage(usage.input_tokens, usage.cached_tokens)
    return {**prompt, "output_tokens": usage.output_tokens}
