"""The requests of the preflight: a connection, the list of models and one streamed answer.

The stream is read line by line: a plain second implementation of what the load generator does on
its hot path. Here a millisecond does not matter, and the reason of a failure does.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple, cast
from urllib.parse import urljoin

import msgspec

from targets.base import Adapter, Delta, HttpRequest, Request, Usage, is_possible_count
from targets.dialer import Dialer, ProxyRefused
from targets.endpoint import Endpoint
from targets.http_session import HttpSession, ProbeConnection
from targets.safe_text import error_message, one_line, strip_controls

_HANDSHAKE_S = 3.0
_DATA_NAMES = (b"", b"message", b"data")  # events of another name need not be of the API
_DONE_S = 0.05  # from [DONE] to the end of the response
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
ABSENT = (404, 405)
"""The statuses of a path that the server does not have."""
_READ_BYTES = 4096
_MODELS_BYTES = 1 << 20
_WHOLE_BYTES = 1 << 24  # of an answer that is not streamed
# vLLM, SGLang and the bundled engine; then hosted gateways.
_LENGTH_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length")


@dataclass
class ProbeAnswer:
    """The answer to a streamed request. `problem` says in a few words why the stream is unusable,
    if it is.

    `token_reads_s` are the socket reads that completed at least one token; a stream with a single
    such read was held back on the way. Times are seconds since the request was sent; NaN if it
    never happened.
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
        """The counts in the stream, of each the last that was stated; None without any."""
        usages = [delta.usage for delta in self.deltas if delta.usage is not None]
        return reduce(_merged, usages) if usages else None

    def is_possible(self, tokens: int) -> bool:
        """Whether the answer can have so many tokens (`is_possible_count`), without reasoning that
        was not streamed."""
        tokens -= self.hidden_tokens
        texts = [delta.text for delta in self.deltas if delta.is_token]
        n_bytes = len("".join(texts).encode("utf-8", "surrogatepass")) if all(texts) else None
        return is_possible_count(tokens, len(texts), n_bytes)

    @property
    def hidden_tokens(self) -> int:
        """Reasoning tokens that the usage counts, if no reasoning was streamed."""
        is_shown = any(delta.text and not delta.is_answer for delta in self.deltas)
        usage = self.usage
        return 0 if is_shown or usage is None else usage.reasoning_tokens or 0

    @property
    def n_token_events(self) -> int:
        return sum(delta.is_token for delta in self.deltas)

    @property
    def n_counted_events(self) -> int:
        """The events with tokens that state the output tokens so far."""
        usages = (delta.usage for delta in self.deltas if delta.is_token)
        return sum(usage is not None and usage.output_tokens is not None for usage in usages)


def _merged(earlier: Usage, later: Usage) -> Usage:
    """The later counts, with the earlier where the later states none or 0: Anthropic's API states
    the prompt at the start and the answer at the end, and servers of it fill in zeros."""
    names = msgspec.structs.asdict(later)
    return Usage(**{name: names[name] or getattr(earlier, name) or names[name] for name in names})


class ProbeEvent(NamedTuple):
    """A server-sent event: its name (b"" if it has none) and its data."""

    name: bytes
    data: bytes


class EventReader:
    """Server-sent events from lines that end in LF, CRLF or CR (HTML standard §9.2). Extensions: an
    `error:` line (llama.cpp) and bare JSON (a gateway's error body) are data."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line without an end so far
        self._after_cr = False
        self._name = b""
        self._data: list[bytes] = []
        self._is_bare = False

    def feed(self, data: bytes) -> list[ProbeEvent]:
        """Every event that these bytes complete."""
        events: list[ProbeEvent] = []
        for line in self._lines(data):
            is_field = line.startswith((b"data:", b"event:", b"id:", b"retry:", b":"))
            if line[:1] == b"{" or (self._is_bare and line and not is_field):
                self._is_bare = True
                self._data.append(line)
                continue
            if not line or self._is_bare:
                self._end_event(events)
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif line.startswith(b"error:"):  # llama.cpp reports a failure after a 200 so
                self._data.append(b'{"error":' + line[6:] + b"}")
        return events

    def _end_event(self, events: list[ProbeEvent]) -> None:
        if any(data.strip() for data in self._data):
            events.append(ProbeEvent(self._name, b"\n".join(self._data)))
        self._name, self._data, self._is_bare = b"", [], False

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


def send(
    session: HttpSession, endpoint: Endpoint, request: HttpRequest, timeout_s: float
) -> AbstractAsyncContextManager[ProbeConnection]:
    """`HttpSession.request` with the endpoint's URL and headers."""
    address = endpoint.address
    url = address.http_url + request.path + address.query
    headers = (*request.headers, *endpoint.request_headers())
    return session.request(request.method, url, headers, request.body, timeout_s)


