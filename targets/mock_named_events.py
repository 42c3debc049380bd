"""The mock server's replies in the APIs whose events have names: OpenAI's Responses and Anthropic's
Messages.

Sources: the OpenAI API reference, "Responses: streaming events"; Anthropic's "Streaming messages".
Independent of the codecs on purpose, like `mock_wire`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping

from loadgen.manifest.json_section import JsonObject
from targets.mock_script import WRONG_USAGE
from targets.mock_wire import ReplyText

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ENDS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}


def _event(kind: str, **fields: object) -> bytes:
    """An event; its name is also the `type` of its data."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class NamedEvents(ReplyText, ABC):
    """A reply that opens its reasoning and its answer, each before its first token."""

    def broken_event(self) -> bytes:
        return self._delta("@", 0, is_reasoning=False).replace(b"@", b"\xff\xfe")

    def event(self, event: int) -> bytes:
        first = event * self.script.coalesce
        is_reasoning = first < self.script.reasoning
        text = self.words(first, first + self.tokens_in(event))
        before = b""
        if event and not is_reasoning and first - self.script.coalesce < self.script.reasoning:
            before = self._close(is_reasoning=True) + self._open(is_reasoning=False)
        return before + self._delta(text, event, is_reasoning=is_reasoning)

    @abstractmethod
    def _open(self, *, is_reasoning: bool) -> bytes:
        """The events before the first token of the reasoning or of the answer."""

    @abstractmethod
    def _delta(self, text: str, event: int, *, is_reasoning: bool) -> bytes:
        """Event number `event` with the text of its tokens."""

    @abstractmethod
    def _close(self, *, is_reasoning: bool) -> bytes:
        """The events after the last token of the reasoning or of the answer."""

    @property
    def _place(self) -> int:
        """The index of the answer: the reasoning comes first, if there is any."""
        return int(self.script.reasoning > 0)

    @property
    def _stated_tokens(self) -> int:
        return int(self.tokens * WRONG_USAGE.get(self.script.usage, 1))

    @property
    def _parts(self) -> tuple[str, str]:
        """(reasoning, answer) of the whole reply."""
        n_reasoning = min(self.script.reasoning, self.tokens)
        return self.words(0, n_reasoning), self.words(n_reasoning, self.tokens)


class ResponsesText(NamedEvents):
    """The events of `POST /v1/responses`."""

    def role(self) -> bytes:
        response = self._response("in_progress", ())
        created = _event("response.created", response=response, sequence_number=0)
        began = _event("response.in_progress", response=response, sequence_number=1)
        return created + began + self._open(is_reasoning=self.script.reasoning > 0)

    def tail(self) -> bytes:
        status = _ENDS.get(self.finish, "failed")
        number = 4 + self.n_events
        response = self._response(status, self._output)
        end = _event(f"response.{status}", response=response, sequence_number=number)
        return self._close(is_reasoning=self.tokens <= self.script.reasoning) + end

    def whole(self) -> bytes:
        return json.dumps(self._response(_ENDS.get(self.finish, "failed"), self._output)).encode()

    def error_event(self, message: str) -> bytes:
        return _event("error", code="server_error", message=message, param=None)

    def _open(self, *, is_reasoning: bool) -> bytes:
        place = 0 if is_reasoning else self._place
        item = {**self._item(is_reasoning, ""), "status": "in_progress", "content": []}
        added = _event("response.output_item.added", output_index=place, item=item)
        part = self._item(is_reasoning, "")["content"][0]
        name = "reasoning_part" if is_reasoning else "content_part"
        return added + _event(f"response.{name}.added", item_id=item["id"], part=part)

    def _delta(self, text: str, event: int, *, is_reasoning: bool) -> bytes:
        return _event(
            f"response.{'reasoning' if is_reasoning else 'output'}_text.delta",
            item_id=self._item(is_reasoning, "")["id"],
            output_index=0 if is_reasoning else self._place,
            content_index=0,
            delta=text,
            sequence_number=4 + event,
        )

    def _close(self, *, is_reasoning: bool) -> bytes:
        text = self._parts[0] if is_reasoning else self._parts[1]
        item, name = self._item(is_reasoning, text), "reasoning" if is_reasoning else "output"
        done = _event(f"response.{name}_text.done", item_id=item["id"], text=text)
        return done + _event("response.output_item.done", item=item)

    @property
    def _output(self) -> tuple[JsonObject, ...]:
        reasoning, answer = self._parts
        parts = ((True, reasoning), (False, answer))
        return tuple(self._item(is_reasoning, text) for is_reasoning, text in parts if text)

    def _item(self, is_reasoning: bool, text: str) -> JsonObject:
        if is_reasoning:
            content = [{"type": "reasoning_text", "text": text}]
            return {"type": "reasoning", "id": f"rs_{self.number:08x}", "content": content}
        content = [{"type": "output_text", "text": text}]
        message = {"type": "message", "role": "assistant", "id": f"msg_{self.number:08x}"}
        return {**message, "status": "completed", "content": content}

    def _response(self, status: str, output: tuple[JsonObject, ...]) -> JsonObject:
        is_over, tokens = status != "in_progress", self._stated_tokens
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.script.cached_tokens},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": min(self.script.reasoning, tokens)},
            "total_tokens": self.prompt_tokens + tokens,
        }
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        error = {"code": "server_error", "message": f"finish reason {self.finish}"}
        return {
            "id": f"resp_{self.number:08x}",
            "object": "response",
            "created_at": 1760000000,
            "status": status,
            "model": self.model,
            "error": error if status == "failed" else None,
            "incomplete_details": reason,
            "output": list(output),
            "usage": usage if is_over and self.script.usage != "off" else None,
        }


