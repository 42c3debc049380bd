"""The OpenAI-shaped HTTP server: bodies to the service, streams back as server-sent events."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from aiohttp import ClientConnectionResetError, web

from loadgen.errors import nearest
from reference_engine.core import EngineState
from reference_engine.explain import Account
from reference_engine.service import Service, StreamBroken, TokenStream
from reference_engine.wire import (
    Call,
    Encoder,
    WireError,
    error_body,
    error_event,
    parse_chat,
    parse_completion,
)

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_JSON = "application/json"
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not gather tokens
}
_LONGEST_REQUEST_ID = 128


@dataclass(frozen=True, slots=True)
class About:
    """What the server says about itself."""

    model: str
    max_model_len: int
    version: str
    started_utc: int = field(default_factory=lambda: int(time.time()), kw_only=True)
    mode: str
    device: str


class Api:
    """The routes. `api_key`, when set, is asked of everything under `/v1`."""

    def __init__(
        self,
        service: Service,
        about: About,
        api_key: str | None = None,
        max_body_bytes: int = 16 << 20,
    ) -> None:
        self._service, self._about, self._api_key = service, about, api_key
        self._max_body_bytes = max_body_bytes
        self._n_answers = 0

    def app(self) -> web.Application:
        """An application; run it with `handler_cancellation=True`, or a client that hangs up
        keeps its request running."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guard])
        app.on_response_prepare.append(_echo_request_id)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat_completions),
                web.post("/v1/completions", self.completions),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/debug/engine", self.debug_engine),
                web.get("/debug/requests/{id}", self.debug_request),
            ]
        )
        return app

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_completion)

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._about.model,
            "object": "model",
            "created": self._about.started_utc,
            "owned_by": "slobench",
            "max_model_len": self._about.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        failure = self._service.failure
        if failure is not None:
            return web.json_response({"status": "failed", "reason": failure}, status=500)
        if self._service.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._about.version})

    async def debug_engine(self, request: web.Request) -> web.Response:
        """Sizes and totals of this moment, taken between two steps."""
        sizes = await self._service.ask(_sizes)
        about = {"mode": self._about.mode, "device": self._about.device}
        return web.json_response({**about, **sizes, "slow_readers": self._service.n_slow_readers})

    async def debug_request(self, request: web.Request) -> web.Response:
        """Where the waiting time of a live or recent request went."""
        request_id = request.match_info["id"]
        entry = await self._service.ask(lambda state: state.explain(request_id))
        if entry is None:
            raise WireError(
                f"no request '{request_id}' is live or among the recent ones",
                status=404,
                code="request_not_found",
            )
        return web.json_response(_account_json(entry))

    async def _complete(
        self, request: web.Request, parse: Callable[[bytes], Call]
    ) -> web.StreamResponse:
        arrived_s = self._service.clock.now_s()
        call = parse(await request.read())
        self._check_model(call)
        stream = self._service.submit(call, _request_id(request), arrived_s)
        encoder = Encoder(call, self._answer_id(call), self._about.model, int(time.time()))
        try:
            if call.stream:
                return await _stream(request, call, stream, encoder)
            return web.Response(body=await _whole(stream, encoder), content_type=_JSON)
        finally:
            stream.close()
            _log_end(stream)

    def _check_model(self, call: Call) -> None:
        if call.model is not None and call.model != self._about.model:
            raise WireError(
                f"the model '{call.model}' is not served here; "
                f"{nearest(call.model, [self._about.model])}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _answer_id(self, call: Call) -> str:
        self._n_answers += 1
        return f"{'chatcmpl' if call.is_chat else 'cmpl'}-{self._n_answers}"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for the key, and give every error the OpenAI shape."""
        try:
            self._check_key(request)
            return await handler(request)
        except WireError as error:
            return _refusal(error)
        except StreamBroken as error:
            return _refusal(WireError(str(error), status=500, type_="server_error"))
        except web.HTTPRequestEntityTooLarge:
            limit = f"the body is larger than {self._max_body_bytes} bytes"
            return _refusal(WireError(limit, status=413, code="body_too_large"))
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}"
            return _refusal(WireError(what, status=error.status))

    def _check_key(self, request: web.Request) -> None:
        if self._api_key is None or not request.path.startswith("/v1/"):
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
            raise WireError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer …'",
                status=401,
                code="invalid_api_key",
            )


async def _stream(
    request: web.Request, call: Call, stream: TokenStream, encoder: Encoder
) -> web.StreamResponse:
    """Answer with events. What goes wrong after the status line is told in band, or to nobody if
    the client is gone."""
    response = web.StreamResponse(headers=_SSE_HEADERS)
    if request.transport is not None:
        stream.on_cut_off = request.transport.abort
    try:
        await response.prepare(request)
        await _write_events(response, call, stream, encoder)
    except StreamBroken as error:
        broken = WireError(str(error), status=500, type_="server_error")
        with suppress(ClientConnectionResetError):
            await response.write(error_event(broken))
    except ClientConnectionResetError:
        log.debug("request %s: the client hung up", stream.request.id)
    return response


async def _write_events(
    response: web.StreamResponse, call: Call, stream: TokenStream, encoder: Encoder
) -> None:
    """Tokens that are already there go out in one write, each as an event of its own."""
    out, n_output = encoder.role(), 0
    async for deltas in stream:
        for delta in deltas:
            n_output = delta.n_output
            if delta.text or delta.finish_reason:
                usage = stream.usage(n_output) if call.continuous_usage else None
                out += encoder.text(delta.text, delta.finish_reason, usage)
        if stream.is_over:
            out += encoder.end(stream.usage(n_output) if call.include_usage else None)
        if out:
            await response.write(out)
            out = b""
    await response.write_eof()


async def _whole(stream: TokenStream, encoder: Encoder) -> bytes:
    texts: list[str] = []
    n_output, finish_reason = 0, "stop"
    async for deltas in stream:
        texts += [delta.text for delta in deltas]
        n_output, finish_reason = deltas[-1].n_output, deltas[-1].finish_reason or finish_reason
    return encoder.whole("".join(texts), finish_reason, stream.usage(n_output))


def _refusal(error: WireError) -> web.Response:
    return web.Response(body=error_body(error), status=error.status, content_type=_JSON)


def _request_id(request: web.Request) -> str | None:
    """The client's id, if it is one that can stand in a header and a log line."""
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= _LONGEST_REQUEST_ID and given.isprintable() else None


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    request_id = _request_id(request)
    if request_id is not None:
        response.headers["x-request-id"] = request_id


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


def _sizes(state: EngineState) -> dict[str, int]:
    return {
        "running": len(state.roster.running),
        "waiting": len(state.roster.waiting),
        "kv_blocks": state.kv.n_blocks,
        "kv_blocks_free": state.kv.n_free,
        **asdict(state.counters),
    }


def _account_json(entry: Account) -> dict[str, object]:
    waits = [
        {"why": cause.why.name, "blocker": cause.blocker or None, "seconds": seconds}
        for cause, seconds in entry.waits
    ]
    return {**asdict(entry), "waits": waits, "sentence": entry.sentence()}
