"""Request bodies of OpenAI's Responses and Anthropic's Messages, parsed and checked as chats.

Sources: the OpenAI API reference, "Create a model response"; the Anthropic API reference, "Create a
message".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loadgen.manifest.json_section import JsonObject
from reference_engine.serving.wire import fields
from reference_engine.serving.wire.call import Call, chat_call
from reference_engine.serving.wire.wire_errors import WireError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "previous_response_id": (None,),
    "thinking": (None, {"type": "disabled"}),
}
_TEXT_PARTS = ("input_text", "output_text", "text")
_OTHER_NAMES = ("input", "instructions", "max_output_tokens", "stop_sequences", "system")
_UNUSED = ("logprobs", "max_completion_tokens", "messages", "stream_options", "top_logprobs")


def parse_response(body: bytes, tenant: str | None = None) -> Call:
    """Parse the body of `/v1/responses`. Nothing is stored, so a request holds its whole history.
    Raises WireError naming the field."""
    data = fields.parse_object(body)
    text = data.get("text")
    form = text.get("format") if isinstance(text, dict) else text
    if form not in (None, {"type": "text"}):
        raise fields.wrong_value("text.format", "{'type': 'text'}", form)
    items, system = data.get("input"), fields.text(data, "instructions")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = _messages(items, "input")
    limit = fields.integer(data, "max_output_tokens", 1)
    return _call(data, tenant, ([_system(system)] if system else []) + messages, limit)


def parse_message(body: bytes, tenant: str | None = None) -> Call:
    """Parse the body of `/v1/messages`. Raises WireError naming the field."""
    data = fields.parse_object(body)
    limit, system = fields.integer(data, "max_tokens", 1), data.get("system")
    if limit is None:
        raise WireError("max_tokens: this field is required", param="max_tokens")
    first = [_system(_content(system, "system"))] if system else []
    return _call(data, tenant, first + _messages(data.get("messages"), "messages"), limit)


def _call(
    data: JsonObject, tenant: str | None, messages: list[JsonObject], limit: int | None
) -> Call:
    for field, neutral in _NEUTRAL.items():
        if data.get(field) not in neutral:
            message = f"{field}: {data[field]!r:.100} is not supported by this engine"
            raise WireError(message, param=field)
    kept = {key: data[key] for key in data if key not in (*_OTHER_NAMES, *_UNUSED)}
    stops = {"stop": data["stop_sequences"]} if data.get("stop_sequences") else {}
    chat = {**kept, **stops, "messages": messages, "max_tokens": limit, "n": 1}
    return replace(chat_call(chat, tenant), include_usage=True)  # both APIs always state it


def _system(text: str) -> JsonObject:
    return {"role": "system", "content": text}


def _messages(items: object, path: str) -> list[JsonObject]:
    """The messages of a list, each with its text. Items of other types, such as calls, are
    refused."""
    if not isinstance(items, list) or not items:
        raise fields.wrong_value(path, "a non-empty list", items)
    messages = []
    for i, item in enumerate(items):
        if not isinstance(item, dict) or item.get("type") not in (None, "message"):
            raise fields.wrong_value(f"{path}[{i}]", "a message", item)
        content = _content(item.get("content"), f"{path}[{i}].content")
        messages.append({"role": item.get("role"), "content": content})
    return messages


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong_value(path, "a string or a list of text parts", content)
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or text is None:
            expected = "a part with text, the only supported kind"
            raise fields.wrong_value(f"{path}[{i}]", expected, part)
        texts.append(str(text))
    return "".join(texts)
