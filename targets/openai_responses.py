"""The codec of the OpenAI Responses API (`POST /v1/responses`, streamed).

Source: the OpenAI API reference, "Responses: streaming events"; the events that vLLM
(`entrypoints/openai/responses`) and llama.cpp (`server-task.cpp`, `to_json_oaicompat_resp`) send.
vLLM's addition `ignore_eos` is sent, and left out where it is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from loadgen.manifest.json_section import JsonObject
from loadgen.records import REASONING, FinishReason
from targets.base import Delta, Request
from targets.openai_errors import stated_error
from targets.openai_usage import UsageWire
from targets.openai_wire import OpenAICodec, has_text, server_timings

_ANSWERS = ("response.output_text.delta", "response.refusal.delta")
_ANSWER_KINDS = tuple(f'"{kind}"'.encode() for kind in _ANSWERS)
_REASONING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")
_CALLS = ("function_call", "custom_tool_call", "mcp_call")
_CALL_KEYS = tuple(f'"type":{blank}"{call}"'.encode() for call in _CALLS for blank in ("", " "))
_ENDED = ("completed", "incomplete", "failed", "cancelled")
_INCOMPLETE = {
    "max_output_tokens": FinishReason.length,
    "max_tokens": FinishReason.length,
    "content_filter": FinishReason.content_filter,
}


class _Part(msgspec.Struct):
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    content: list[_Part] | None = None
    summary: list[_Part] | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    object: str | None = None
    status: str | None = None
    output: list[_Item] | None = None
    usage: UsageWire | None = None
    error: Any = None
    incomplete_details: _Incomplete | None = None


class _Event(_Response):
    """An event, or a whole answer, which is a response without a `type`."""

    type: str | None = None
    delta: Any = None  # a text; of some calls an object
    item: _Item | None = None
    response: _Response | None = None
    message: Any = None
    timings: JsonObject | None = None  # llama.cpp, the bundled engine


class OpenAIResponses(OpenAICodec):
    """Responses. The server stores nothing (`store: false`), and a session sends its whole history
    as `input`. Usage comes without a request for it, in the last event."""

    kind = "responses"
    path: ClassVar[str] = "/responses"
    names_events: ClassVar[bool] = True
    has_exact_lengths: ClassVar[bool] = False
    texts: ClassVar[frozenset[str]] = frozenset(("content", "delta", "text"))
    decoder: ClassVar = msgspec.json.Decoder(_Event)
    include_usage: bool = False  # the API has no `stream_options.include_usage`

    def prompt_fields(self, request: Request) -> dict[str, object]:
        talk = request.messages or (("user", request.prompt),)
        return {
            "input": [_input_item(*pair, number) for number, pair in enumerate(talk)],
            **request.fields,
            "max_output_tokens": request.output_tokens,
            "store": False,
        }

    @staticmethod
    def to_delta(event: _Event) -> Delta:
        kind = event.type or ""
        if event.error:
            return Delta(error=stated_error(event.error, event.message))
        if event.delta and kind.endswith(".delta"):
            is_answer = kind in _ANSWERS
            text = event.delta if is_answer or kind in _REASONING else ""
            if not isinstance(text, str):
                raise ValueError(f"not an event of this API: the delta of {kind} is no text")
            server = server_timings(event.timings) if event.timings else {}
            return Delta(is_token=True, is_answer=is_answer, text=text, server=server)
        if not kind and event.object == "response":
            return _whole(event)
        if event.response is not None and (word := kind.removeprefix("response.")) in _ENDED:
            return _end(event.response, word, event.timings)
        if kind == "response.output_item.added" and event.item is not None:
            return Delta(is_token=event.item.type in _CALLS)  # its name has been generated
        return Delta(is_unknown=not kind.startswith("response."))

    def looks_like_token(self, fragment: bytes) -> bool:
        """Whether the bytes hold a `delta` that is not empty, or a call; a search for keys, without
        parsing."""
        return has_text(fragment, b'"delta":') or any(key in fragment for key in _CALL_KEYS)

    def looks_like_answer(self, fragment: bytes) -> bool:
        """Whether the bytes hold the type of an event with a piece of the answer."""
        return any(kind in fragment for kind in _ANSWER_KINDS)


def _input_item(role: str, content: str, number: int) -> JsonObject:
    """A message, or an item of reasoning with its text as open-weight servers send it."""
    if role != REASONING:
        return {"role": role, "content": content}
    text = {"type": "reasoning_text", "text": content}
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [text]}


def _end(response: _Response, word: str, timings: JsonObject | None) -> Delta:
    """The finish reason, the usage and the error of a response that ended with the event `word`,
    unless its own status says more: vLLM sends `response.completed` of a status `incomplete`."""
    status = response.status if response.status in _ENDED else word
    failure, finish = stated_error(response.error), FinishReason.none
    if status == "completed":
        has_call = any(item.type in _CALLS for item in response.output or ())
        finish = FinishReason.tool_calls if has_call else FinishReason.stop
    elif status == "incomplete":
        details = response.incomplete_details or _Incomplete()
        finish = _INCOMPLETE.get(details.reason or "", FinishReason.other)
    else:
        failure = failure or f"response {status}"
    return Delta(
        finish_reason=finish,
        usage=None if response.usage is None else response.usage.read(),
        error=failure,
        server=server_timings(timings) if timings else {},
    )


def _whole(response: _Event) -> Delta:
    """A whole answer: its text, or its reasoning if there is no text."""
    answer = reasoning = ""
    items = response.output or ()
    for item in items:
        parts = item.content or item.summary or ()
        text = "".join(part.text or part.refusal or "" for part in parts)
        if item.type == "message":
            answer += text
        else:
            reasoning += text
    text = answer or reasoning
    end = _end(response, "failed" if response.status else "completed", response.timings)
    is_token = bool(text) or any(item.type in _CALLS for item in items)
    return msgspec.structs.replace(end, is_token=is_token, is_answer=bool(answer), text=text)
