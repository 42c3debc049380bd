"""HTTP/1.1 client of the measured path: streaming requests over kept-alive connections.

Each socket read is timestamped first and stored as it came. llhttp (httptools) parses the heads and
finds the end of each response; its body callback is not used, because a call per piece of a body
costs as much as the read itself. A token creates no task, no future and no JSON: `decode` parses
the stored bytes after the request, outside the measured time. Reasons: docs/decisions 0004, 0040.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import cast

import httptools

from loadgen.archive.exchange import DONE_MARK, Exchange
from loadgen.drive.pool import Pool
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
from targets.dialer import Dialer
from targets.rotation import format_address

_HEAD_END = b"\r\n\r\n"
_SHORT_READ = 16  # bytes; longer than the rest of a [DONE] that two reads share
_FAILED = 400  # and above: HTTP statuses of failed answers
_CONNECT_AT_ONCE = 64  # half of the shortest listen backlog in common use (128)


class Connection(asyncio.Protocol):
    """A TCP connection; carries at most a single request at a time."""

    def __init__(self, pool: Client) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._answered: tuple[Exchange, bool] | None = None  # and whether to keep the connection
        self._read_ns = 0
        self._is_followed = False  # bytes behind the end of a response, in the same read
        self._body_until_eof = True
        self._head_tail = b""  # last 3 bytes of the head so far: a read may cut its end
        self.remote = ""
        self.key = 0

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        # uvloop writes buffered data at the end of the loop's turn, after reading all sockets that
        # are readable by then (0.6-1.1 ms after `sent_ns` at p99). Without a buffer, it writes now.
        self._transport.set_write_buffer_limits(high=0)
        self.remote = format_address(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        self._read_ns = now_ns = monotonic_ns()
        exchange = self._exchange
        if exchange is None:  # bytes without a request: the next response could not be trusted
            self.abort()
            return
        try:
            if not exchange.headers_ns:
                self._read_head(exchange, data)
            else:  # nearly every read; inlined, because a call adds a tenth to its cost
                exchange.times.append(now_ns)
                exchange.parts.append(data)
                exchange.n_bytes += len(data)
                if not exchange.first_guess_ns and self._pool.looks_like_token(data):
                    exchange.first_guess_ns = now_ns
                self._parser.feed_data(data)
                if DONE_MARK in data or len(data) <= _SHORT_READ:
                    self._expect_end(exchange)
                if exchange.n_bytes > MAX_BODY_BYTES and self._exchange is exchange:
                    self._end(Status.stream_error, f"response body over {MAX_BODY_BYTES >> 20} MiB")
        except httptools.HttpParserUpgrade:
            self._end(Status.stream_error, "the server switched protocols")
        except httptools.HttpParserError as error:
            self._is_followed = self._answered is not None  # the response itself was complete
            self._end(Status.stream_error, f"not HTTP/1.1: {error or type(error).__name__}")
        if self._answered is not None:
            (exchange, keep), self._answered = self._answered, None
            if self._is_followed or self._is_too_long(exchange):
                exchange.fail(Status.stream_error, BYTES_BEHIND, now_ns)
                keep = False
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
            reason = f"connection closed in the middle of the response{how}"
        elif exchange.reused:
            reason = f"the server closed a kept-alive connection instead of responding{how}"
        else:
            reason = f"connection closed without a response{how}"
        self._end(Status.stream_error, reason)

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        """Parses a read that begins inside the head; the bytes after the head are body.

        llhttp would not report where the head ends within a read, so the blank line is searched
        for, also across the cut between two reads.
        """
        while data and not exchange.headers_ns:
            joined = self._head_tail + data
            end = joined.find(_HEAD_END)
            n_head = len(data) if end < 0 else end + len(_HEAD_END) - len(self._head_tail)
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
        self._expect_end(exchange)

    # httptools callbacks
    def on_message_begin(self) -> None:
        self._is_followed = self._answered is not None

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.headers_ns:  # a trailer; it must not change the framing (RFC 9110 §6.5.1)
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
        elif self._parser.get_status_code() >= _FAILED:
            exchange.add_limit(key, value)

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.http_status = self._parser.get_status_code()
        exchange.headers_ns = self._read_ns

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if 100 <= exchange.http_status < 200:  # informational: the response is still to come
            exchange.http_status = exchange.headers_ns = 0
            self._expect_head()
            return
        # Reported only after the whole read is parsed: httptools would swallow an exception of
        # `on_end`, and the rest of this read must not become part of the next request's response.
        self._answered, self._exchange = (exchange, self._parser.should_keep_alive()), None

    # called by Client
    def start(self, exchange: Exchange, payload: bytes) -> None:
        """Sends a request; `Client.ended` receives its end."""
        assert self._transport is not None
        assert self._exchange is None, f"connection busy with request {self._exchange}"
        self._exchange = exchange
        self._expect_head()
        exchange.remote = self.remote
        if not exchange.sent_ns:
            exchange.sent_ns = monotonic_ns()
        self._transport.write(payload)

    def fail(self, outcome: Status, reason: str) -> None:
        """Ends the request in flight (timeout, cancel) and closes the connection."""
        self._end(outcome, reason)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def exchange(self) -> Exchange | None:
        """The request in flight, if any."""
        return self._exchange

    @property
    def read_ns(self) -> int:
        """When the last bytes came, 0 before any."""
        return self._read_ns

    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def descriptor(self) -> int:
        """The file descriptor of the socket; -1 once it is closed."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def _is_too_long(self, exchange: Exchange) -> bool:
        return exchange.length is not None and exchange.n_bytes > exchange.length

    def _expect_end(self, exchange: Exchange) -> None:
        """Waits for the end of a response after [DONE], so that its connection can be used again,
        but not for long: the answer is complete."""
        if self._exchange is exchange and exchange.is_done():
            self._pool.call_later(DONE_S, self._end_held, exchange)

    def _end_held(self, exchange: Exchange) -> None:
        if self._exchange is exchange and exchange.is_done():
            self._end(Status.stream_error, HELD_OPEN)

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
            exchange.end(outcome, reason, monotonic_ns())
            self._pool.ended(self, exchange, reusable=False)


