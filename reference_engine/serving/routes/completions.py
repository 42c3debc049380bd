"""Chat and completions: bodies to the service, streams back whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from loadgen.clock import Clock
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.routes.streaming import stream_answer
from reference_engine.serving.streams import StreamDelta, TokenStream
from reference_engine.serving.wire.call import Call, parse_chat, parse_completion
from reference_engine.serving.wire.response import Encoder

_LONGEST_REQUEST_ID = 128


class Streams(Protocol):
    """What answers calls: a `Service`, or the link to one in another process."""

    @property
    def clock(self) -> Clock: ...

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream: ...


class CompletionRoutes:
    """`/v1/chat/completions` and `/v1/completions`. `mark` is in the ids of answers, and tells
    those of several processes apart."""

    def __init__(self, service: Streams, about: ServerIdentity, mark: str = "") -> None:
        self._service, self._about, self._mark = service, about, mark
        self._n_answers = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/completions", self.completions),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_completion)

    async def _complete(
        self, request: web.Request, parse: Callable[[bytes, str | None], Call]
    ) -> web.StreamResponse:
        body = await request.read()
        # With its last byte: whoever sends slowly has not waited here, and overtakes nobody by it.
        arrived_s = self._service.clock.now_s()
        call = parse(body, request.headers.get("x-tenant"))
        self._about.check_model(call)
        stream = self._service.submit(call, request_id(request), arrived_s)
        encoder = Encoder(call, self._answer_id(call), self._about.model, int(time.time()))
        try:
            await stream.admitted()
            foretold = _foretold(stream)
            if call.stream:
                return await stream_answer(request, call, stream, encoder, foretold)
            body = await _whole(stream, encoder)
            return web.Response(body=body, content_type="application/json", headers=foretold)
        finally:
            stream.close()

    def _answer_id(self, call: Call) -> str:
        self._n_answers += 1
        return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{self._mark}{self._n_answers}"


def request_id(request: web.Request) -> str | None:
    """The client's id, if it is one that can stand in a header and a log line."""
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= _LONGEST_REQUEST_ID and given.isprintable() else None


def _foretold(stream: TokenStream) -> dict[str, str]:
    """What the engine foretold at arrival, for the client to compare with what came."""
    forecast = stream.request.forecast
    if forecast is None:
        return {}
    headers = {"x-tokens-ahead": str(forecast.tokens_ahead)}
    if forecast.start_s is not None:
        wait_s = max(0.0, forecast.start_s - stream.request.arrived_s)
        headers["x-predicted-start-ms"] = f"{wait_s * 1e3:.3f}"
    return headers


async def _whole(stream: TokenStream, encoder: Encoder) -> bytes:
    kept: list[StreamDelta] = []

    def keep(delta: StreamDelta) -> bool:
        goes_on = delta.finish_reason is None
        if goes_on:
            kept.append(delta)
        return goes_on

    async for deltas in stream:
        kept += deltas
        stream.hand(keep)
    last = kept[-1]
    return encoder.whole(
        "".join([delta.text for delta in kept]),
        last.finish_reason or "stop",
        stream.usage(last.n_output),
        [delta.chosen for delta in kept if delta.chosen is not None],
    )
