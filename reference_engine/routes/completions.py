"""Chat and completions: bodies to the service, streams back whole or as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from aiohttp import ClientConnectionResetError, web

from reference_engine.routes.about import About
from reference_engine.service import Service
from reference_engine.streams import StreamBroken, TokenStream
from reference_engine.wire.answer import Chosen, Encoder
from reference_engine.wire.call import Call, parse_chat, parse_completion
from reference_engine.wire.errors import WireError, error_event

log = logging.getLogger(__name__)

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not gather tokens
}
_LONGEST_REQUEST_ID = 128


class CompletionRoutes:
    """`/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, service: Service, about: About) -> None:
        self._service, self._about = service, about
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
                return await _stream(request, call, stream, encoder, foretold)
            body = await _whole(stream, encoder)
            return web.Response(body=body, content_type="application/json", headers=foretold)
        finally:
            stream.close()
            _log_end(stream)

    def _answer_id(self, call: Call) -> str:
        self._n_answers += 1
        return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{self._n_answers}"


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


async def _stream(
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


async def _whole(stream: TokenStream, encoder: Encoder) -> bytes:
    texts: list[str] = []
    chosen: list[Chosen] = []
    n_output, finish_reason = 0, "stop"
    async for deltas in stream:
        texts += [delta.text for delta in deltas]
        chosen += [delta.chosen for delta in deltas if delta.chosen is not None]
        n_output, finish_reason = deltas[-1].n_output, deltas[-1].finish_reason or finish_reason
    return encoder.whole("".join(texts), finish_reason, stream.usage(n_output), chosen)


def _log_end(stream: TokenStream) -> None:
    request = stream.request
    usage = stream.usage(request.n_output)
    log.info(
        "request %s %s: %d prompt tokens (%d cached), %d generated, queue %s, ttft %s, e2e %s",
        request.id,
        stream.outcome,
        usage.input_tokens,
        usage.cached_tokens,
        usage.output_tokens,
        *(
            f"{t:.4f} s" if t is not None else "-"
            for t in (usage.queue_s, usage.ttft_s, usage.e2e_s)
        ),
    )
