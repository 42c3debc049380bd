"""Successful preflights of servers that slobench does not start, kept for `--reuse-preflight`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from loadgen.manifest.sections import PreflightLine
from loadgen.system.whole_file import read_regular, replacing
from loadgen.workload.prompts import PromptFit
from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.probe_request import fetch_models
from targets.safe_text import redact

_SCHEMA = 1
_MOST_BYTES = 1 << 20
_KEPT_S = 86_400.0  # older files are removed
_TIMEOUT_S = 5.0
ModelLengths = dict[str, int | None]
"""The models that a server lists, each with its longest sequence in tokens, None if not stated."""


@dataclass(frozen=True)
class KnownPreflight:
    """The result of a preflight: the models that the server listed, the fields of the adapter, the
    prompt fit, the lines, the URLs of the server's metrics, and the longest time to a first token.
    `at_utc_s` is its time, seconds
    since 1970."""

    at_utc_s: float
    models: ModelLengths
    adapter: dict[str, Any]
    fit: PromptFit
    checks: tuple[PreflightLine, ...]
    metrics: tuple[str, ...]
    longest_wait_s: float = 0.0
    schema: int = _SCHEMA

    @property
    def age_s(self) -> float:
        """Seconds since the preflight; infinite for a time in the future."""
        seconds = time.time() - self.at_utc_s
        return seconds if seconds >= 0 else math.inf


class KnownPreflights:
    """Results in files of a folder, a file per server and kind of request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, endpoint: Endpoint, requests: Sequence[object]) -> KnownPreflight | None:
        """The last result for equal `requests`; None without one, or with an unreadable file."""
        try:
            data = read_regular(self._path(endpoint, requests), _MOST_BYTES)
            known = msgspec.json.decode(data, type=KnownPreflight)
        except (OSError, msgspec.DecodeError, AssertionError):  # a fit asserts its ranges
            return None
        return known if known.schema == _SCHEMA else None

    def keep(self, endpoint: Endpoint, requests: Sequence[object], known: KnownPreflight) -> None:
        """Stores a result, readable by its user only, and removes results older than a day. A
        folder that cannot be written keeps nothing; a result that holds a secret, such as a model
        with the name of the key, is not stored."""
        data = msgspec.json.encode(known)
        text = data.decode()
        if redact(text, endpoint.secrets()) != text:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._folder.glob("*.json"):
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    path.unlink(missing_ok=True)
            with replacing(self._path(endpoint, requests)) as partial:
                partial.unlink(missing_ok=True)
                partial.touch(0o600)
                partial.write_bytes(data)

    def _path(self, endpoint: Endpoint, requests: Sequence[object]) -> Path:
        server = msgspec.json.encode((endpoint.to_manifest(), endpoint.has_key))
        return self._folder / f"{sha256(server + repr(requests).encode()).hexdigest()[:32]}.json"


async def models_now(endpoint: Endpoint) -> ModelLengths | None:
    """The models that a server lists at present; None without an answer."""
    async with HttpSession(endpoint.route) as session:
        models = await fetch_models(session, endpoint, _TIMEOUT_S)
    return models.max_len if models.status == 200 else None
