"""Text made safe to show: the words of a server and of command lines, without secrets and control
characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec

HIDDEN = "[redacted]"
_SECRET = {
    "authorization",
    "credential",
    "credentials",
    "key",
    "passwd",
    "password",
    "secret",
    "token",
}
"""Last parts of the names of flags and variables: `--hf-token`, `API_KEY=…`, not `--max-tokens`."""
_IN_QUERIES = ("code", "sig", "signature")
"""Names of keys in the queries of Azure Functions, of shared access signatures and of AWS."""
_NAMED = re.compile(r"(?P<name>-{0,2}[A-Za-z][\w.-]*)=(?P<value>.+)", re.DOTALL)
_HEADER = re.compile(
    r"(?P<name>(?:proxy-)?authorization|(?:[\w-]+-)?api-key)\s*:\s*(?P<value>.+)",
    re.IGNORECASE | re.DOTALL,
)
_IN_URL = re.compile(r"(?<=://)(?:[^/@\s:]*:)?(?P<value>[^/@\s]+)(?=@)")
_HEAD_CHARS = 200
_SHORTEST = 4  # a shorter "secret" is in every message: 1 in 401
_SHORTEST_IN_BODY = 8
_CUT_BEFORE = "'\"… "  # characters that a message puts after a text that it cut short
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])  # C0, DEL, C1
_SCHEME = re.compile(r"(?:bearer|basic|token|api-?key)\s+(.+)", re.IGNORECASE)


def redact(text: str, secrets: Collection[str]) -> str:
    """`text` with every secret replaced by "[redacted]": also in the notation of JSON and URLs,
    without its scheme (`Bearer `), and cut short by the end of the text.

    Secrets of fewer than 4 characters stay: removing them would remove `1` from `401`.
    """
    forms = sorted({form for s in secrets for form in _forms(s)}, key=len, reverse=True)
    forms = [form for form in forms if len(form) >= _SHORTEST]
    if not forms:
        return text
    text = re.sub("|".join(map(re.escape, forms)), HIDDEN, text)
    body = text.rstrip(_CUT_BEFORE)
    for form in forms:
        for length in range(min(len(form) - 1, len(body)), _SHORTEST - 1, -1):
            if body.endswith(form[:length]):
                return body[:-length] + HIDDEN + text[len(body) :]
    return text


class SecretForms:
    """The notations of secrets in the bytes of a server, for bodies that are kept as received.

    Only secrets of at least 8 characters, so that no short value of a header, such as `data`,
    changes the structure of an answer. False if there are none.
    """

    def __init__(self, secrets: Collection[str]) -> None:
        forms = {form.encode() for secret in secrets for form in _forms(secret)}
        long_enough = (form for form in forms if len(form) >= _SHORTEST_IN_BODY)
        self._forms = sorted(long_enough, key=len, reverse=True)  # one may hold another

    def __bool__(self) -> bool:
        return bool(self._forms)

    def are_in(self, body: bytes) -> bool:
        return any(form in body for form in self._forms)

    def masked(self, body: bytes) -> bytes:
        """The body with an asterisk in place of each byte of a secret."""
        for form in self._forms:
            body = body.replace(form, b"*" * len(form))
        return body


def _forms(secret: str) -> Iterator[str]:
    bare = _SCHEME.fullmatch(secret)
    for value in (secret, bare[1]) if bare else (secret,):
        yield from (value, " ".join(value.split()), quote(value, safe=""))
        for is_ascii in (False, True):
            in_json = json.dumps(value, ensure_ascii=is_ascii)[1:-1]
            yield from (in_json, in_json.replace("/", "\\/"))


def strip_controls(text: str) -> str:
    """`text` without control characters (C0, DEL, C1), which a terminal would obey. Line ends are
    control characters too; join the lines first.
    """
    return text.translate(_CONTROLS)


def one_line(body: bytes, limit: int = _HEAD_CHARS) -> str:
    """The start of a body for a message: one line of at most `limit` printable characters."""
    words = " ".join(body[: 4 * limit].decode("utf-8", "replace").split())
    return strip_controls(words)[:limit]


def error_message(body: bytes) -> str:
    """The message in an error body of a known form (OpenAI's, FastAPI's, a bare object), otherwise
    the start of the body.
    """
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return one_line(body) or "an empty body"
    for key in ("error", "detail", "message"):
        while isinstance(content, dict) and content.get(key):
            content = content[key]
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return strip_controls(" ".join(text.split()))[:_HEAD_CHARS] or "an empty body"


def hide_secrets(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the words of a command line without secrets, the secrets). A secret is recognized by the
    name of its flag or variable, as a header, and as the password of a URL. A `${NAME}` stays, for
    it only names a variable; so does the word after a flag if it begins like another flag.

    >>> hide_secrets(["serve", "--hf-token", "hf_1", "--seed=7"])
    (('serve', '--hf-token', '[redacted]', '--seed=7'), ('hf_1',))
    """
    shown: list[str] = []
    secrets: list[str] = []
    is_value = False
    for word in words:
        values = [word] if is_value and not word.startswith("-") else list(_secret_parts(word))
        is_value = word.startswith("-") and "=" not in word and _is_secret_name(word)
        for value in values:
            if "${" not in value:
                secrets.append(value)
                word = word.replace(value, HIDDEN)
        shown.append(word)
    return tuple(shown), tuple(secrets)


