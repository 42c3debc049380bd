"""What the model is asked: messages of a chat, or one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference_engine.serving.wire.fields import is_int, valid_unicode
from reference_engine.serving.wire.wire_errors import WireError

_MOST_ID = 1 << 32  # of any vocabulary
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(role, text) of each message; like a prompt's, in valid Unicode."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WireError("messages must be a non-empty list", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def parse_prompt(data: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, token ids)."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return valid_unicode(prompt), None
    if isinstance(prompt, list) and prompt and all(is_int(token) for token in prompt):
        if any(abs(token) >= _MOST_ID for token in prompt):
            raise WireError("prompt: ids of more than 32 bits are no token's", param="prompt")
        return None, tuple(prompt)
    raise WireError(
        "prompt must be one string or one non-empty list of token ids (no batches)", param="prompt"
    )


def _message(message: object, at: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise WireError(f"{at} must be an object", param=at)
    role = message.get("role")
    if role not in _ROLES:
        raise WireError(
            f"{at}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{at}.role"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise WireError(f"{at}.content must be text", param=f"{at}.content")
    return role, valid_unicode(content)


def _part(part: object, at: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise WireError(f"{at}: only {{'type': 'text', 'text': …}} parts are supported", param=at)
