"""Plain transport (`--transport aiohttp`): the same requests over aiohttp, a task for each.

It shares no code with `client` but the request bytes and the recorded fields, so it can confirm or
refute a doubtful run; tests hold the two against each other. Its latencies are larger: it uses more
CPU per event, stamps a read when the task runs, and opens no connections in advance.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from loadgen.archive.exchange import Exchange
from loadgen.drive.transport import (
    BYTES_BEHIND,
    DONE_S,
    HELD_OPEN,
    MAX_BODY_BYTES,
    Connections,
    OnEnd,
    connect_reason,
)
from loadgen.records import Status
from loadgen.system.timer import Alarm, NoAlarm
from targets.dialer import tls_context
from targets.rotation import Lookup, Rotation, format_address
from targets.route import Route

_IDLE_S = 3600.0  # idle connections stay open until the server closes them or the run ends
# Headers that aiohttp must not add: the payload states its own.
_FAILED = 400  # and above: HTTP statuses of failed answers
_NO_AUTO_HEADERS = ("user-agent", "accept", "accept-encoding", "content-type")


class AiohttpClient:
    """A `Transport`. All requests share an aiohttp session; with `per_session` each session of the
    schedule has its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        route: Route,
        *,
        looks_like_token: Callable[[bytes], bool],
        connections: Connections = "reuse",
        lookup: Lookup | None = None,
        first: int = 0,
    ) -> None:
        self._loop, self._route, self._mode = loop, route, connections
        scheme = "https" if route.is_tls else "http"
        self._origin = f"{scheme}://{format_address((route.host, route.port))}"
        self.on_end: OnEnd = lambda exchange: None
        self.alarm: Alarm = NoAlarm()  # never rung here: the loop runs overdue alarms itself
        self._looks_like_token = looks_like_token
        self._resolver = _Resolver(Rotation(*route.peer, lookup, first))
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._n_running: dict[int, int] = {}  # session: its requests in flight
        self._last_sent: set[int] = set()  # sessions whose last request is sent
        self._running: dict[int, tuple[Exchange, asyncio.Task[None]]] = {}
        self.n_opened = 0
        self.n_reused = 0

    @property
    def addresses(self) -> list[str]:
        return self._resolver.rotation.addresses

    async def open(self, n: int) -> int:
        return 0

    def send(self, row: int, payload: bytes, session: int = 0, is_last: bool = True) -> None:
        exchange = Exchange(row, sent_ns=monotonic_ns())
        task = self._loop.create_task(self._run(exchange, payload, session, is_last))
        self._running[row] = (exchange, task)

    def sent_ns(self, row: int) -> int:
        return self._running[row][0].sent_ns

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        if row not in self._running:
            return
        exchange, task = self._running.pop(row)
        task.cancel()  # closes the connection, too: its response was not read to the end
        is_connecting = not (exchange.connected_ns or exchange.reused)
        suffix = " (while connecting)" if is_connecting else ""
        exchange.end(outcome, reason + suffix, monotonic_ns())
        self.on_end(exchange)

    def in_flight(self, most: int) -> tuple[int, Sequence[int]]:
        return len(self._running), ()  # aiohttp does not expose its sockets

    def has_read_since(self, at_ns: int) -> bool:
        return any(exchange.read_ns > at_ns for exchange, _ in self._running.values())

    async def close(self) -> None:
        running = [task for _, task in self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()
        self._resolver.rotation.close()

    async def _run(self, exchange: Exchange, payload: bytes, session: int, is_last: bool) -> None:
        key = session + 1 if self._mode == "per_session" else 0
        self._n_running[key] = self._n_running.get(key, 0) + 1
        if key and is_last:
            self._last_sent.add(key)
        try:
            await self._exchange(exchange, payload, self._session(key))
        except (aiohttp.ClientError, OSError, _Broken) as error:
            status, reason = failure(exchange, error, self._route)
            end = exchange.fail if reason == BYTES_BEHIND else exchange.end
            end(status, reason, monotonic_ns())
        finally:
            self._n_running[key] -= 1
        exchange.done_ns = exchange.done_ns or monotonic_ns()
        if key in self._last_sent and not self._n_running[key]:
            self._last_sent.discard(key)
            await self._sessions.pop(key).close()
        del self._running[exchange.row]
        self.on_end(exchange)

    async def _exchange(
        self, exchange: Exchange, payload: bytes, session: aiohttp.ClientSession
    ) -> None:
        method, target, headers, body = parse_request(payload)
        async with session.request(
            method,
            URL(target if "://" in target else self._origin + target, encoded=True),
            headers=headers,
            data=body,
            skip_auto_headers=_NO_AUTO_HEADERS,
            allow_redirects=False,
            trace_request_ctx=exchange,
            **_proxy_options(self._route),
        ) as response:
            if response.status == 101:
                raise _Broken("the server switched protocols")
            exchange.headers_ns = monotonic_ns()
            exchange.http_status = response.status
            exchange.content_type = response.headers.get("content-type", "")
            exchange.content_encoding = response.headers.get("content-encoding", "").strip().lower()
            for name, value in response.raw_headers if response.status >= _FAILED else ():
                exchange.add_limit(name.lower(), value)
            if isinstance(response, _Response):
                exchange.remote = response.remote
            await self._read(exchange, response)

    async def _read(self, exchange: Exchange, response: aiohttp.ClientResponse) -> None:
        while data := await self._next(exchange, response):
            now_ns = monotonic_ns()
            exchange.times.append(now_ns)
            exchange.parts.append(data)
            exchange.n_bytes += len(data)
            if not exchange.first_guess_ns and self._looks_like_token(data):
                exchange.first_guess_ns = now_ns
            if exchange.n_bytes > MAX_BODY_BYTES:
                raise _Broken(f"response body over {MAX_BODY_BYTES >> 20} MiB")
        if isinstance(response, _Response) and response.is_followed():
            raise _Broken(BYTES_BEHIND)

    async def _next(self, exchange: Exchange, response: aiohttp.ClientResponse) -> bytes:
        """The bytes of the next read, b"" at the end of the body."""
        wait_s = DONE_S if exchange.parts and exchange.is_done() else None
        try:
            async with asyncio.timeout(wait_s):
                return await response.content.readany()
        except TimeoutError:
            raise _Broken(HELD_OPEN) from None

    def _session(self, key: int) -> aiohttp.ClientSession:
        if key not in self._sessions:
            self._sessions[key] = aiohttp.ClientSession(
                connector=self._connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(),  # none: the dispatcher's deadlines hold
                auto_decompress=False,
                response_class=_Response,
                trace_configs=[self._trace()],
            )
        return self._sessions[key]

    def _connector(self) -> aiohttp.BaseConnector:
        options: dict[str, Any] = {"limit": 0}
        if self._mode == "never":
            options["force_close"] = True
        else:
            options["keepalive_timeout"] = _IDLE_S
        route = self._route
        if route.unix_path:
            return aiohttp.UnixConnector(route.unix_path, **options)
        tls = tls_context(route.ca_cert) if route.is_tls else True
        return aiohttp.TCPConnector(
            ssl=tls, resolver=self._resolver, use_dns_cache=False, **options
        )

    def _trace(self) -> aiohttp.TraceConfig:
        """Hooks that write connect times and connection reuse into the exchange."""

        async def reused(session: Any, context: SimpleNamespace, params: Any) -> None:
            exchange: Exchange = context.trace_request_ctx
            exchange.reused, exchange.sent_ns = True, monotonic_ns()
            self.n_reused += 1

        async def opened(session: Any, context: SimpleNamespace, params: Any) -> None:
            context.trace_request_ctx.connected_ns = monotonic_ns()
            self.n_opened += 1

        config = aiohttp.TraceConfig()
        config.on_connection_reuseconn.append(reused)
        config.on_connection_create_end.append(opened)
        return config


class _Response(aiohttp.ClientResponse):
    """A response that keeps the peer's address: aiohttp drops the connection when it has the whole
    body, which may be before the head is returned."""

    remote = ""
    _protocol: Any = None

    def is_followed(self) -> bool:
        """Whether bytes followed the response in the same read: aiohttp has parsed them as another
        response, in its private queue, or failed to."""
        error = None if self._protocol is None else self._protocol.exception()
        return bool(getattr(self._protocol, "_buffer", ())) or isinstance(
            error, aiohttp.http_exceptions.HttpProcessingError
        )

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        self._protocol = connection.protocol
        if connection.transport is not None:
            self.remote = format_address(connection.transport.get_extra_info("peername"))
        return await super().start(connection)


class _Resolver(AbstractResolver):
    """Resolves names for aiohttp with the `Rotation` that both transports use."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(info[4][0]),
                port=port,
                family=info[0],
                proto=info[2],
                flags=socket.AI_NUMERICHOST,
            )
            for info in await self.rotation.order()
        ]

    async def close(self) -> None:
        """Leaves the rotation open, which all sessions share."""


class _Broken(Exception):
    """A response that cannot be used; recorded as the request's outcome."""


def failure(exchange: Exchange, error: Exception, route: Route) -> tuple[Status, str]:
    """Status and error text of a request that raised, worded as in `client`."""
    if isinstance(error, aiohttp.ClientHttpProxyError):
        assert route.proxy is not None, "a proxy responded on a route without a proxy"
        refusal = f"proxy {route.proxy.url} answered {error.status} {error.message} to CONNECT"
        return Status.connect_error, f"connect to {route}: {refusal}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return Status.connect_error, connect_reason(route, error.os_error)
    if isinstance(error, aiohttp.ClientResponseError):
        return Status.stream_error, f"not HTTP/1.1: {' '.join(error.message.split())}"
    if isinstance(error, _Broken):
        return Status.stream_error, str(error)
    if exchange.headers_ns:
        reason = "connection closed in the middle of the response"
    elif exchange.reused:
        reason = "the server closed a kept-alive connection instead of responding"
    else:
        reason = "connection closed without a response"
    return Status.stream_error, f"{reason} ({error})"


def _proxy_options(route: Route) -> dict[str, Any]:
    """Keywords for `session.request`. A forwarding proxy gets its credentials with each request
    (`Route.forwarding_headers`), a tunnelling proxy with CONNECT."""
    if route.proxy is None:
        return {}
    options: dict[str, Any] = {"proxy": route.proxy.url}
    if route.is_tunnelled and route.proxy.authorization:
        options["proxy_headers"] = {"proxy-authorization": route.proxy.authorization}
    return options


def parse_request(payload: bytes) -> tuple[str, str, list[tuple[str, str]], bytes]:
    """(method, request target, header fields, body) of a request written by `payloads.HttpHead`."""
    head, _, body = payload.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    fields = (line.partition(": ") for line in lines)
    return method, target, [(name, value) for name, _, value in fields], body
