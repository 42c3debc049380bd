"""Chat and completions: bodies to the service, streams back whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from aiohttp import ClientConnectionResetError, web

from loadgen.clock import Clock
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamBroken, StreamDelta, TokenStream
from reference_engine.serving.wire.call import Call, parse_chat, parse_completion
from reference_engine.serving.wire.response import Encoder, Piece
from reference_engine.serving.wire.wire_errors import WireError, error_event

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


log = logging.getLogger(__name__)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not gather tokens
}
_MOST_BUFFERED_BYTES = 1 << 14


class ChunkWriter:
    """Writes events of plain text to the transport of an answer, each as a chunk of its body
    (RFC 9112 §7.1), while the transport passes on what it is given."""

    def __init__(self, transport: asyncio.WriteTransport, piece: Piece) -> None:
        self._transport, self._piece = transport, piece

    def take(self, delta: StreamDelta) -> bool:
        """Whether the delta is told; False where it is not plain text, or the client is gone or
        reads too slowly, which is for the task to deal with."""
        text, n_output, finish_reason, chosen = delta
        transport = self._transport
        if (
            finish_reason is not None
            or chosen is not None
            or transport.is_closing()
            or transport.get_write_buffer_size() > _MOST_BUFFERED_BYTES
        ):
            return False
        if text:
            event = self._piece(text, n_output)
            transport.write(b"".join((b"%x\r\n" % len(event), event, b"\r\n")))
        return True


async def stream_answer(
    request: web.Request,
    call: Call,
    stream: TokenStream,
    encoder: Encoder,
    foretold: Mapping[str, str],
) -> web.StreamResponse:
    """Answer with events. What goes wrong after the status line is told in band, or to nobody if
    the client is gone."""
    response = web.StreamResponse(headers={**_SSE_HEADERS, **foretold})
    transport = request.transport
    if transport is not None:
        stream.on_cut_off = transport.abort
    try:
        await response.prepare(request)
        # Not with HTTP/1.0, whose bodies have no chunks.
        is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        await _write_events(response, call, stream, encoder, transport if is_chunked else None)
    except StreamBroken as error:
        await _tell(response, str(error))
    except ClientConnectionResetError:
        log.debug("request %s: the client hung up", stream.request.id)
    except Exception:  # the request's boundary: a bug of ours, told and kept
        log.exception("request %s failed", stream.request.id)
        await _tell(response, "internal error")
    return response


async def _tell(response: web.StreamResponse, what: str) -> None:
    """An error in band, unless the client is gone."""
    with suppress(ClientConnectionResetError):
        await response.write(error_event(WireError(what, status=500, type_="server_error")))


async def _write_events(
    response: web.StreamResponse,
    call: Call,
    stream: TokenStream,
    encoder: Encoder,
    transport: asyncio.WriteTransport | None,
) -> None:
    """Tokens that are already there go out in one write, each as an event of its own. Those that
    come later are handed to the `transport`, if there is one."""
    out, n_output = [encoder.role()], 0
    piece: Piece | None = None
    async for deltas in stream:
        if piece is None:  # what was cached is known once there is a token
            request = stream.request
            piece = encoder.pieces(request.n_prompt, request.n_cached, call.continuous_usage)
        for text, n_output, finish_reason, chosen in deltas:
            if text and finish_reason is None and chosen is None:
                out.append(piece(text, n_output))
            elif text or finish_reason or chosen:
                usage = stream.usage(n_output) if call.continuous_usage else None
                out.append(encoder.event(text, finish_reason, usage, chosen))
        if stream.is_over:
            out.append(encoder.end(stream.usage(n_output) if call.include_usage else None))
        data = b"".join(out)
        if data:  # an empty chunk would end the body
            stream.is_blocked = True
            await response.write(data)
            stream.is_blocked = False
            if transport is not None:  # not before: the head goes out with the first write
                stream.hand(ChunkWriter(transport, piece).take)
        out = []
    await response.write_eof()