async def send_probe(
    session: HttpSession,
    endpoint: Endpoint,
    adapter: Adapter,
    request: Request,
    timeout_s: float,
    on_token: Callable[[], None] = lambda: None,
) -> ProbeAnswer:
    """Send a request and read its stream to the end. Every failure is in the result; none is
    raised. `on_token` is called at each read that completes a token.
    """
    encoded = adapter.encode(request)
    opened = send(session, endpoint, encoded, timeout_s)
    return await _answer(opened, endpoint, adapter, timeout_s, on_token)


async def first_token_of(
    session: HttpSession, endpoint: Endpoint, adapter: Adapter, payload: bytes, timeout_s: float
) -> ProbeAnswer:
    """Send the bytes of a request and leave its stream after the first token; the server may then
    end it. Every failure is in the result; none is raised."""
    opened = session.exchange(payload, timeout_s)
    return await _answer(opened, endpoint, adapter, timeout_s, lambda: None, ends_early=True)


async def _answer(
    opened: AbstractAsyncContextManager[ProbeConnection],
    endpoint: Endpoint,
    adapter: Adapter,
    timeout_s: float,
    on_token: Callable[[], None],
    *,
    ends_early: bool = False,
) -> ProbeAnswer:
    answer, start_s = ProbeAnswer(), time.monotonic()
    try:
        async with opened as response:
            answer.status = response.status
            answer.content_type = endpoint.redact(strip_controls(response.content_type))
            if response.status == 200:
                await _read_stream(
                    response, endpoint, adapter, answer, start_s, on_token, ends_early
                )
            elif is_redirect(response.status):
                path = adapter.encode(Request("", 1)).path
                answer.problem = _redirect_problem(response, path, endpoint)
            else:
                body = await response.read(_READ_BYTES)
                answer.head = endpoint.redact(one_line(body, _READ_BYTES))
                message = endpoint.redact(error_message(body))
                answer.problem = f"answered {response.status}: {message}"
                answer.is_transient = response.status >= 500 or response.status == 429
    except TimeoutError:
        tokens = answer.n_token_events
        end = f"stopped after {tokens} tokens" if tokens else "did not answer"
        answer.problem = f"{end} within {timeout_s:g} s"
    except OSError as error:
        answer.is_transient = True
        if answer.status:
            answer.problem = f"the connection was cut after {answer.n_token_events} tokens"
        else:
            reason = endpoint.error_text(error)
            answer.problem = f"the connection was closed without an answer ({reason})"
    answer.total_s = time.monotonic() - start_s
    return answer


async def _read_stream(
    response: ProbeConnection,
    endpoint: Endpoint,
    adapter: Adapter,
    answer: ProbeAnswer,
    start_s: float,
    on_token: Callable[[], None],
    ends_early: bool,
) -> None:
    encoding = endpoint.redact(one_line(response.header("content-encoding")))
    if encoding.lower() not in ("", "identity"):
        answer.problem = f"answered in {encoding} although none was requested: switch it off there"
        return
    if not adapter.stream:
        await _read_whole(response, endpoint, adapter, answer, start_s, on_token)
        return
    reader, is_done = EventReader(), False
    async for data in response.pieces():
        if not answer.head:
            answer.head = endpoint.redact(one_line(data))
        n_before = answer.n_token_events
        for event in reader.feed(data):
            is_error = b"error" in event.name.lower()
            try:
                delta = adapter.decode(event.data)
            except ValueError as error:
                is_of_api = adapter.names_events or event.name.lower() in _DATA_NAMES
                if not is_of_api and not is_error:
                    continue
                answer.problem, answer.is_transient = endpoint.redact(str(error)), True
                return
            failure = delta.error or (one_line(event.data) if is_error else None)
            if failure is not None:
                answer.problem = f"reported an error in the stream: {endpoint.redact(failure)}"
                answer.is_transient = True
                return
            if not delta.is_unknown:
                answer.deltas.append(delta)
            is_done = is_done or delta.is_done
        if answer.n_token_events > n_before:
            answer.token_reads_s.append(time.monotonic() - start_s)
            on_token()
            if ends_early:
                return
        if is_done:
            await _wait_for_end(response)
            break
    if not answer.deltas:
        kind = answer.content_type or "no content type"
        not_events = f"not an event stream; it starts {answer.head[:80]!r}"
        answer.problem = (
            f"answered {kind}, {not_events if answer.head else 'but the body is empty'}"
        )
    elif not is_done and not any(delta.finish_reason for delta in answer.deltas):
        answer.problem = f"the stream ended after {answer.n_token_events} tokens without a finish"
        answer.is_transient = True


