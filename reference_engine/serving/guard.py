"""The HTTP application around the routes: checks the API key, the host and the operator's token,
answers browsers of other origins (CORS), and turns every error into OpenAI's error object."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from loadgen.system.host_names import HostNames
from reference_engine.serving.routes.completions import request_id
from reference_engine.serving.wire.wire_errors import WireError, error_body

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPERATOR = ("/debug/", "/reset_prefix_cache")
_GUARDED = ("/v1/", *_OPERATOR, "/tokenize", "/detokenize")
_JSON_ONLY = ("/v1/", "/tokenize", "/detokenize")
_READING = ("GET", "HEAD")
_HEAD_S = 75.0
"""For the head of a request, also between two requests of a connection."""
BODY_S = 60.0
"""For the body of a request."""
TOKEN_HEADER = "x-operator-token"
_READABLE_HEADERS = "x-request-id, x-engine-request-id, x-tokens-ahead, x-predicted-start-ms"
_PREFLIGHT_AGE_S = 600
_SLOW = 408


class Guard:
    """Makes applications. If `api_key` is set, requests to `/v1`, `/debug`, `/tokenize`,
    `/detokenize` and `/reset_prefix_cache` need it. Scripts of the origin `cors` (`*`: any) may
    read the responses in a browser.

    `/debug` and `/reset_prefix_cache` accept only requests under a name in `names`. Their PUT, POST
    and DELETE need the `operator_token`, if it is set, and never come from pages of other sites.
    The others take JSON only: a page of any site may send text or a form, but for
    `application/json` a browser asks first (CORS). A body must arrive within `body_s` seconds."""

    def __init__(
        self,
        api_key: str | None = None,
        max_body_bytes: int = 16 << 20,
        cors: str | None = None,
        operator_token: str | None = None,
        names: HostNames | None = None,
        body_s: float = BODY_S,
    ) -> None:
        self._body_s = body_s
        self._api_key, self._max_body_bytes, self._cors = api_key, max_body_bytes, cors
        self._operator_token, self._names = operator_token, names

    def app(self, routes: Iterable[web.RouteDef]) -> web.Application:
        """An application, to be served by `running`."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._answer])
        app.on_response_prepare.append(_echo_request_id)
        app.on_response_prepare.append(self._allow_origin)
        app.add_routes(list(routes))
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._cors is not None and _is_cors_preflight(request):
                return _preflight_response(request)
            self._check_key(request)
            if request.path.startswith(_OPERATOR):
                self._check_operator(request)
            if request.body_exists:
                await self._read_body(request)
            return await handler(request)
        except WireError as error:
            return _error_response(error)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is above the limit of {self._max_body_bytes} bytes"
            return _error_response(WireError(message, status=413, code="body_too_large"))
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}"
            return _error_response(WireError(message, status=error.status))
        except Exception:  # the request's boundary: a bug of the server, logged
            log.exception("%s %s failed", request.method, request.path)
            return _error_response(WireError("internal error", status=500))

    async def _read_body(self, request: web.Request) -> None:
        """Reads the body, which `request.read` then returns at once."""
        if request.path.startswith(_JSON_ONLY) and request.content_type != "application/json":
            raise WireError(
                f"the content type {request.content_type[:100]!r} is not application/json; send "
                "the header 'Content-Type: application/json'",
                status=415,
                code="unsupported_media_type",
            )
        try:
            async with asyncio.timeout(self._body_s):
                await request.read()
        except TimeoutError:
            raise WireError(
                f"the body did not arrive within {self._body_s:g} s", status=_SLOW, code="slow_body"
            ) from None

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._cors is None:
            return
        response.headers["Access-Control-Expose-Headers"] = _READABLE_HEADERS
        if self._cors == "*":
            response.headers["Access-Control-Allow-Origin"] = "*"
            return
        response.headers["Vary"] = "Origin"
        if request.headers.get("Origin") == self._cors:
            response.headers["Access-Control-Allow-Origin"] = self._cors

    def _check_key(self, request: web.Request) -> None:
        if self._api_key is None or not request.path.startswith(_GUARDED):
            return
        # Bytes that are not UTF-8 are lone surrogates in the header.
        header = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(header, f"Bearer {self._api_key}".encode()):
            raise WireError(
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )

    def _check_operator(self, request: web.Request) -> None:
        host = request.headers.get("Host")
        if self._names is not None and not self._names.accepts(host):
            raise WireError(
                f"the host {(host or '')[:100]!r} is not a name of this server; start it with "
                "--allowed-host NAME to accept it",
                status=421,
                code="unknown_host",
            )
        if request.method in _READING:
            return
        if self._names is not None and self._names.is_other_site(
            request.headers.get("Origin"), host
        ):
            raise WireError(
                "requests from pages of other sites are rejected", status=403, code="other_site"
            )
        if self._operator_token is None:
            return
        header = request.headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(header, self._operator_token.encode()):
            raise WireError(
                f"this request changes the server: send the operator token in the header "
                f"{TOKEN_HEADER} (printed at the start, unless an environment variable holds it), "
                "or start the server with --operator open",
                status=403,
                code="operator_token_required",
            )


@asynccontextmanager
async def running(
    app: web.Application, shutdown_s: float = 1.0, head_s: float = _HEAD_S
) -> AsyncIterator[web.AppRunner]:
    """A runner of `app`, for a site to listen with. A connection is closed if no whole head of a
    request arrives within `head_s` of its beginning or of the answer before. Without
    `handler_cancellation` the request of a client that disconnects would run on."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=head_s,
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


def _is_cors_preflight(request: web.Request) -> bool:
    headers = request.headers
    has_headers = "Origin" in headers and "Access-Control-Request-Method" in headers
    return request.method == "OPTIONS" and has_headers


def _preflight_response(request: web.Request) -> web.Response:
    """The answer to a browser's preflight request, which carries no API key.

    Source: the Fetch standard, section 3.2.
    """
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, OPTIONS",
        "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
    }
    # The value `*` would not include Authorization.
    requested = request.headers.get("Access-Control-Request-Headers", "")
    if requested.isprintable() and requested:
        headers["Access-Control-Allow-Headers"] = requested
    return web.Response(status=204, headers=headers)


def _error_response(error: WireError) -> web.Response:
    retry_s = error.retry_after_s
    response = web.Response(
        body=error_body(error),
        status=error.status,
        content_type="application/json",
        headers={} if retry_s is None else {"Retry-After": str(retry_s)},
    )
    if error.status == _SLOW:
        response.force_close()  # the rest of the body may still come
    return response


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    client_id = request_id(request)
    if client_id is not None:
        response.headers["x-request-id"] = client_id
