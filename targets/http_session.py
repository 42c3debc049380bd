"""HTTP/1.1 for probes: requests over kept-alive connections that the load generator's own `Dialer`
opens, so that what answers the preflight is what the run will meet.

Redirects are not followed, and what a server compresses unasked is not unpacked: the run does
neither. Sources: RFC 9110, RFC 9112.
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

_ENOUGH_BYTES = 1 << 20  # unread of one answer; the server waits then
_QUOTED_BYTES = 200
_IN_URLS = "/%:@!$&'()*+,;=~?"  # besides letters and digits

Headers = Sequence[tuple[str, str]]


class NoConnection(OSError):
    """None could be opened."""


class Disconnected(OSError):
    """The connection ended before the answer did."""


class NotHttp(OSError):
    """What came is no HTTP/1.1; quotes its beginning."""


class ProbeConnection(asyncio.Protocol):
    """One connection, at most one answer at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
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
        if self.is_complete:  # bytes nobody asked for: this connection cannot be trusted
            self.close()
            return
        self._quoted = self._quoted or data[:_QUOTED_BYTES]
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            said = self._quoted.decode("utf-8", "replace")
            self._fail(NotHttp(f"not HTTP/1.1: {said!r}"))
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and exc is None and not self._is_framed:  # such a body ends so
            self.is_complete = True
        self._fail(Disconnected("the server disconnected" + (f" ({exc})" if exc else "")))
        self._wake()

    # httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else a trailer, or not ours
            self.headers.append((name.decode("latin-1").lower(), value))

    def on_headers_complete(self) -> None:
        if not self._has_head:
            self.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        if self.is_complete:
            return
        self._pieces.append(body)
        self._n_unread += len(body)
        if self._n_unread > _ENOUGH_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.is_complete:  # a second answer in one read
            self._is_kept = False
            return
        if 100 <= self.status < 200:  # informational: the answer is still to come
            self.status, self.headers, self._has_head = 0, [], False
            return
        self.is_complete, self._is_kept = True, self._parser.should_keep_alive()

    # ours
    @property
    def version(self) -> str:
        return str(self._parser.get_http_version())

    def header(self, name: str) -> bytes:
        """The first of that name (in lower case), empty where there is none."""
        return next((value for known, value in self.headers if known == name), b"")

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.header("content-type").decode("utf-8", "replace").partition(";")[0].strip()

    @property
    def is_reusable(self) -> bool:
        transport = self._transport
        is_open = transport is not None and not transport.is_closing()
        return is_open and self.is_complete and self._is_kept and not self._pieces

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._begin()
        self._transport.write(request)

    async def head(self) -> None:
        """Returns once status and headers are known. Raises Disconnected or NotHttp."""
        while not self._has_head:
            await self._more()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, a piece per read. Raises Disconnected or NotHttp."""
        while self._pieces or not self.is_complete:
            if not self._pieces:
                await self._more()
                continue
            data, self._pieces, self._n_unread = b"".join(self._pieces), [], 0
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
            yield data

    async def read(self, limit_bytes: int) -> bytes:
        """The body up to `limit_bytes`, in however many pieces it comes."""
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
        self._waiting = self._loop.create_future()
        await self._waiting

    def _fail(self, problem: OSError) -> None:
        self._problem = self._problem or problem
        self.close()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class HttpSession:
    """Requests along one route; `n_opened` connections so far, as many as there were requests at
    once. An async context manager that closes them; one event loop."""

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
        """The answer, its head read; what is unread of its body at the end of the block goes with
        its connection. `timeout_s` bounds all of it. Raises OSError, of which NoConnection,
        Disconnected, NotHttp and TimeoutError are kinds."""
        request = self._encoded(method, url, headers, body)
        async with asyncio.timeout(timeout_s):
            connection = await self._answering(request, may_repeat=method == "GET")
            try:
                yield connection
            finally:
                self._put_back(connection)

    async def _answering(self, request: bytes, *, may_repeat: bool) -> ProbeConnection:
        """The connection on which an answer has begun. On a kept one that the server has just
        closed, what changes nothing there is asked once more (RFC 9110 section 9.2.2)."""
        while (kept := self._take()) is not None:
            try:
                return await self._begun(kept, request)
            except Disconnected:
                if not may_repeat:
                    raise
        try:
            connection = await self._dialer.dial(ProbeConnection)
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise NoConnection(f"cannot connect to {self._dialer}: {why}") from error
        self.n_opened += 1
        return await self._begun(connection, request)

    async def _begun(self, connection: ProbeConnection, request: bytes) -> ProbeConnection:
        try:
            connection.send(request)
            await connection.head()
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self) -> ProbeConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    def _put_back(self, connection: ProbeConnection) -> None:
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def _encoded(self, method: str, url: str, headers: Headers, body: bytes) -> bytes:
        """A proxy that forwards requests is told the whole URL (RFC 9112 section 3.2.2)."""
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
