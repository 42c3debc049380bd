"""What `GET /v1/models` says: which models are served, and how long a sequence may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.probe_request import is_redirect, one_line, reason, redirected, said
from targets.safe_text import strip_controls

# vLLM, SGLang and our engine; then hosted gateways.
_LENGTH_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length")


@dataclass(frozen=True)
class Models:
    """The list as served. `status` 0 means it could not be had at all; `problem` then says why."""

    status: int
    max_len: dict[str, int | None]
    problem: str | None = None
    is_bundled: bool = False  # served by slobench's own engine
    is_transient: bool = False  # there was no connection, or it was lost: worth another attempt

    @property
    def ids(self) -> list[str]:
        return list(self.max_len)


async def fetch_models(session: HttpSession, endpoint: Endpoint, timeout_s: float) -> Models:
    """Ask once; every way to fail is in the result, none is raised."""
    url, headers = endpoint.address.http_url + "/v1/models", endpoint.request_headers()
    try:
        async with session.request("GET", url, headers, b"", timeout_s) as response:
            body = await response.read(1 << 20)
    except TimeoutError:
        return Models(0, {}, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Models(0, {}, reason(error, endpoint), is_transient=True)
    if is_redirect(response.status):
        return Models(response.status, {}, redirected(response, url, endpoint))
    if response.status != 200:
        return Models(
            response.status, {}, f"answered {response.status}: {endpoint.redact(said(body))}"
        )
    try:
        return Models(200, parse_models(body), is_bundled=_is_bundled(body))
    except ValueError:
        head = endpoint.redact(one_line(body))[:80]
        return Models(200, {}, f"answered no list of models but {head!r}")


def parse_models(body: bytes) -> dict[str, int | None]:
    """Model id → longest sequence in tokens, None where it is not said. Raises ValueError on any
    other shape.
    """
    try:
        found = msgspec.json.decode(body)
    except RecursionError:
        raise ValueError("nested too deep") from None
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(data, list):
        raise ValueError("no 'data' list")
    models = [m for m in data if isinstance(m, dict) and "id" in m]
    return {strip_controls(str(m["id"])): _length(m) for m in models}


def _is_bundled(body: bytes) -> bool:
    """Whether a list that `parse_models` could read is the bundled engine's."""
    models = msgspec.json.decode(body)["data"]
    return any(isinstance(m, dict) and m.get("owned_by") == "slobench" for m in models)


def _length(model: dict[str, Any]) -> int | None:
    for key in _LENGTH_KEYS:
        value = model.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
