"""One streamed request, read line by line: the plain, readable second implementation of what the
load generator does on its hot path. For probes, where a millisecond does not matter and the reason
of a failure does.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urljoin

import msgspec

from targets.base import Adapter, Delta, Request, Usage
from targets.dialer import Dialer, ProxyRefused
from targets.endpoint import Endpoint
from targets.http_session import HttpSession, ProbeConnection
from targets.safe_text import strip_controls

_HEAD_CHARS = 200
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
_READ_BYTES = 4096
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


@dataclass
class ProbeAnswer:
    """What came back. `problem` says in a few words why it is no good stream; None if it is one.

    `token_reads_s` are the socket reads that completed at least one token: a stream that arrives in
    one read was held back by something on the way. Times are seconds since the request was sent;
    NaN if it never came to that.
    """

    status: int = 0
    content_type: str = ""
    head: str = ""
    deltas: list[Delta] = field(default_factory=list)
    token_reads_s: list[float] = field(default_factory=list)
    total_s: float = float("nan")
    problem: str | None = None
    is_transient: bool = False  # worth another attempt: a server may fail one request in ten

    @property
    def first_token_s(self) -> float:
        return self.token_reads_s[0] if self.token_reads_s else float("nan")

    @property
    def usage(self) -> Usage | None:
        """The last that the server stated."""
        return next((d.usage for d in reversed(self.deltas) if d.usage is not None), None)

    @property
    def n_token_events(self) -> int:
        return sum(delta.is_token for delta in self.deltas)


class EventReader:
    """Server-sent events from lines ending in LF, CRLF or CR (HTML standard §9.2)."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line that has not ended yet
        self._after_cr = False
        self._data: list[bytes] = []
        self.alien: bytes | None = None  # the first line that is no field of the format

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that these bytes complete."""
        events = []
        for line in self._lines(data):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"error:"):  # llama.cpp's way to fail after a 200
                self._data.append(b'{"error":' + line[6:] + b"}")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            elif line and not line.startswith(_FIELDS):
                self.alien = self.alien or line
        return events

    def _lines(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        self._rest.append(lines[0])
        if len(lines) == 1:
            return []
        lines[0], self._rest = b"".join(self._rest), [lines.pop()]
        return lines


async def send_probe(
    session: HttpSession,
    endpoint: Endpoint,
    adapter: Adapter,
    request: Request,
    timeout_s: float,
    on_token: Callable[[], None] = lambda: None,
) -> ProbeAnswer:
    """Send one request and read its stream to the end; every way to fail is in the Answer, none is
    raised. `on_token` is called when the first token is in, and perhaps again.
    """
    sent = adapter.encode(request)
    url, headers = endpoint.address.http_url + sent.path, endpoint.request_headers()
    answer, start_s = ProbeAnswer(), time.monotonic()
    try:
        async with session.request(
            sent.method, url, [*sent.headers, *headers], sent.body, timeout_s
        ) as response:
            answer.status = response.status
            answer.content_type = endpoint.redact(strip_controls(response.content_type))
            if response.status == 200:
                await _read_stream(response, endpoint, adapter, answer, start_s, on_token)
            elif is_redirect(response.status):
                answer.problem = redirected(response, url, endpoint)
            else:
                body = await response.read(_READ_BYTES)
                answer.head = endpoint.redact(one_line(body, _READ_BYTES))
                answer.problem = f"answered {response.status}: {endpoint.redact(said(body))}"
                answer.is_transient = response.status >= 500 or response.status == 429
    except TimeoutError:
        tokens = answer.n_token_events
        got = f"stopped after {tokens} tokens" if tokens else "did not answer"
        answer.problem = f"{got} within {timeout_s:g} s"
    except OSError as error:
        answer.is_transient = True
        if answer.status:
            answer.problem = f"the connection was cut after {answer.n_token_events} tokens"
        else:
            answer.problem = (
                f"the connection was closed without an answer ({reason(error, endpoint)})"
            )
    answer.total_s = time.monotonic() - start_s
    return answer


async def _read_stream(
    response: ProbeConnection,
    endpoint: Endpoint,
    adapter: Adapter,
    answer: ProbeAnswer,
    start_s: float,
    on_token: Callable[[], None],
) -> None:
    packing = endpoint.redact(one_line(response.header("content-encoding")))
    if packing.lower() not in ("", "identity"):
        answer.problem = f"answered in {packing} although none was asked for: switch it off there"
        return
    reader, is_done = EventReader(), False
    async for data in response.pieces():
        if not answer.head:
            answer.head = endpoint.redact(one_line(data))
        had = answer.n_token_events
        for event in reader.feed(data):
            try:
                delta = adapter.decode(event)
            except ValueError as error:
                answer.problem, answer.is_transient = endpoint.redact(str(error)), True
                return
            answer.deltas.append(delta)
            is_done = is_done or delta.is_done
            if delta.error is not None:
                answer.problem = f"reported an error in the stream: {endpoint.redact(delta.error)}"
                answer.is_transient = True
                return
        if answer.n_token_events > had:
            answer.token_reads_s.append(time.monotonic() - start_s)
            on_token()
    if not answer.deltas:
        kind = answer.content_type
        answer.problem = f"answered {kind}, not an event stream; it starts {answer.head[:80]!r}"
    elif not is_done and not any(delta.finish_reason for delta in answer.deltas):
        answer.problem = f"the stream ended after {answer.n_token_events} tokens without a finish"
        answer.is_transient = True


def is_redirect(status: int) -> bool:
    """Whether a status sends the client elsewhere. Probes do not follow: the run would not either,
    and the request's headers are meant for the endpoint alone.
    """
    return 300 <= status < 400


def redirected(response: ProbeConnection, url: str, endpoint: Endpoint) -> str:
    """Where a redirect of `url` leads and what to do about it, in a few words."""
    location = response.header("location").decode("utf-8", "surrogateescape")
    if not location:
        return f"answers {response.status} without saying where to"
    with suppress(ValueError):  # what is no URL is told as it is
        location = urljoin(url, location)
    where = one_line(location.encode("utf-8", "surrogateescape"))
    where = endpoint.redact(where)
    return f"answers {response.status} to {where}: use that URL as --target"


def connect_problem(error: Exception, endpoint: Endpoint, timeout_s: float) -> str:
    """Why no connection came about and what to do, in one line."""
    if isinstance(error, TimeoutError):
        return f"no connection within {timeout_s:g} s; is the host up, or a firewall between?"
    route = endpoint.route
    if isinstance(error, ProxyRefused):
        return reason(error, endpoint)
    if isinstance(error, socket.gaierror):
        host = route.peer[0]
        if route.proxy is not None:
            return f"no such proxy '{host}' ({error.strerror}); check the environment's proxy"
        return f"no such host '{host}' ({error.strerror}); check the spelling of the URL"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}); name its "
            "authority's certificate as ca_cert in a target file"
        )
    if isinstance(error, ssl.SSLError):
        why = getattr(error, "reason", None) or reason(error, endpoint)
        if why in _NOT_TLS:
            return f"does not speak TLS ({why}); write http:// instead of https://"
        return f"TLS failed ({why}); does the server ask for a version or client certificate?"
    if isinstance(error, FileNotFoundError):
        return f"no such socket file '{route.unix_path}'; is the server running?"
    # The errors of several addresses (localhost: ::1 and 127.0.0.1) come joined into one text.
    if is_refused(error):
        if route.proxy is not None:
            return f"connection refused by proxy {route.proxy.url}; is it running?"
        return "connection refused; is the server running, and is the port right?"
    return f"cannot connect ({reason(error, endpoint)})"


def is_refused(error: Exception) -> bool:
    """Whether nobody listened, at any of the addresses."""
    return isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}" in str(error)


async def connect(endpoint: Endpoint, timeout_s: float) -> float:
    """Open a connection, TLS included, and close it; the seconds it took. Raises what the attempt
    raised.
    """
    start_s = time.monotonic()
    dialer = Dialer(asyncio.get_running_loop(), endpoint.route)
    try:
        async with asyncio.timeout(timeout_s):
            connection = await dialer.dial(_Knock)
    finally:
        dialer.close()
    took_s = time.monotonic() - start_s
    connection.transport.abort()  # `close` would wait for a server's part of TLS's farewell
    return took_s


class _Knock(asyncio.Protocol):
    """A connection opened only to see that it can be."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)


def said(body: bytes) -> str:
    """The message of an error body if it has one (OpenAI's, FastAPI's and bare shapes), else its
    head.
    """
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return one_line(body) or "an empty body"
    for key in ("error", "detail", "message"):
        while isinstance(found, dict) and found.get(key):
            found = found[key]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return strip_controls(" ".join(text.split()))[:_HEAD_CHARS] or "an empty body"


def one_line(body: bytes, limit: int = _HEAD_CHARS) -> str:
    """The head of a body for a message: one line of at most `limit` printable characters."""
    words = " ".join(body[: 4 * limit].decode("utf-8", "replace").split())
    return strip_controls(words)[:limit]


def reason(error: BaseException, endpoint: Endpoint) -> str:
    """An error's own words in one short line; `NotHttp` quotes what the server wrote."""
    words = endpoint.redact(strip_controls(" ".join(str(error).split())))
    return words[:120] or type(error).__name__
