"""The quiet state between two measurements on a server: no request in progress, no prefix cached.

Requests that the server still computes, and prompts that it still has in its cache, would change
the next measurement. The server's own metrics and endpoints are used; a server without them is
reported and not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from targets.base import HttpRequest
from targets.endpoint import OPERATOR_TOKEN, Endpoint
from targets.http_session import HttpSession
from targets.preflight_result import PreflightCheck
from targets.probe_request import send
from targets.scrape import Problem, Source, scrape_problem
from targets.server_metrics import add_up

RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
"""vLLM's (with VLLM_SERVER_DEV_MODE=1) and the bundled engine's; SGLang's."""

_POLL_S = 0.1
_TIMEOUT_S = 10.0
_ABSENT = (404, 405)
_IN_FLIGHT = ("running", "waiting", "swapped")


async def quiesce(
    endpoint: Endpoint, *, drain_s: float, resets_cache: bool
) -> list[PreflightCheck]:
    """Wait up to `drain_s` until the server has no request in progress, then empty its prefix cache
    if `resets_cache`.

    Returns one check for each: False if it failed, None if the server does not support it. Raises
    nothing.
    """
    checks = [await _drain(endpoint, drain_s)]
    if resets_cache:
        checks.append(await _reset(endpoint))
    return checks


async def unreachable_reason(endpoint: Endpoint) -> str:
    """Why the server does not answer; "" if it answers, with any status."""
    async with HttpSession(endpoint.route) as session:
        try:
            request = HttpRequest("GET", "/v1/models", (), b"")
            async with send(session, endpoint, request, _TIMEOUT_S):
                return ""
        except OSError as error:
            return endpoint.error_text(error)


async def _drain(endpoint: Endpoint, limit_s: float) -> PreflightCheck:
    """Poll the server's metrics until they count no request."""
    sources = [Source(url, endpoint) for url in endpoint.metrics_urls()]
    if not sources:
        return PreflightCheck("drained", None, "its metrics are switched off (metrics_url: off)")
    begin_s = time.monotonic()
    try:
        while True:
            n_left = await _in_flight(sources)
            waited_s = time.monotonic() - begin_s
            if n_left is None:
                return PreflightCheck("drained", None, "its metrics do not count requests")
            if n_left == 0:
                return PreflightCheck("drained", True, f"nothing in flight, after {waited_s:.1f} s")
            if waited_s >= limit_s:
                left = f"{n_left:.0f} requests still in flight after {waited_s:.1f} s"
                return PreflightCheck("drained", False, f"{left}: they slow the next measurement")
            await asyncio.sleep(_POLL_S)
    except Problem as error:
        problem = scrape_problem(error, endpoint, _TIMEOUT_S)
        return PreflightCheck("drained", None, f"its metrics cannot be read: {problem}")
    finally:
        for source in sources:
            source.close()


async def _in_flight(sources: Sequence[Source]) -> float | None:
    """Requests inside the server; None if its metrics do not count them."""
    values = add_up([await source.read(_TIMEOUT_S) for source in sources])
    if "running" not in values:
        return None
    return sum(values.get(name, 0.0) for name in _IN_FLIGHT)


async def _reset(endpoint: Endpoint) -> PreflightCheck:
    """Empty the prefix cache by the first of RESET_PATHS that the server has."""
    async with HttpSession(endpoint.route) as session:
        for path in RESET_PATHS:
            try:
                request = HttpRequest("POST", path, endpoint.operator_headers(), b"")
                async with send(session, endpoint, request, _TIMEOUT_S) as response:
                    status = response.status
            except OSError as error:
                reason = endpoint.error_text(error)
                return PreflightCheck("cache_reset", False, f"POST {path} failed: {reason}")
            if status < 300:
                return PreflightCheck("cache_reset", True, f"POST {path}")
            if status == 403:
                reason = f"POST {path} answered 403; slobench serve prints a token"
                return PreflightCheck("cache_reset", False, f"{reason}: {OPERATOR_TOKEN}=…")
            if status not in _ABSENT:
                return PreflightCheck("cache_reset", False, f"POST {path} answered {status}")
    return PreflightCheck(
        "cache_reset", None, f"the server has none of POST {', '.join(RESET_PATHS)}"
    )
