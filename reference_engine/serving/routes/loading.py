"""What the port answers while the model is loading."""

from __future__ import annotations

from aiohttp import web

from reference_engine.serving.wire.wire_errors import WireError


def loading_routes() -> list[web.RouteDef]:
    """`/health` is fine, `/ready` is not yet, and everything else is asked to come back."""
    return [
        web.get("/health", _health),
        web.get("/ready", _ready),
        web.route("*", "/{path:.*}", _come_back),
    ]


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _ready(request: web.Request) -> web.Response:
    return web.json_response({"status": "loading"}, status=503)


async def _come_back(request: web.Request) -> web.Response:
    raise WireError(
        "the model is loading", status=503, type_="server_error", code="loading", retry_after_s=1
    )
