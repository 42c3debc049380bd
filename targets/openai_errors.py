"""Errors that servers of the OpenAI API report inside a 200, as one line of the server's words.

| form | sent by |
|---|---|
| `{"error": {"message": …}}`, a string, or `true` beside `message` | OpenAI, nearly all servers |
| `choices[0].error`, `choices[0].delta.error` | OpenRouter, "Errors and debugging" |
| `x_groq.error` | Groq API reference, "Error codes" |
| `{"object": "error", "message": …}` | vLLM before 0.10 |
| `{"type": "error", "message": …}`, `{"errors": […]}`, `{"detail": …}` | gateways, FastAPI |
| `{"error_code": …, "error_msg": …}` | Baidu Qianfan |
| `{"code": "InvalidParameter", "message": …}` | Alibaba DashScope |
| `{"base_resp": {"status_code": 1004, "status_msg": …}}` | MiniMax |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from targets.safe_text import strip_controls

_ERROR_CHARS = 300
_MESSAGES = ("message", "msg", "error_msg", "error_message", "status_msg", "detail")
_GOOD_CODES = (0, 200, "0", "200", "ok", "OK", "success", "Success")
_FAILED_WORDS = ("error", "failed", "failure")


def stated_error(stated: Any, beside: Any = None) -> str | None:
    """The message of a member `error`; None for null and for an empty value, which some servers
    send with every event. `beside` is the message next to an error that is only `true`."""
    if not stated:
        return None
    return one_line(beside if stated is True and beside else stated)


def base_response_error(stated: Any) -> str | None:
    """The message of a `base_resp` whose code is not 0."""
    if not isinstance(stated, Mapping) or stated.get("status_code") in (None, *_GOOD_CODES):
        return None
    return one_line(stated)


def bare_error(event: bytes) -> str | None:
    """The message of an event without choices that reports an error in one of the forms above."""
    try:
        content = msgspec.json.decode(event)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    words = [content.get(key) for key in ("object", "type", "status", "event")]
    is_failed = content.get("success") is False or any(
        isinstance(word, str) and word.lower() in _FAILED_WORDS for word in words
    )
    code = content.get("code", content.get("status_code"))
    has_bad_code = bool(code) and code not in _GOOD_CODES
    has_message = any(content.get(key) for key in _MESSAGES)
    errors = content.get("errors")
    if errors and not isinstance(errors, bool):
        return one_line(errors[0] if isinstance(errors, list) else errors)
    is_named = any(content.get(key) for key in ("error_code", "error_msg", "detail"))
    has_error = content.get("error") not in (None, False)  # `{"error": {}}` alone is one
    if has_error or is_failed or is_named or (has_bad_code and has_message):
        return one_line(content)
    return base_response_error(content.get("base_resp"))


def one_line(error: Any) -> str:
    """The message of an error in one line of at most 300 characters."""
    while isinstance(error, Mapping):
        inner = error.get("error")
        text = next((error[key] for key in _MESSAGES if error.get(key)), None)
        error = inner if inner and inner is not True else text or _json(error)
    text = strip_controls(" ".join((error if isinstance(error, str) else _json(error)).split()))
    return text[:_ERROR_CHARS] or "an error without a message"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
