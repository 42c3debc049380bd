"""Between two measurements on one server: nothing in flight, and no prefix cached.

What came before must not be felt: requests that the server still computes, or prompts that it still
knows. Both are asked of the server itself; what it does not offer is told, and delays nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.preflight_result import PreflightCheck
from targets.scrape import Problem, Source, why
from targets.server_metrics import add_up

RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
"""vLLM's (with VLLM_SERVER_DEV_MODE=1) and the bundled engine's; SGLang's."""

_POLL_S = 0.1
_TIMEOUT_S = 10.0
_ABSENT = (404, 405)
_IN_FLIGHT = ("running", "waiting", "swapped")


async def settle(endpoint: Endpoint, *, drain_s: float, resets_cache: bool) -> list[PreflightCheck]:
    """Wait up to `drain_s` until the server computes nothing, then have it forget all prefixes.

    One line each for how that went: False where it did not work, None where the server does not
    offer it. Nothing is raised.
    """
    checks = [await _drained(endpoint, drain_s)]
    if resets_cache:
        checks.append(await _reset(endpoint))
    return checks


async def unreachable(endpoint: Endpoint) -> str:
    """Why nobody answers there, whatever the answer; "" where somebody does."""
    async with HttpSession(endpoint.route) as session:
        url = endpoint.address.http_url + "/v1/models"
        try:
            async with session.request("GET", url, endpoint.request_headers(), b"", _TIMEOUT_S):
                return ""
        except OSError as error:
            return endpoint.error_text(error)


async def _drained(endpoint: Endpoint, limit_s: float) -> PreflightCheck:
    """Whether the server's own metrics say that nothing is in flight."""
    sources = [Source(url, endpoint) for url in endpoint.metrics_urls()]
    if not sources:
        return PreflightCheck("drained", None, "its metrics are not to be read")
    begin_s = time.monotonic()
    try:
        while True:
            n_left = await _in_flight(sources)
            waited_s = time.monotonic() - begin_s
            if n_left is None:
                return PreflightCheck("drained", None, "its metrics do not say what is in flight")
            if n_left == 0:
                return PreflightCheck("drained", True, f"nothing in flight, after {waited_s:.1f} s")
            if waited_s >= limit_s:
                left = f"{n_left:.0f} requests still in flight after {waited_s:.1f} s"
                return PreflightCheck(
                    "drained", False, f"{left}: they weigh on what is measured next"
                )
            await asyncio.sleep(_POLL_S)
    except Problem as error:
        return PreflightCheck("drained", None, f"its metrics {why(error, endpoint, _TIMEOUT_S)}")
    finally:
        for source in sources:
            source.close()


async def _in_flight(sources: Sequence[Source]) -> float | None:
    """Requests inside the server; None where it does not count them."""
    found = add_up([await source.read(_TIMEOUT_S) for source in sources])
    if "running" not in found:
        return None
    return sum(found.get(name, 0.0) for name in _IN_FLIGHT)


async def _reset(endpoint: Endpoint) -> PreflightCheck:
    """Ask for an empty prefix cache under each of the names that servers know it by."""
    async with HttpSession(endpoint.route) as session:
        for path in RESET_PATHS:
            url, headers = endpoint.address.http_url + path, endpoint.request_headers()
            try:
                async with session.request("POST", url, headers, b"", _TIMEOUT_S) as answer:
                    status = answer.status
            except OSError as error:
                said = endpoint.error_text(error)
                return PreflightCheck("cache_reset", False, f"POST {path} failed: {said}")
            if status < 300:
                return PreflightCheck("cache_reset", True, f"POST {path}")
            if status not in _ABSENT:
                return PreflightCheck("cache_reset", False, f"POST {path} answered {status}")
    return PreflightCheck(
        "cache_reset", None, f"the server has none of POST {', '.join(RESET_PATHS)}"
    )