def without_user_info(text: str) -> str:
    """`text` without the user name and the password of every URL in it."""
    return re.sub(r"(?<=://)[^/\s'\"]+@", f"{HIDDEN}@", text)


def query_secrets(url: str) -> tuple[str, ...]:
    """The values in the query of a URL under names that look secret.

    >>> query_secrets("https://h/v1?api-version=1&key=k1")
    ('k1',)
    """
    pairs = (pair.partition("=") for pair in url.partition("?")[2].partition("#")[0].split("&"))
    secrets = {value for name, _, value in pairs if value and _is_secret_parameter(name)}
    return tuple(sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True))


def hide_query(url: str) -> str:
    """The URL without the secrets of its query.

    >>> hide_query("https://h/v1?api-version=1&key=k1")
    'https://h/v1?api-version=1&key=[redacted]'
    """
    place, mark, query = url.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&"))
    shown = (
        f"{name}{equals}{HIDDEN if value and _is_secret_parameter(name) else value}"
        for name, equals, value in pairs
    )
    return place + mark + "&".join(shown)


def hide_named(value: Any) -> tuple[Any, tuple[str, ...]]:
    """(decoded JSON without the values under names that look secret, those values). A name counts
    at any depth; numbers and texts below it are secrets.

    >>> hide_named({"auth": {"api_key": "k1"}, "seed": 7})
    ({'auth': {'api_key': '[redacted]'}, 'seed': 7}, ('k1',))
    """
    secrets: list[str] = []

    def hide(value: Any, is_secret: bool) -> Any:
        if isinstance(value, Mapping):
            return {
                name: hide(inner, is_secret or _is_secret_name(str(name)))
                for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [hide(inner, is_secret) for inner in value]
        if not is_secret or value is None or isinstance(value, bool):
            return value
        secrets.append(str(value))
        return HIDDEN

    return hide(value, False), tuple(secrets)


def _secret_parts(word: str) -> Iterable[str]:
    named, header = _NAMED.fullmatch(word), _HEADER.search(word)
    if named is not None and _is_secret_name(named["name"]):
        yield named["value"]
    elif named is not None and _NAMED.fullmatch(named["value"]):  # --set=server.api_key=…
        yield from _secret_parts(named["value"])
    elif header is not None:
        yield header["value"]
    yield from (match["value"] for match in _IN_URL.finditer(word))
    if "://" in word:
        yield from query_secrets(word)


def _is_secret_name(name: str) -> bool:
    words = re.split(r"[-_.]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return words[-1] in _SECRET or name.lower().endswith("apikey")


def _is_secret_parameter(name: str) -> bool:
    """Whether a parameter of a URL's query holds a secret."""
    return _is_secret_name(name) or name.lower() in _IN_QUERIES