async def _read_whole(
    response: ProbeConnection,
    endpoint: Endpoint,
    adapter: Adapter,
    answer: ProbeAnswer,
    start_s: float,
    on_token: Callable[[], None],
) -> None:
    """Read an answer that is not streamed."""
    body = await response.read(_WHOLE_BYTES)
    answer.head = endpoint.redact(one_line(body))
    try:
        delta = adapter.decode(body)
    except ValueError:
        delta = Delta(is_unknown=True)
    if delta.error is not None:
        answer.problem = f"reported an error in the answer: {endpoint.redact(delta.error)}"
        answer.is_transient = True
    elif delta.is_unknown:
        kind = answer.content_type or "no content type"
        answer.problem = f"answered {kind}, not a whole answer; it starts {answer.head[:80]!r}"
    else:
        answer.deltas.append(delta)
        answer.token_reads_s.append(time.monotonic() - start_s)
        on_token()


async def _wait_for_end(response: ProbeConnection) -> None:
    """Wait for the end of a response after [DONE], briefly: the answer is complete without it, and
    its connection can be used again with it."""
    with suppress(OSError):  # TimeoutError too
        async with asyncio.timeout(_DONE_S):
            async for _ in response.pieces():
                pass


@dataclass(frozen=True)
class Models:
    """The list of served models. `status` 0: there was no answer, for the reason in `problem`.
    `version` is that of the API, and `request` names the request in messages."""

    status: int
    max_len: dict[str, int | None]
    problem: str | None = None
    is_bundled: bool = False  # served by slobench's own engine
    is_transient: bool = False  # no connection, or a lost connection: worth another attempt
    version: str = "/v1"
    request: str = "GET /v1/models"

    @property
    def ids(self) -> list[str]:
        return list(self.max_len)


async def fetch_models(session: HttpSession, endpoint: Endpoint, timeout_s: float) -> Models:
    """The answer to `GET /v1/models`; after a 404, that under the other version that may follow
    the base, if it lists models. Every failure is in the result; none is raised."""
    first, *others = endpoint.address.versions
    models = await _models(session, endpoint, timeout_s, first)
    for version in others:
        if models.status in ABSENT:
            other = await _models(session, endpoint, timeout_s, version)
            models = other if other.ids else models
    return models


async def _models(
    session: HttpSession, endpoint: Endpoint, timeout_s: float, version: str
) -> Models:
    models = await _listed(session, endpoint, timeout_s, f"{version}/models")
    path = endpoint.redact(endpoint.address.path(f"{version}/models"))
    return replace(models, version=version, request=f"GET {path}")


async def _listed(session: HttpSession, endpoint: Endpoint, timeout_s: float, path: str) -> Models:
    request = HttpRequest("GET", path, (), b"")
    try:
        async with send(session, endpoint, request, timeout_s) as response:
            body = await response.read(_MODELS_BYTES)
    except TimeoutError:
        return Models(0, {}, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Models(0, {}, endpoint.error_text(error), is_transient=True)
    status = response.status
    if is_redirect(status):
        return Models(status, {}, _redirect_problem(response, request.path, endpoint))
    if status != 200:
        return Models(status, {}, f"answered {status}: {endpoint.redact(error_message(body))}")
    try:
        return Models(200, parse_models(body), is_bundled=_is_bundled(body))
    except ValueError:
        head = endpoint.redact(one_line(body))[:80]
        return Models(200, {}, f"answered no list of models but {head!r}")


def parse_models(body: bytes) -> dict[str, int | None]:
    """Model id → longest sequence in tokens, None if it is not stated. Raises ValueError for a body
    of another form.
    """
    try:
        content = msgspec.json.decode(body)
    except RecursionError:
        raise ValueError("nested too deep") from None
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list):
        raise ValueError("no 'data' list")
    models = [m for m in data if isinstance(m, dict) and "id" in m]
    return {strip_controls(str(m["id"])): _length(m) for m in models}


