"""An HTTP/1.1 client for the preflight and for metrics: requests over kept-alive connections,
opened by the `Dialer` of the load generator so that the preflight and the run reach the same
server.

Redirects are not followed and compressed bodies not decompressed, because the run does neither.
It is not aiohttp, whose import alone takes longer than the first request (decision 0031), nor the
load generator's client, which only records reads. Sources: RFC 9110, RFC 9112.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self, cast
from urllib.parse import quote, urlsplit

import httptools

from targets.dialer import Dialer
from targets.route import Route

_MAX_UNREAD_BYTES = 1 << 20  # of a response; reading pauses beyond that
_QUOTED_BYTES = 200
_IN_URLS = "/%:@!$&'()*+,;=~?"  # besides letters and digits

Headers = Sequence[tuple[str, str]]


class NoConnection(OSError):
    """No connection could be opened."""


class Disconnected(OSError):
    """The connection ended before the response did."""


class NotHttp(OSError):
    """The response is not HTTP/1.1; the message quotes its beginning."""


class ProbeConnection(asyncio.Protocol):
    """A connection, with at most one response at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._changed = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, bytes]] = []
        self._pieces: list[bytes] = []
        self._n_unread = 0
        self._quoted = b""
        self._has_head = self.is_complete = self._is_kept = False
        self._problem: OSError | None = None

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.is_complete:  # bytes without a request: the next response could be misread
            self.close()
            return
        self._quoted = self._quoted or data[:_QUOTED_BYTES]
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(NotHttp(f"not HTTP/1.1: {self._quoted.decode('utf-8', 'replace')!r}"))
        self._changed.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and exc is None and not self._is_framed:  # the end of such a body
            self.is_complete = True
        self._fail(Disconnected("the server disconnected" + (f" ({exc})" if exc else "")))
        self._changed.set()

    # Callbacks of httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else a trailer, or a second response
            self.headers.append((name.decode("latin-1").lower(), value))

    def on_headers_complete(self) -> None:
        if not self._has_head:
            self.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        if self.is_complete:
            return
        self._pieces.append(body)
        self._n_unread += len(body)
        if self._n_unread > _MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.is_complete:  # a second response in the same read
            self._is_kept = False
        elif 100 <= self.status < 200:  # informational: the response is still to come
            self.status, self.headers, self._has_head = 0, [], False
        else:
            self.is_complete, self._is_kept = True, self._parser.should_keep_alive()

    # The reader's side
    @property
    def version(self) -> str:
        return str(self._parser.get_http_version())

    def header(self, name: str) -> bytes:
        """The first header of this name (in lower case); empty if there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    @property
    def content_type(self) -> str:
        """The content type without parameters."""
        return self.header("content-type").decode("utf-8", "replace").partition(";")[0].strip()

    @property
    def is_reusable(self) -> bool:
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self.is_complete and self._is_kept and not self._pieces

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._begin()
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for the status and the headers. Raises Disconnected or NotHttp."""
        while not self._has_head:
            await self._more()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives, a piece per read. Raises Disconnected or NotHttp."""
        while self._pieces or not self.is_complete:
            if not self._pieces:
                await self._more()
                continue
            data, self._pieces, self._n_unread = b"".join(self._pieces), [], 0
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
            yield data

    async def read(self, limit_bytes: int) -> bytes:
        """The first `limit_bytes` of the body."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) >= limit_bytes:
                break
        return bytes(body[:limit_bytes])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def _is_framed(self) -> bool:
        return any(name in ("content-length", "transfer-encoding") for name, _ in self.headers)

    async def _more(self) -> None:
        if self._problem is not None:
            raise self._problem
        self._changed.clear()
        await self._changed.wait()

    def _fail(self, problem: OSError) -> None:
        self._problem = self._problem or problem
        self.close()


class HttpSession:
    """Requests along a route, over as many connections as there are concurrent requests; an async
    context manager that closes them, for a single event loop. `n_opened` counts the connections
    opened.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._dialer = Dialer(asyncio.get_running_loop(), route)
        self._idle: list[ProbeConnection] = []
        self.n_opened = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._dialer.close()

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Headers, body: bytes, timeout_s: float
    ) -> AsyncIterator[ProbeConnection]:
        """The connection with the response, its head complete. A connection whose body is not read
        to its end is closed at the end of the block. `timeout_s` bounds the whole block. Raises
        OSError: NoConnection, Disconnected, NotHttp or TimeoutError.
        """
        request = self._encoded(method, url, headers, body)
        async with self.exchange(request, timeout_s, may_repeat=method == "GET") as connection:
            yield connection

    @asynccontextmanager
    async def exchange(
        self, request: bytes, timeout_s: float, *, may_repeat: bool = False
    ) -> AsyncIterator[ProbeConnection]:
        """The same for the bytes of an HTTP/1.1 request. `may_repeat`: it is idempotent."""
        async with asyncio.timeout(timeout_s):
            connection = await self._send(request, may_repeat=may_repeat)
            try:
                yield connection
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()

    async def _send(self, request: bytes, *, may_repeat: bool) -> ProbeConnection:
        """Send on an idle or a new connection. If the server has just closed the idle
        connection, an idempotent request is sent again (RFC 9110 section 9.2.2)."""
        while (idle := self._take_idle()) is not None:
            try:
                return await self._exchange(idle, request)
            except Disconnected:
                if not may_repeat:
                    raise
        try:
            connection = await self._dialer.dial(ProbeConnection)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise NoConnection(f"cannot connect to {self._dialer}: {reason}") from error
        self.n_opened += 1
        return await self._exchange(connection, request)

    async def _exchange(self, connection: ProbeConnection, request: bytes) -> ProbeConnection:
        try:
            connection.send(request)
            await connection.head()
        except BaseException:
            connection.close()
            raise
        return connection

    def _take_idle(self) -> ProbeConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    def _encoded(self, method: str, url: str, headers: Headers, body: bytes) -> bytes:
        """The bytes of a request; for a forwarding proxy it holds the whole URL (RFC 9112 section
        3.2.2)."""
        parts = urlsplit(url)
        target = quote(f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", _IN_URLS)
        if self._route.proxy is not None and not self._route.is_tunnelled:
            target = f"{parts.scheme}://{parts.netloc}{target}"
        fields = {"host": parts.netloc, "accept": "*/*", "accept-encoding": "identity"}
        for name, _ in headers:
            fields.pop(name.lower(), None)
        if body or method == "POST":
            fields["content-length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*fields.items(), *headers))
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body
