"""Text made safe to show: a server's words and command lines, without secrets and control
characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from urllib.parse import quote

import msgspec

HIDDEN = "[redacted]"
_SECRET = {"authorization", "credential", "credentials", "key", "passwd", "password", "secret",
           "token"}  # fmt: skip
"""Last parts of the names of flags and variables: `--hf-token`, `API_KEY=…`, not `--max-tokens`."""
_NAMED = re.compile(r"(?P<name>-{0,2}[A-Za-z][\w.-]*)=(?P<value>.+)", re.DOTALL)
_HEADER = re.compile(
    r"(?P<name>(?:proxy-)?authorization|(?:[\w-]+-)?api-key)\s*:\s*(?P<value>.+)",
    re.IGNORECASE | re.DOTALL,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]*:(?P<value>[^/@\s]+)(?=@)")
_HEAD_CHARS = 200
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


def error_message(body: bytes) -> str:
    """The message of an error body if it has one (OpenAI's, FastAPI's and bare shapes), else its
    head.
    """
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return one_line(body) or "an empty body"
    for key in ("error", "detail", "message"):
        while isinstance(found, dict) and found.get(key):
            found = found[key]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return strip_controls(" ".join(text.split()))[:_HEAD_CHARS] or "an empty body"


def one_line(body: bytes, limit: int = _HEAD_CHARS) -> str:
    """The head of a body for a message: one line of at most `limit` printable characters."""
    words = " ".join(body[: 4 * limit].decode("utf-8", "replace").split())
    return strip_controls(words)[:limit]


def _forms(secret: str) -> Iterator[str]:
    bare = _SCHEME.fullmatch(secret)
    for value in (secret, bare[1]) if bare else (secret,):
        in_json = json.dumps(value, ensure_ascii=False)[1:-1]
        yield from (value, " ".join(value.split()), quote(value, safe=""))
        yield from (in_json, in_json.replace("/", "\\/"))


def hide_secrets(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the words as they may be shown, what was taken out of them). A `${NAME}` names a variable
    and stays; so does the word after a flag that begins like the next flag.

    >>> hide_secrets(["serve", "--hf-token", "hf_1", "--seed=7"])
    (('serve', '--hf-token', '[redacted]', '--seed=7'), ('hf_1',))
    """
    shown: list[str] = []
    taken: list[str] = []
    is_value = False
    for word in words:
        values = [word] if is_value and not word.startswith("-") else list(_values(word))
        is_value = _is_secret_flag(word)
        for value in values:
            if "${" not in value:
                taken.append(value)
                word = word.replace(value, HIDDEN)
        shown.append(word)
    return tuple(shown), tuple(taken)


def _values(word: str) -> Iterable[str]:
    """The secret parts of one word."""
    named, header = _NAMED.fullmatch(word), _HEADER.search(word)
    if named is not None and _is_secret_name(named["name"]):
        yield named["value"]
    elif header is not None:
        yield header["value"]
    yield from (match["value"] for match in _IN_URL.finditer(word))


def _is_secret_flag(word: str) -> bool:
    return word.startswith("-") and "=" not in word and _is_secret_name(word)


def _is_secret_name(name: str) -> bool:
    return re.split(r"[-_.]", name.lower())[-1] in _SECRET or name.lower().endswith("apikey")