def _is_bundled(body: bytes) -> bool:
    """Whether a list that `parse_models` accepts is the bundled engine's."""
    models = msgspec.json.decode(body)["data"]
    return any(isinstance(m, dict) and m.get("owned_by") == "slobench" for m in models)


def _length(model: Mapping[str, object]) -> int | None:
    for key in _LENGTH_KEYS:
        value = model.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def is_redirect(status: int) -> bool:
    """Whether a status redirects. The preflight does not follow: the run would not either, and the
    request's headers are for the endpoint only.
    """
    return 300 <= status < 400


def _redirect_problem(response: ProbeConnection, path: str, endpoint: Endpoint) -> str:
    """The destination of a redirect and the remedy, in a few words."""
    location = response.header("location").decode("utf-8", "surrogateescape")
    if not location:
        return f"answers {response.status} without a location"
    with suppress(ValueError):  # not a URL: shown as it is
        location = urljoin(endpoint.address.http_url + path, location)
    shown = endpoint.redact(one_line(location.encode("utf-8", "surrogateescape")))
    return f"answers {response.status} to {shown}: use that URL as --target"


async def connect(endpoint: Endpoint, timeout_s: float) -> float:
    """Open a connection, TLS included, and close it. Returns the seconds that opening it took.
    Raises the error of the attempt.
    """
    start_s = time.monotonic()
    dialer = Dialer(asyncio.get_running_loop(), endpoint.route)
    try:
        async with asyncio.timeout(timeout_s):
            connection = await dialer.dial(_EmptyConnection)
    finally:
        dialer.close()
    took_s = time.monotonic() - start_s
    connection.transport.abort()  # `close` would wait for the server's TLS close_notify
    return took_s


async def speaks_tls(endpoint: Endpoint, timeout_s: float) -> bool:
    """Whether the port of an http:// URL expects TLS, by a handshake that sends no request. False
    behind a proxy and on a socket file."""
    route = endpoint.route
    if route.is_tls or route.unix_path or route.proxy is not None:
        return False
    return await asyncio.to_thread(_has_tls, route.host, route.port, min(timeout_s, _HANDSHAKE_S))


def _has_tls(host: str, port: int, timeout_s: float) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # the server answers in TLS
    except OSError:  # TimeoutError too
        return False


class _EmptyConnection(asyncio.Protocol):
    """A connection without a request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)


def connect_problem(error: Exception, endpoint: Endpoint, timeout_s: float) -> str:
    """The reason why no connection could be opened and the remedy, in one line."""
    route = endpoint.route
    if isinstance(error, TimeoutError):
        what = "connection and TLS handshake" if route.is_tls else "connection"
        return f"no {what} within {timeout_s:g} s; is the host up, or a firewall between?"
    if isinstance(error, ProxyRefused):
        return endpoint.error_text(error)
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
        reason = getattr(error, "reason", None) or endpoint.error_text(error)
        if reason in _NOT_TLS:
            return f"does not speak TLS ({reason}); write http:// instead of https://"
        return (
            f"TLS failed ({reason}); does the server need a client certificate or another version?"
        )
    if isinstance(error, FileNotFoundError):
        return f"no such socket file '{route.unix_path}'; is the server running?"
    if is_refused(error):
        if route.proxy is not None:
            return f"connection refused by proxy {route.proxy.url}; is it running?"
        return (
            "connection refused; is the server running, and is the port right? "
            "--wait-ready 10m waits for a server that is starting"
        )
    reason = endpoint.error_text(error)
    if route.is_tls and isinstance(error, ConnectionError):
        return (
            f"the connection was closed in the TLS handshake ({reason}); is this the port for "
            "https, and does a proxy or firewall between let TLS through?"
        )
    return f"cannot connect ({reason})"


def is_refused(error: Exception) -> bool:
    """Whether every address refused the connection. The errors of several addresses (localhost: ::1
    and 127.0.0.1) arrive joined in one text."""
    return isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}" in str(error)
