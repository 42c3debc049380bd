"""Secrets among the words of a command line, by the names of the flags they follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
