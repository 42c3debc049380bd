"""Removal of secrets from text: keys that users type or servers echo must not be on a page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_REDACTED = "[redacted]"
_PATTERNS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\"]+"), rf"\1 {_REDACTED}"),
    (
        re.compile(
            r"(?i)((?:api[-_]?key|access[-_]?key|authorization|token|secret|password)"
            r"(?!_env)[\"']?\s*[:=]\s*[\"']?)(?!bearer |basic )[^\s'\",}]+"
        ),
        rf"\1{_REDACTED}",
    ),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"), _REDACTED),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), _REDACTED),
    (re.compile(r"(\w+://)[^/\s@'\"]+@"), rf"\1{_REDACTED}@"),
)


def redact(text: str) -> str:
    """The text with every likely key, token, password and URL credential replaced."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redacted_command(words: Iterable[object]) -> str:
    """The words of a command as a shell reads them, each redacted."""
    return shlex.join(redact(str(word)) for word in words)
