"""The responses of a server while the model is loading."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
from aiohttp import web

from reference_engine.serving.guard import Guard
from reference_engine.serving.routes.identity_routes import loading_routes


def test_a_loading_server_is_alive_and_not_ready():
    async def scene():
        runner = web.AppRunner(Guard("secret").app(loading_routes()))
        await runner.setup()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            await web.SockSite(runner, listener).start()
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with aiohttp.ClientSession(base) as session:
                responses = []
                for method, path in (("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics")):
                    async with session.request(method, path) as response:
                        responses.append((response.status, await response.json()))
                key = {"Authorization": "Bearer secret"}
                async with session.post("/v1/completions", json={}, headers=key) as response:
                    responses.append((response.status, response.headers["Retry-After"]))
                async with session.post("/v1/completions", json={}) as response:
                    responses.append((response.status, await response.json()))
            await runner.cleanup()
            return responses

    health, ready, metrics, post, without_key = asyncio.run(scene())
    assert health == (200, {"status": "ok"})
    assert ready == (503, {"status": "loading"})
    assert (metrics[0], metrics[1]["error"]["code"]) == (503, "loading")
    assert post == (503, "1")
    assert (without_key[0], without_key[1]["error"]["code"]) == (401, "invalid_api_key")
