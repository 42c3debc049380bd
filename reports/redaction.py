"""Secrets that people type and servers echo, taken out before a page is sent around."""

from __future__ import annotations

import re

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
    """The text with what looks like a key, token, password or URL credentials replaced."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
