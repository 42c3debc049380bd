"""A server in this process, on a real loopback socket, for tests of HTTP: whole, or split into an
engine and an HTTP worker, which share nothing but the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from reference_engine.serve import Wired, wire_up
from reference_engine.serving.build import Engine, build
from reference_engine.serving.guard import Guard, running
from reference_engine.serving.http_workers.channel import Open
from reference_engine.serving.http_workers.http_worker import HttpWorker
from reference_engine.serving.http_workers.worker_link import WorkerLink
from reference_engine.serving.serve_options import ServeOptions
from reference_engine.serving.service import Service


@dataclass
class Serving:
    """A running server and a client session for it."""

    session: aiohttp.ClientSession
    service: Service
    port: int

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a response that is not streamed; a bytes body is sent unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.request("GET", path)

    async def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        async with self.session.request(method, path, json=body) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self.session.get(path) as response:
            assert response.status == 200
            return await response.text()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of each event of a stream; the terminator stays a string."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        lines = text.split("\n\n")
        assert lines.pop() == ""
        data = [line.removeprefix("data: ") for line in lines]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    async def idle(self) -> dict[str, Any]:
        """The engine's sizes after all requests are over; fails if some never are."""
        for _ in range(5000):
            _, sizes = await self.get("/debug/engine")
            if sizes["running"] == sizes["waiting"] == 0:
                assert sizes["kv_blocks_free"] == sizes["kv_blocks"]
                return dict(sizes)
        raise AssertionError(f"the engine does not become idle: {sizes}")


def toy_engine(**options: Any) -> Engine:
    return build(toy_options(**options))


def toy_options(**options: Any) -> ServeOptions:
    return ServeOptions(**{"device": "toy", "shape": "nano", **options})


@asynccontextmanager
async def serving(
    engine: Engine | None = None,
    api_key: str | None = None,
    is_split: bool | None = None,
    guard: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Serve the engine (by default a toy with these `options`) until the block ends. `is_split`
    None is the form of the fixture `both_forms`, else whole. `guard` are further arguments of
    `Guard`."""
    chosen = toy_options(**{"max_body_bytes": 1 << 18, **options})
    engine = engine or build(chosen)
    wired = wire_up(engine, chosen)
    service = wired.service
    service.start()
    listener = socket.socket()
    # Small, and inherited by every connection: a reader that stops blocks after a few events.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    if Form.is_split if is_split is None else is_split:
        epoch_ns = engine.clock.epoch_ns
        behind = _split(wired, listener, chosen, api_key, epoch_ns, guard or {})
    else:
        app = Guard(api_key, chosen.max_body_bytes, chosen.cors, **(guard or {})).app(wired.routes)
        behind = _site(app, lambda runner: web.SockSite(runner, listener))
    async with behind:
        try:
            json_only = {"Content-Type": "application/json"}
            async with aiohttp.ClientSession(
                f"http://127.0.0.1:{port}", headers=json_only
            ) as session:
                yield Serving(session, service, port)
        finally:
            await service.stop()


class Form:
    """The default form of `serving`."""

    is_split = False


@asynccontextmanager
async def _site(
    app: web.Application, make: Callable[[web.AppRunner], web.BaseSite]
) -> AsyncIterator[None]:
    async with running(app, shutdown_s=0.1) as runner:
        await make(runner).start()
        yield


@asynccontextmanager
async def _split(
    wired: Wired,
    listener: socket.socket,
    chosen: ServeOptions,
    api_key: str | None,
    epoch_ns: int,
    guard: Mapping[str, Any],
) -> AsyncIterator[None]:
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine.sock")
        app = Guard(None, chosen.max_body_bytes).app(wired.routes)
        async with _site(app, lambda runner: web.UnixSite(runner, path)):
            ours, theirs = socket.socketpair()
            worker = asyncio.create_task(HttpWorker(listener).run(theirs))
            link = WorkerLink(wired.service, on_lost=lambda: pytest.fail("lost"))
            opening = Open(
                wired.identity,
                1,
                epoch_ns,
                path,
                chosen.outbox_tokens,
                chosen.max_body_bytes,
                api_key,
                chosen.cors,
                **guard,
            )
            await link.open(ours, opening)
            try:
                yield
            finally:
                link.close()
                assert await worker
