"""A streamed answer: server-sent events over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import ClientConnectionResetError, web

from reference_engine.streams import StreamBroken, TokenStream
from reference_engine.wire.answer import Encoder
from reference_engine.wire.call import Call
from reference_engine.wire.errors import WireError, error_event

log = logging.getLogger(__name__)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not gather tokens
}


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
    if request.transport is not None:
        stream.on_cut_off = request.transport.abort
    try:
        await response.prepare(request)
        await _write_events(response, call, stream, encoder)
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
    response: web.StreamResponse, call: Call, stream: TokenStream, encoder: Encoder
) -> None:
    """Tokens that are already there go out in one write, each as an event of its own."""
    out, n_output = [encoder.role()], 0
    has_usage, text_event, counted = call.continuous_usage, encoder.text, encoder.counted
    n_input = stream.request.n_prompt
    async for deltas in stream:
        n_cached = stream.request.n_cached  # known once there is a token
        for text, n_output, finish_reason, chosen in deltas:
            if text and finish_reason is None and chosen is None:
                out.append(
                    counted(text, n_input, n_output, n_cached) if has_usage else text_event(text)
                )
            elif text or finish_reason or chosen:
                usage = stream.usage(n_output) if has_usage else None
                out.append(encoder.event(text, finish_reason, usage, chosen))
        if stream.is_over:
            out.append(encoder.end(stream.usage(n_output) if call.include_usage else None))
        data = b"".join(out)
        if data:  # an empty chunk would end the body
            stream.is_blocked = True
            await response.write(data)
            stream.is_blocked = False
        out = []
    await response.write_eof()
