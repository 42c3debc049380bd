"""`/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`, whole or streamed.

A task per streamed choice writes through aiohttp whatever is rare: the head, the first token, the
end, errors, and tokens that a slow reader has to wait for. Every other token goes from the wake-up
of its step straight to the socket (`ChunkWriter`), without waking a task or awaiting anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from aiohttp import ClientConnectionResetError, web

from loadgen.system.clock import Clock
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamDelta, TokenStream
from reference_engine.serving.wire.call import Call, parse_chat, parse_completion
from reference_engine.serving.wire.named_calls import parse_message, parse_response
from reference_engine.serving.wire.named_events import MessageEncoder, ResponseEncoder
from reference_engine.serving.wire.response import (
    AnswerEncoder,
    Encoder,
    TokenUsage,
    WholeChoice,
    WriteText,
    total_usage,
)
from reference_engine.serving.wire.wire_errors import WireError

log = logging.getLogger(__name__)

_LONGEST_REQUEST_ID = 128
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # keeps proxies from collecting tokens
}
_MOST_BUFFERED_BYTES = 1 << 14


class AnswerSource(Protocol):
    """Accepts calls and returns their answers: a `Service`, or the link to a service in another
    process."""

    @property
    def clock(self) -> Clock: ...

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream: ...


class Form(NamedTuple):
    """The form of an API: the parser of a body (with the tenant's header), the prefix of the
    answer's id, and the encoders of the choices of an answer (call, id, model, Unix time, number
    of choices)."""

    parse: Callable[[bytes, str | None], Call]
    prefix: str
    encoders: Callable[[Call, str, str, int, int], Sequence[AnswerEncoder]]


def _by_index(call: Call, name: str, model: str, created: int, n: int) -> Sequence[AnswerEncoder]:
    return [Encoder(call, name, model, created, i) for i in range(n)]


def _message(call: Call, name: str, model: str, created: int, n: int) -> Sequence[AnswerEncoder]:
    return [MessageEncoder(call, name, model, created)]


def _response(call: Call, name: str, model: str, created: int, n: int) -> Sequence[AnswerEncoder]:
    return [ResponseEncoder(call, name, model, created)]


FORMS = {
    "/v1/chat/completions": Form(parse_chat, "chatcmpl", _by_index),
    "/v1/completions": Form(parse_completion, "cmpl", _by_index),
    "/v1/messages": Form(parse_message, "msg", _message),
    "/v1/responses": Form(parse_response, "resp", _response),
}
"""Route → form."""


class CompletionRoutes:
    """The routes. An answer's `id` is the prefix of its form and the engine's request id, which the
    header `x-engine-request-id` holds alone. Each choice is a request of the engine; the id is that
    of the first, and the choices after it add their index to the client's id."""

    def __init__(self, source: AnswerSource, identity: ServerIdentity) -> None:
        self._source, self._identity = source, identity

    def routes(self) -> list[web.RouteDef]:
        return [web.post(path, partial(self._complete, form)) for path, form in FORMS.items()]

    async def _complete(self, form: Form, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        # A request arrives with its last byte, so time spent sending it is not time in the queue.
        arrived_s = self._source.clock.now_s()
        call = form.parse(body, request.headers.get("x-tenant"))
        self._identity.check_model(call.model)
        client_id = request_id(request)
        streams: list[TokenStream] = []
        try:
            for i, choice in enumerate(call.choices()):
                name = f"{client_id}-{i}" if client_id and i else client_id
                streams.append(self._source.submit(choice, name, arrived_s))
            for stream in streams:
                await stream.admitted()
            engine_id = streams[0].request.id  # known once the engine has admitted the request
            answer_id = f"{form.prefix}-{engine_id}"
            model, created = self._identity.model, int(time.time())
            encoders = form.encoders(call, answer_id, model, created, len(streams))
            headers = {
                "x-request-id": engine_id,  # unless the client sent one
                "x-engine-request-id": engine_id,
                **_forecast_headers(streams[0]),
            }
            if call.stream:
                choices = [Choice(*pair) for pair in zip(streams, encoders, strict=True)]
                return await stream_answer(request, call, choices, headers)
            wholes = [await _whole(stream) for stream in streams]
            usages = [usage for _, usage in wholes]
            body = encoders[0].whole([choice for choice, _ in wholes], total_usage(usages, call.n))
            return web.Response(body=body, content_type="application/json", headers=headers)
        finally:
            for stream in streams:
                stream.close()


def request_id(request: web.Request) -> str | None:
    """The client's `x-request-id`, if it is fit for a header and a log line."""
    client_id = request.headers.get("x-request-id", "")
    is_fit = 0 < len(client_id) <= _LONGEST_REQUEST_ID and client_id.isprintable()
    return client_id if is_fit else None


def _forecast_headers(stream: TokenStream) -> dict[str, str]:
    """The forecast made at arrival, for the client to compare with the actual start."""
    forecast = stream.request.forecast
    if forecast is None:
        return {}
    headers = {"x-tokens-ahead": str(forecast.tokens_ahead)}
    if forecast.start_s is not None:
        wait_s = max(0.0, forecast.start_s - stream.request.arrived_s)
        headers["x-predicted-start-ms"] = f"{wait_s * 1e3:.3f}"
    return headers


async def _whole(stream: TokenStream) -> tuple[WholeChoice, TokenUsage]:
    """A choice of an answer that is not streamed."""
    collected: list[StreamDelta] = []

    def collect(delta: StreamDelta) -> bool:
        if delta.finish_reason is not None:
            return False  # wakes this task
        collected.append(delta)
        return True

    async for deltas in stream:
        collected += deltas
        stream.forward_to(collect)
    last = collected[-1]
    choice = WholeChoice(
        "".join([delta.text for delta in collected]),
        last.finish_reason or "stop",
        [delta.chosen for delta in collected if delta.chosen is not None],
    )
    return choice, stream.usage(last.n_output)


class ChunkWriter:
    """Writes events with plain text to the transport of a response, each as a chunk of its body
    (RFC 9112 §7.1), while the client keeps up."""

    def __init__(self, transport: asyncio.WriteTransport, write_text: WriteText) -> None:
        self._transport, self._write_text = transport, write_text

    def accept(self, delta: StreamDelta) -> bool:
        """Write the delta. Returns False, without writing, if it is more than plain text, if the
        client is gone, or if it reads too slowly: the task then handles the delta."""
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
            event = self._write_text(text, n_output)
            transport.write(b"".join((b"%x\r\n" % len(event), event, b"\r\n")))
        return True


class Choice:
    """A choice of a streamed answer; `n_output` counts its tokens so far."""

    def __init__(self, stream: TokenStream, encoder: AnswerEncoder) -> None:
        self.stream, self.encoder = stream, encoder
        self.n_output = 0

    @property
    def usage(self) -> TokenUsage:
        return self.stream.usage(self.n_output)


async def stream_answer(
    request: web.Request, call: Call, choices: Sequence[Choice], headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send the answer as server-sent events. Errors after the status line become an event, unless
    the client is gone."""
    response = web.StreamResponse(headers={**_SSE_HEADERS, **headers})
    transport = request.transport
    if transport is not None:
        for choice in choices:
            choice.stream.on_cut_off = transport.abort
    names = ", ".join(choice.stream.request.id for choice in choices)
    try:
        await response.prepare(request)
        # Bodies of HTTP/1.0 have no chunks; its tokens all go through the task.
        is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        writer = StreamWriter(response, call, choices, transport if is_chunked else None)
        await writer.write()
    except WireError as error:
        await _send_error(response, choices[0].encoder, str(error))
    except ClientConnectionResetError:
        log.debug("request %s: the client disconnected", names)
    except Exception:  # the request's boundary: a bug of the server, logged
        log.exception("request %s failed", names)
        await _send_error(response, choices[0].encoder, "internal error")
    return response


async def _send_error(response: web.StreamResponse, encoder: AnswerEncoder, message: str) -> None:
    with suppress(ClientConnectionResetError):
        await response.write(encoder.error(WireError(message, status=500)))


class StreamWriter:
    """Writes the events of all choices to a response, in the order in which they come."""

    def __init__(
        self,
        response: web.StreamResponse,
        call: Call,
        choices: Sequence[Choice],
        transport: asyncio.WriteTransport | None,
    ) -> None:
        self._response, self._call, self._choices = response, call, choices
        self._transport = transport
        self._n_open = len(choices)

    async def write(self) -> None:
        """Write the whole body. Raises the error of the first choice that fails; the others are
        then left unread."""
        if len(self._choices) == 1:
            await self._write_choice(self._choices[0])
        else:
            tasks = [asyncio.create_task(self._write_choice(choice)) for choice in self._choices]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await self._response.write_eof()

    async def _write_choice(self, choice: Choice) -> None:
        """Write each delta as an event, all deltas fetched together in a single write. Later deltas
        go straight to the transport, if there is one."""
        stream, encoder, call = choice.stream, choice.encoder, self._call
        events: list[bytes] = []
        write_text: WriteText | None = None
        async for deltas in stream:
            if write_text is None:  # the number of cached tokens is final once there is a token
                request = stream.request
                n_prompt, n_cached = request.n_prompt, request.n_cached
                events.append(encoder.opening(n_prompt, n_cached))
                write_text = encoder.text_writer(n_prompt, n_cached, call.continuous_usage)
            for text, n_output, finish_reason, chosen in deltas:
                choice.n_output = n_output
                if text and finish_reason is None and chosen is None:
                    events.append(write_text(text, n_output))
                elif text or finish_reason or chosen:
                    usage = choice.usage if call.continuous_usage else None
                    events.append(encoder.event(text, finish_reason, usage, chosen))
            if stream.is_over:
                events.append(self._end(encoder))
            data = b"".join(events)
            if data:  # an empty chunk would end the body
                stream.is_blocked = True
                await self._response.write(data)
                stream.is_blocked = False
                # Only after a write through aiohttp, which sends the head of the response first.
                if self._transport is not None:
                    stream.forward_to(ChunkWriter(self._transport, write_text).accept)
            events = []

    def _end(self, encoder: AnswerEncoder) -> bytes:
        """The end of the stream after the last choice, nothing after the others."""
        self._n_open -= 1
        if self._n_open:
            return b""
        if not self._call.include_usage:
            return encoder.end(None)
        usages = [choice.usage for choice in self._choices]
        return encoder.end(total_usage(usages, self._call.n))
