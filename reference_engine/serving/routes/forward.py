"""What a worker does not answer itself is asked of the engine's process, over a Unix socket."""

from __future__ import annotations

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from yarl import URL

from reference_engine.serving.wire.wire_errors import WireError

_ASKED = ("x-tenant", "x-actor")  # all that the engine looks at
_TOLD = ("Content-Type", "Content-Length", "Retry-After")


class ForwardRoutes:
    """Everything that has no route before it."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{path:.*}", self.forward)]

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        url = URL(f"http://engine{request.rel_url.raw_path_qs}", encoded=True)
        headers = {name: _text(name, request) for name in _ASKED if name in request.headers}
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                told = {name: answer.headers[name] for name in _TOLD if name in answer.headers}
                return web.Response(body=await answer.read(), status=answer.status, headers=told)
        except ClientError as error:
            raise WireError(
                f"the engine's process does not answer: {error}", status=500, type_="server_error"
            ) from error


def session_to(engine_path: str) -> ClientSession:
    """For any number of questions at once, however long they take."""
    connector = UnixConnector(engine_path, limit=0)
    return ClientSession(connector=connector, timeout=ClientTimeout(total=None))


def _text(name: str, request: web.Request) -> str:
    value = request.headers[name]
    if not value.isprintable():  # bytes that are no UTF-8 come as lone surrogates
        raise WireError(f"the header {name} must be printable", param=name)
    return value