class Client:
    """Connections of a shard to its target; `dialer` opens them. A `Transport`.

    `connections`: `reuse` keeps a connection for any later request, `per_session` for requests of
    the same session, `never` opens a new connection for each request.
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
        self.call_later = loop.call_later
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
    def addresses(self) -> list[str]:
        return self._dialer.addresses

    async def open(self, n: int) -> int:
        """Failures are not reported here; the first request without a connection reports them."""
        if self._mode != "reuse":
            return 0
        n_opened = 0
        for n_dialed in range(0, n, _CONNECT_AT_ONCE):
            dials = [self._connect() for _ in range(min(_CONNECT_AT_ONCE, n - n_dialed))]
            results = await asyncio.gather(*dials, return_exceptions=True)
            opened = [result for result in results if isinstance(result, Connection)]
            for connection in opened:
                self._idle.put(connection)
            n_opened += len(opened)
            if not opened:
                break
        return n_opened

    def send(self, row: int, payload: bytes, session: int = 0, is_last: bool = True) -> None:
        """Sends on an idle connection, or opens a connection if none is idle."""
        exchange = Exchange(row)
        key = session + 1 if self._mode == "per_session" else 0
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
        return len(busy), [c.descriptor() for c in busy[self._turn % step :: step]]

    def has_read_since(self, at_ns: int) -> bool:
        return any(connection.read_ns > at_ns for connection in self._busy.values())

    async def close(self) -> None:
        # With an empty pool, `forget` need not search it for each closed connection.
        idle, self._idle = self._idle.all(), Pool()
        for connection in idle:
            connection.abort()
        connecting = [task for _, task in self._connecting.values()]
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        self._dialer.close()

    # called by Connection
    def ring(self) -> None:
        """Runs the overdue alarm, so that due requests go out before the next socket is read."""
        try:
            self.alarm.ring()
        except Exception as error:  # loops ignore an OSError raised in a protocol's callback
            context = {"message": "an alarm between two reads", "exception": error}
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