class MessagesText(NamedEvents):
    """The events of `POST /v1/messages`."""

    def role(self) -> bytes:
        usage = {**self._prompt, "output_tokens": 1}
        message = {**self._message, "content": [], "stop_reason": None, "usage": usage}
        begun = _event("message_start", message=message)
        return begun + self._open(is_reasoning=self.script.reasoning > 0) + _event("ping")

    def tail(self) -> bytes:
        usage = {"usage": {"output_tokens": self._stated_tokens}}
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        end = _event("message_delta", delta=delta, **({} if self.script.usage == "off" else usage))
        stop = _event("message_stop")
        return self._close(is_reasoning=self.tokens <= self.script.reasoning) + end + stop

    def whole(self) -> bytes:
        reasoning, answer = self._parts
        thinking = [{"type": "thinking", "thinking": reasoning, "signature": ""}]
        content = (thinking if reasoning else []) + [{"type": "text", "text": answer}]
        usage = {**self._prompt, "output_tokens": self._stated_tokens}
        end = {"stop_reason": self._stop_reason, "stop_sequence": None, "usage": usage}
        return json.dumps({**self._message, "content": content, **end}).encode()

    def error_event(self, message: str) -> bytes:
        return _event("error", error={"type": "api_error", "message": message})

    def refusal(self, body: bytes) -> bytes:
        return json.dumps({"type": "error", **json.loads(body)}).encode()

    def _open(self, *, is_reasoning: bool) -> bytes:
        block = {"type": "text", "text": ""}
        if is_reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        place = 0 if is_reasoning else self._place
        return _event("content_block_start", index=place, content_block=block)

    def _delta(self, text: str, event: int, *, is_reasoning: bool) -> bytes:
        name = "thinking" if is_reasoning else "text"
        delta = {"type": f"{name}_delta", name: text}
        place = 0 if is_reasoning else self._place
        return _event("content_block_delta", index=place, delta=delta)

    def _close(self, *, is_reasoning: bool) -> bytes:
        place, sign = 0 if is_reasoning else self._place, b""
        if is_reasoning:
            delta = {"type": "signature_delta", "signature": "c2lnbmVk"}
            sign = _event("content_block_delta", index=place, delta=delta)
        return sign + _event("content_block_stop", index=place)

    @property
    def _message(self) -> JsonObject:
        name = f"msg_{self.number:08x}"
        return {"id": name, "type": "message", "role": "assistant", "model": self.model}

    @property
    def _prompt(self) -> JsonObject:
        """The usage of the prompt: cached tokens are counted apart."""
        cached = self.script.cached_tokens
        return {"input_tokens": self.prompt_tokens - cached, "cache_read_input_tokens": cached}

    @property
    def _stop_reason(self) -> str:
        return _STOP_REASONS.get(self.finish, self.finish)


FORMS: Mapping[str, type[ReplyText]] = {"messages": MessagesText, "responses": ResponsesText}
"""API → the form of its replies."""
