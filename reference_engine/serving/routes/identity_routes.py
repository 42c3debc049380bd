"""Routes that describe the server: models, health, version, metrics; and the responses of every
route while the model is loading."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from aiohttp import web

from reference_engine.core.core import EngineState
from reference_engine.metrics.exposition import CONTENT_TYPE, Moment, page
from reference_engine.metrics.gpu import Gpu
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.service import Service
from reference_engine.serving.wire.wire_errors import WireError


class IdentityRoutes:
    """Read-only routes that do not involve the engine thread, so a long step does not delay
    them."""

    def __init__(
        self, service: Service, state: EngineState, identity: ServerIdentity, gpu: Gpu | None
    ) -> None:
        self._service, self._state, self._identity, self._gpu = service, state, identity, gpu

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.model),  # an id may contain slashes
            web.get("/health", self.health),
            web.get("/ping", self.ping),
            web.post("/ping", self.ping),
            web.get("/ready", self.ready),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
        ]

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        self._identity.check_model(request.match_info["id"])
        return web.json_response(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._identity.model,
            "object": "model",
            "created": self._identity.started_utc,
            "owned_by": "slobench",
            "max_model_len": self._identity.max_model_len,
        }

    async def health(self, request: web.Request) -> web.Response:
        """200 unless the process should be replaced."""
        failure = self._service.failure
        if failure is not None:
            return web.json_response({"status": "failed", "reason": failure}, status=500)
        if self._service.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def ping(self, request: web.Request) -> web.Response:
        """`health` with an empty body, as in vLLM: the health check of SageMaker."""
        return web.Response(status=(await self.health(request)).status)

    async def ready(self, request: web.Request) -> web.Response:
        """200 if the server accepts requests now."""
        phase = self._service.phase
        return web.json_response({"status": phase}, status=200 if phase == "ready" else 503)

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._identity.version})

    async def metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._page, self._moment())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _page(self, moment: Moment) -> bytes:
        if self._gpu is not None:
            moment = replace(moment, gpu=self._gpu.read())
        return page(self._service.metrics, moment)

    def _moment(self) -> Moment:
        service, state = self._service, self._state
        knobs = {name: str(value) for name, value in state.policy.model_dump().items()}
        return Moment(
            model=self._identity.model,
            n_running=service.n_running,
            n_waiting=service.n_waiting,
            kv_usage=1 - state.kv.n_free / state.kv.n_blocks,
            cache=self._identity.cache,
            policy={"mode": state.policy.kind, **knobs},
            n_slow_readers=service.n_slow_readers,
            n_refused=dict(service.n_refused),
        )


def loading_routes() -> list[web.RouteDef]:
    """Routes until the model is loaded: `/health` is 200, everything else 503."""
    return [
        web.get("/health", _health),
        web.get("/ready", _ready),
        web.route("*", "/{path:.*}", _loading),
    ]


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _ready(request: web.Request) -> web.Response:
    return web.json_response({"status": "loading"}, status=503)


async def _loading(request: web.Request) -> web.Response:
    raise WireError("the model is loading", status=503, code="loading", retry_after_s=1)
