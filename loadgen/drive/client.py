"""The one socket file: streaming HTTP/1.1 POSTs over kept-alive connections.

A read is stamped before anything else looks at it, and kept as it came. llhttp (through httptools)
reads heads and tells where a response ends, and is asked for nothing else. No task, no future and
no JSON per token: framing (`body`) and events (`decode`) are read after the request, away from the
measured moments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import cast

import httptools

from loadgen.drive.connect_errors import connect_reason
from loadgen.drive.exchange import Exchange
from loadgen.drive.pool import Pool
from loadgen.drive.transport import MAX_BODY_BYTES, Connections, OnEnd
from loadgen.records import Status
from loadgen.timer import Alarm, NoAlarm
from targets.dialer import Dialer
from targets.rotation import format_address

_HEAD_END = b"\r\n\r\n"
_CONNECT_AT_ONCE = 64  # ahead of a run: half of the shortest queue in which servers let us wait


class Connection(asyncio.Protocol):
    """One TCP connection, at most one exchange at a time."""

    def __init__(self, pool: Client) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._answered: tuple[Exchange, bool] | None = None  # and whether the connection is kept
        self._read_ns = 0
        self._body_until_eof = True
        self._head_tail = b""  # its last bytes so far: what ends it may be cut
        self.remote = ""
        self.key = 0

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        # With room for any, uvloop would write at the end of its turn: after every socket that is
        # readable by then was read, and that long after `sent_ns`.
        self._transport.set_write_buffer_limits(high=0)
        self.remote = format_address(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        self._read_ns = now_ns = monotonic_ns()
        exchange = self._exchange
        if exchange is None:  # bytes nobody asked for: this connection cannot be trusted
            self.abort()
            return
        try:
            if not exchange.headers_ns:
                self._read_head(exchange, data)
            else:  # nearly every read: inline, for a call is a tenth of what is done here
                exchange.times.append(now_ns)
                exchange.parts.append(data)
                exchange.n_bytes += len(data)
                if not exchange.first_guess_ns and self._pool.looks_like_token(data):
                    exchange.first_guess_ns = now_ns
                self._parser.feed_data(data)
                if exchange.n_bytes > MAX_BODY_BYTES and self._exchange is exchange:
                    self._end(Status.stream_error, f"response body over {MAX_BODY_BYTES >> 20} MiB")
        except httptools.HttpParserUpgrade:
            self._end(Status.stream_error, "the server switched protocols")
        except httptools.HttpParserError as error:
            self._end(Status.stream_error, f"not HTTP/1.1: {error or type(error).__name__}")
        if self._answered is not None:
            (exchange, keep), self._answered = self._answered, None
            self._finish(exchange, now_ns, keep=keep and self.is_usable())
        if now_ns >= self._pool.alarm.due_ns:
            self._pool.ring()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange = self._exchange
        if exchange is None:
            return
        now_ns = monotonic_ns()
        if exc is None and exchange.headers_ns and self._body_until_eof:
            self._finish(exchange, now_ns)
            return
        how = f" ({exc})" if exc else ""
        if exchange.headers_ns:
            what = f"connection closed in the middle of the response{how}"
        elif exchange.reused:
            what = f"the server closed a kept-alive connection instead of answering{how}"
        else:
            what = f"connection closed without an answer{how}"
        self._end(Status.stream_error, what)

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        """Up to the end of the head, which may have come in pieces; what is behind it is body."""
        while data and not exchange.headers_ns:
            joined = self._head_tail + data
            found = joined.find(_HEAD_END)
            n_head = len(data) if found < 0 else found + len(_HEAD_END) - len(self._head_tail)
            self._head_tail = joined[1 - len(_HEAD_END) :]
            self._parser.feed_data(data[:n_head])
            data = data[n_head:]
        if not data:
            return
        if self._exchange is exchange:
            exchange.times.append(self._read_ns)
            exchange.parts.append(data)
            exchange.n_bytes += len(data)
            if self._pool.looks_like_token(data):
                exchange.first_guess_ns = self._read_ns
        self._parser.feed_data(data)

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.headers_ns:  # a trailer: RFC 9110 section 6.5.1 forbids it to change framing
            return
        key = name.lower()
        if key == b"content-type":
            exchange.content_type = value.decode("latin-1")
        elif key == b"content-encoding":
            exchange.content_encoding = value.decode("latin-1").strip().lower()
        elif key == b"content-length":
            self._body_until_eof, exchange.length = False, int(value)
        elif key == b"transfer-encoding":
            self._body_until_eof, exchange.is_chunked = False, True

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.http_status = self._parser.get_status_code()
        exchange.headers_ns = self._read_ns

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if 100 <= exchange.http_status < 200:  # informational: the answer is still to come
            exchange.http_status = exchange.headers_ns = 0
            self._expect_head()
            return
        # Told once the read is parsed: the parser would swallow an error of whoever is told, and
        # what else the read holds must not become part of the next exchange.
        self._answered, self._exchange = (exchange, self._parser.should_keep_alive()), None

    # ours
    def start(self, exchange: Exchange, payload: bytes) -> None:
        """Send one request; its end is reported to the pool."""
        assert self._transport is not None
        assert self._exchange is None, f"connection busy with request {self._exchange}"
        self._exchange = exchange
        self._expect_head()
        exchange.remote = self.remote
        if not exchange.sent_ns:
            exchange.sent_ns = monotonic_ns()
        self._transport.write(payload)

    def fail(self, outcome: Status, reason: str) -> None:
        """Give up the exchange in flight (timeout, cancel) and the connection with it."""
        self._end(outcome, reason)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def exchange(self) -> Exchange | None:
        """The one in flight."""
        return self._exchange

    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def descriptor(self) -> int:
        """Of its socket; -1 once that is closed."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def _expect_head(self) -> None:
        self._body_until_eof, self._head_tail = True, b""

    def _finish(self, exchange: Exchange, now_ns: int, *, keep: bool = False) -> None:
        self._exchange = None
        exchange.done_ns = now_ns
        if not keep:
            self.abort()
        self._pool.ended(self, exchange, reusable=keep)

    def _end(self, outcome: Status, reason: str) -> None:
        exchange, self._exchange = self._exchange, None
        self.abort()
        if exchange is not None:
            exchange.fail(outcome, reason, monotonic_ns())
            self._pool.ended(self, exchange, reusable=False)


