"""The HTTP server: the routes behind one guard, which asks for the key and gives every error
OpenAI's shape."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from reference_engine.serving.routes.completions import request_id
from reference_engine.serving.streams import StreamBroken
from reference_engine.serving.wire.wire_errors import WireError, error_body

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GUARDED = ("/v1/", "/debug/", "/reset_prefix_cache")


class Guard:
    """`api_key`, when set, is asked of everything under `/v1` and `/debug`, and of who would
    empty the cache."""

    def __init__(self, api_key: str | None = None, max_body_bytes: int = 16 << 20) -> None:
        self._api_key, self._max_body_bytes = api_key, max_body_bytes

    def app(self, routes: Iterable[web.RouteDef]) -> web.Application:
        """An application; run it with `handler_cancellation=True`, or a client that hangs up
        keeps its request running."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._answer])
        app.on_response_prepare.append(_echo_request_id)
        app.add_routes(list(routes))
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_key(request)
            return await handler(request)
        except WireError as error:
            return _refusal(error)
        except StreamBroken as error:
            return _refusal(WireError(str(error), status=error.status, type_="server_error"))
        except web.HTTPRequestEntityTooLarge:
            limit = f"the body is larger than {self._max_body_bytes} bytes"
            return _refusal(WireError(limit, status=413, code="body_too_large"))
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}"
            return _refusal(WireError(what, status=error.status))
        except Exception:  # the request's boundary: a bug of ours, told and kept
            log.exception("%s %s failed", request.method, request.path)
            return _refusal(WireError("internal error", status=500, type_="server_error"))

    def _check_key(self, request: web.Request) -> None:
        if self._api_key is None or not request.path.startswith(_GUARDED):
            return
        given = request.headers.get("Authorization", "")
        # Bytes that are no UTF-8 come as lone surrogates.
        given_bytes = given.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given_bytes, f"Bearer {self._api_key}".encode()):
            raise WireError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer …'",
                status=401,
                code="invalid_api_key",
            )


def _refusal(error: WireError) -> web.Response:
    retry = error.retry_after_s
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return web.Response(
        body=error_body(error),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    given = request_id(request)
    if given is not None:
        response.headers["x-request-id"] = given
