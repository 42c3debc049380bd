"""A streamed answer: server-sent events over HTTP.

One task per answer writes through aiohttp what is rare: the head, the first token, ends, errors,
and what a reader who fell behind has to wait for. All other tokens go from the step's wake-up to
the socket (`ChunkWriter`): no task is woken, and nothing is awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import ClientConnectionResetError, web

from reference_engine.serving.streams import StreamBroken, StreamDelta, TokenStream
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.response import Encoder, Piece
from reference_engine.serving.wire.wire_errors import WireError, error_event

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