class Client:
    """The connections of one shard to one target, opened by `dialer`.

    `connections`: `reuse` keeps them for whoever is next, `per_session` for the same session,
    `never` opens one for each request. A `Transport`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        dialer: Dialer,
        *,
        looks_like_token: Callable[[bytes], bool],
        connections: Connections = "reuse",
    ) -> None:
        self._loop, self._dialer = loop, dialer
        self.on_end: OnEnd = lambda exchange: None
        self.looks_like_token = looks_like_token
        self.alarm: Alarm = NoAlarm()
        self._mode = connections
        self._idle: Pool[Connection] = Pool()
        self._busy: dict[int, Connection] = {}
        self._connecting: dict[int, tuple[Exchange, asyncio.Task[None]]] = {}
        self.n_opened = 0
        self.n_reused = 0
        self._turn = 0

    @property
    def known(self) -> list[str]:
        return self._dialer.addresses

    async def open(self, n: int) -> int:
        """Failures are silent here: the first request that needs a connection reports them."""
        if self._mode != "reuse":
            return 0
        n_made = 0
        for begun in range(0, n, _CONNECT_AT_ONCE):
            dials = [self._connect() for _ in range(min(_CONNECT_AT_ONCE, n - begun))]
            made = await asyncio.gather(*dials, return_exceptions=True)
            found = [connection for connection in made if isinstance(connection, Connection)]
            for connection in found:
                self._idle.put(connection)
            n_made += len(found)
            if not found:
                break
        return n_made

    def send(self, row: int, payload: bytes, session: int = 0, is_last: bool = True) -> None:
        """Send now on a kept connection, or on one opened for it."""
        exchange = Exchange(row)
        key = self._key(session)
        while (connection := self._idle.take(key)) is not None:
            if connection.is_usable():
                exchange.reused = True
                self.n_reused += 1
                self._busy[row] = connection
                connection.key = -1 if self._mode == "per_session" and is_last else key
                connection.start(exchange, payload)
                return
        exchange.sent_ns = monotonic_ns()
        keep_key = -1 if self._mode == "never" or (key and is_last) else key
        task = self._loop.create_task(self._connect_and_start(exchange, payload, keep_key))
        self._connecting[row] = (exchange, task)

    def sent_ns(self, row: int) -> int:
        connection = self._busy.get(row)
        exchange = self._connecting[row][0] if connection is None else connection.exchange
        assert exchange is not None, f"request {row} is not in flight"
        return exchange.sent_ns

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        if (connection := self._busy.get(row)) is not None:
            connection.fail(outcome, reason)
        elif row in self._connecting:
            exchange, task = self._connecting.pop(row)
            task.cancel()
            exchange.fail(outcome, f"{reason} (while connecting)", monotonic_ns())
            self.on_end(exchange)

    def in_flight(self, most: int) -> tuple[int, Sequence[int]]:
        busy = list(self._busy.values())
        step = max(1, -(-len(busy) // most))
        self._turn += 1
        return len(busy), [one.descriptor() for one in busy[self._turn % step :: step]]

    async def close(self) -> None:
        idle, self._idle = self._idle.all(), Pool()  # so that nobody looks for his place in it
        for connection in idle:
            connection.abort()
        connecting = [task for _, task in self._connecting.values()]
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        self._dialer.close()

    # called by connections
    def ring(self) -> None:
        """What is due now goes out before the next socket is read."""
        try:
            self.alarm.ring()
        except Exception as error:  # of an OSError in a protocol no loop would tell
            context = {"message": "the dispatcher, rung between two reads", "exception": error}
            self._loop.call_exception_handler(context)

    def ended(self, connection: Connection, exchange: Exchange, *, reusable: bool) -> None:
        self._busy.pop(exchange.row, None)
        if reusable and connection.key >= 0:
            self._idle.put(connection)
        else:
            connection.abort()
        self.on_end(exchange)

    def forget(self, connection: Connection) -> None:
        self._idle.discard(connection)

    def _key(self, session: int) -> int:
        return session + 1 if self._mode == "per_session" else 0

    async def _connect(self) -> Connection:
        connection = await self._dialer.dial(lambda: Connection(self))
        self.n_opened += 1
        return connection

    async def _connect_and_start(self, exchange: Exchange, payload: bytes, key: int) -> None:
        try:
            connection = await self._connect()
        except OSError as error:  # refused, unreachable, DNS, TLS, the proxy
            del self._connecting[exchange.row]
            exchange.fail(Status.connect_error, connect_reason(self._dialer, error), monotonic_ns())
            self.on_end(exchange)
            return
        del self._connecting[exchange.row]
        exchange.connected_ns = monotonic_ns()
        connection.key = key
        self._busy[exchange.row] = connection
        connection.start(exchange, payload)
