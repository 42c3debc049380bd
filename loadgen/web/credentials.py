"""Whom a secret is for: the server that the person named who exported it, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadgen.errors import TargetFileError
from targets.address import parse_url
from targets.endpoint import DEFAULT_KEY_ENV

_OURS = ("reference", "mock")
_SUFFIXES = (".yaml", ".yml")


def is_same_origin(one: str, other: str) -> bool:
    """Whether two URLs are of one server; False for what is no URL."""
    try:
        a, b = parse_url(one), parse_url(other)
    except TargetFileError:
        return False
    return (a.scheme, a.host, a.port, a.unix_path) == (b.scheme, b.host, b.port, b.unix_path)


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine, where servers that we launch are."""
    host = parse_url(url).host
    return host in ("localhost", "::1") or host.startswith("127.")


def environ_for(target: str, given: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a run on `target`: without the API key where the command line gave
    another server, `given`. Whoever may press Start may name any Host."""
    is_file = Path(given).suffix in _SUFFIXES or Path(given).is_file()
    is_given = target in (given, *_OURS) or (not is_file and is_same_origin(target, given))
    return {name: value for name, value in environ.items() if is_given or name != DEFAULT_KEY_ENV}
