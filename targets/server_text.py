"""Words that a server wrote, made fit to be shown: they may hold terminal commands, and repeat what
was sent to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from urllib.parse import quote

_SHORTEST = 4  # a "secret" of fewer characters is in every message: 1 in 401
_CUT_BEFORE = "'\"… "  # what a message puts behind a text that it cut short
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])  # C0, DEL, C1
_SCHEME = re.compile(r"(?:bearer|basic|token|api-?key)\s+(.+)", re.IGNORECASE)


def redact(text: str, secrets: Collection[str]) -> str:
    """`text` with every secret replaced by "[redacted]", also as JSON and URLs write it, without
    its scheme (`Bearer `), and where the end of the text cuts it short.

    Secrets of fewer than 4 characters stay: taking them out would take `1` out of `401`.
    """
    forms = sorted({form for s in secrets for form in _forms(s)}, key=len, reverse=True)
    forms = [form for form in forms if len(form) >= _SHORTEST]
    if not forms:
        return text
    text = re.sub("|".join(map(re.escape, forms)), "[redacted]", text)
    body = text.rstrip(_CUT_BEFORE)
    for form in forms:
        for length in range(min(len(form) - 1, len(body)), _SHORTEST - 1, -1):
            if body.endswith(form[:length]):
                return body[:-length] + "[redacted]" + text[len(body) :]
    return text


def strip_controls(text: str) -> str:
    """`text` without control characters (C0, DEL, C1): a terminal would obey them. Line ends are
    some of them; join the lines first.
    """
    return text.translate(_CONTROLS)


def _forms(secret: str) -> Iterator[str]:
    bare = _SCHEME.fullmatch(secret)
    for value in (secret, bare[1]) if bare else (secret,):
        in_json = json.dumps(value, ensure_ascii=False)[1:-1]
        yield from (value, " ".join(value.split()), quote(value, safe=""))
        yield from (in_json, in_json.replace("/", "\\/"))
