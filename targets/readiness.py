"""Waiting until a server that slobench does not start is ready for requests."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

from loadgen.errors import TargetError
from loadgen.units import format_duration
from targets.base import Request
from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.probe_request import connect, connect_problem, fetch_models, send_probe

_POLL_S = 0.5
_ANSWER_S = 10.0  # limit of an attempt; then the next begins
STARTING = (502, 503, 504)  # of the server, or of a proxy in front of it


async def await_ready(
    endpoint: Endpoint,
    model: str,
    limit_s: float,
    on_wait: Callable[[float, str], None] = lambda waited_s, reason: None,
) -> None:
    """Return once the server lists a model and answers a small request with anything but 502, 503
    or 504. `on_wait` receives the seconds waited and the reason, twice a second. Raises TargetError
    with the last reason after `limit_s`."""
    begin_s = time.monotonic()
    while reason := await not_ready(endpoint, model):
        waited_s = time.monotonic() - begin_s
        if waited_s >= limit_s:
            limit = format_duration(limit_s)
            raise TargetError(
                f"{endpoint.shown_url}: not ready after {limit} (--wait-ready): {reason}"
            )
        on_wait(waited_s, reason)
        await asyncio.sleep(min(_POLL_S, limit_s - waited_s))


async def not_ready(endpoint: Endpoint, model: str) -> str:
    """Why the server is still starting; "" if it is ready, or if waiting cannot help."""
    try:
        await connect(endpoint, _ANSWER_S)
    except ssl.SSLError:
        return ""  # the preflight names it
    except OSError as error:  # TimeoutError too
        return connect_problem(error, endpoint, _ANSWER_S).partition(";")[0]
    async with HttpSession(endpoint.route) as session:
        models = await fetch_models(session, endpoint, _ANSWER_S)
        if not models.status or models.status in STARTING:
            return f"{models.request}: {models.problem}"
        model = model or endpoint.model
        if models.status == 200 and not models.ids and not model:
            return f"{models.request} {models.problem or 'lists no model'}"
        adapter = endpoint.adapter(model=model or next(iter(models.ids), ""))
        answer = await send_probe(session, endpoint, adapter, Request("Hi", 1), _ANSWER_S)
    is_starting = answer.status in STARTING or (not answer.status and answer.problem is not None)
    return answer.problem or "" if is_starting else ""
