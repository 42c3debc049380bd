"""A scripted OpenAI-compatible server, for tests and for checks of the load generator: it replies
as its options state, on time, and logs each write with its time.

    python -m targets.mock_server --ttft 50ms --itl 10ms --fail cut:5% --log truth.csv

It prints `READY http://host:port`, or `READY unix:/path`, on stdout. A request can change its own
script with a header `x-mock: ttft=80ms,fail=hang`. Its number, which decides whether it fails, is
its `x-seq` header, else its place in the order of arrival. Every write has an absolute deadline on
one timer. The log holds CLOCK_MONOTONIC instants, which a client on the same machine can
subtract.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast
from zlib import crc32

import httptools

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.system.endings import ending_signals
from targets import mock_wire as wire
from targets.address import bracketed
from targets.mock_named_events import FORMS
from targets.mock_reply import LogRow, Replies, Reply, write_log
from targets.mock_results import RESULTS
from targets.mock_script import OPTIONS, Script, apply_options, split_options

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST


_APIS = {"/chat/completions": "chat", "/completions": "completions"}


def _api(path: str) -> str:
    """The API of a path; "" for a path of none."""
    endings = {**_APIS, **{f"/{api}": api for api in (*FORMS, *RESULTS)}}
    return next((api for ending, api in endings.items() if path.endswith(ending)), "")


class _Received(NamedTuple):
    """A complete request that waits for its reply."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    read_ns: int
    keep_alive: bool


class MockConnection(asyncio.Protocol):
    """A client connection: HTTP/1.1 with keep-alive. A pipelined request waits for the reply
    before it.
    """

    def __init__(self, replies: Replies) -> None:
        self.replies, self.id = replies, replies.n_connections
        replies.n_connections += 1
        self.reply: Reply | None = None
        self._waiting: deque[_Received] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._keep_alive = True
        self._reset_message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not inherit from asyncio.Transport.
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is not None:
            self._end("aborted")
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # an error in the callbacks below, not in the request
        except httptools.HttpParserError:
            self.write(wire.whole_response(400, wire.error_body(400, "not an HTTP/1.1 request")))
            self.transport.close()

    # Callbacks of httptools
    def on_url(self, url: bytes) -> None:
        self._url += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        path, body = self._url.partition("?")[0], b"".join(self._body)
        keep_alive = self._parser.should_keep_alive()
        self._waiting.append(
            _Received(method, path, self._headers, body, time.monotonic_ns(), keep_alive)
        )
        self._reset_message()
        if self.reply is None:
            self._next()

    # The reply's side (`ReplyConnection`)
    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def finish(self, data: bytes) -> None:
        """Write the end of the reply and continue with the next request of this connection."""
        self.write(data)
        self._end(None)
        self._next()

    def cut(self) -> None:
        self._end(None)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection after what is written."""
        self.transport.close()

    def reset(self) -> None:
        self._end(None)
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def _reset_message(self) -> None:
        self._url = ""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def _end(self, outcome: str | None) -> None:
        assert self.reply is not None, "no reply is in progress"
        row = self.reply.row
        row.done_ns, row.outcome = time.monotonic_ns(), outcome or row.outcome
        self.reply = None

    def _next(self) -> None:
        while self.reply is None and self._waiting and not self.transport.is_closing():
            request = self._waiting.popleft()
            self._keep_alive = request.keep_alive
            if request.method == "POST" and (api := _api(request.path)):
                self._begin_reply(request, api)
            else:
                self.write(self._other_response(request.method, request.path))
        if self.reply is None and not self._keep_alive:
            self.transport.close()

    def _other_response(self, method: str, path: str) -> bytes:
        script = self.replies.script
        if method == "GET" and path.endswith("/v1/models"):
            loading = script.loading_models(self.replies.age_s())
            if loading == "503":
                return wire.whole_response(503, wire.error_body(503, "Loading model"))
            if loading == "empty":
                script = replace(script, models=())
            return wire.whole_response(200, wire.models_body(script))
        if method == "GET" and path.endswith("/health"):
            return wire.whole_response(200, b"{}")
        return wire.whole_response(404, wire.error_body(404, f"no route {method} {path}"))

    def _begin_reply(self, request: _Received, api: str) -> None:
        headers, number = request.headers, len(self.replies.rows)
        seq = headers.get("x-seq", "")
        is_number = seq.isascii() and seq.isdigit()
        row = LogRow(int(seq) if is_number else -1, number, self.id, api, read_ns=request.read_ns)
        self.replies.begin(row)
        refusal, script = None, self.replies.script
        try:
            script = apply_options(script, split_options(headers.get("x-mock", "")))
            fields = wire.read_request(request.body)
            refusal = wire.refuse(script, fields, headers, api)
        except (ValueError, UsageError) as error:
            fields, refusal = wire.RequestFields(), (400, wire.error_body(400, str(error)))
        if self.replies.script.loading_models(self.replies.age_s()) is not None:
            refusal = 503, wire.error_body(503, "Loading model")
        failure = script.failure(row.seq if row.seq >= 0 else number)
        if refusal is None and failure is not None and failure.isdigit():
            refusal = int(failure), wire.error_body(int(failure), f"scripted failure {failure}")
        self.reply = self._reply(row, fields, script, failure)
        if refusal is not None:
            status, body = refusal
            row.outcome = str(status)
            self.reply.refuse(wire.whole_response(status, self.reply.text.refusal(body)))
        elif failure != "hang":
            self.reply.start()

    def _reply(
        self, row: LogRow, fields: wire.RequestFields, script: Script, failure: str | None
    ) -> Reply:
        is_chat = row.api not in wire.WITHOUT_TEMPLATE
        tokens, finish = script.output_tokens(fields.limit, fields.ignore_eos)
        row.asked_tokens = script.tokens if fields.limit is None else fields.limit
        row.prompt_tokens = script.prompt_tokens(fields.text, is_chat)
        row.outcome = failure or "ok"
        options = fields.stream_options or {}
        has_usage = bool(options.get("include_usage")) and script.usage != "off"
        form = FORMS.get(row.api, wire.ReplyText)
        if script.persona and row.api == "chat":
            form = wire.PersonaText
        common: JsonObject = {
            "script": script,
            "number": row.number,
            "key": crc32(fields.text.encode("utf-8", "surrogatepass")),
            "is_chat": is_chat,
            "model": fields.model or script.models[0],
            "prompt_tokens": row.prompt_tokens,
        }
        if row.api in RESULTS:
            return self._results(row, common, fields, failure)
        text = form(
            **common,
            tokens=tokens,
            finish=finish,
            has_usage=has_usage,
            continuous=has_usage and bool(options.get("continuous_usage_stats")),
        )
        return Reply(self.replies, self, script, row, text, fields.stream, failure)

    def _results(
        self, row: LogRow, common: JsonObject, fields: wire.RequestFields, failure: str | None
    ) -> Reply:
        """A reply without tokens."""
        row.asked_tokens = 0
        form, is_tei = RESULTS[row.api], bool(fields.texts)
        own: JsonObject = {"tokens": 0, "finish": "", "has_usage": True, "continuous": False}
        text = form(**common, **own, n_texts=fields.n_texts, is_tei=is_tei)
        return Reply(self.replies, self, common["script"], row, text, False, failure)


@dataclass(frozen=True)
class Place:
    """The place to listen at: a TCP port (0: any free port), or the socket file `unix` if given."""

    host: str
    port: int
    unix: Path | None = None
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"unix:{self.unix}" if self.unix is not None else f"{self.host}:{self.port}"

    async def listen(
        self, loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Server, str]:
        """(the listener, its URL)."""
        if self.unix is not None:
            path = str(self.unix)
            return await loop.create_unix_server(connection, path, backlog=4096), f"unix:{path}"
        listener = await loop.create_server(
            connection, self.host, self.port, ssl=self.tls, backlog=4096
        )
        port = listener.sockets[0].getsockname()[1]
        return listener, f"{'https' if self.tls else 'http'}://{bracketed(self.host)}:{port}"


async def serve(script: Script, place: Place, parent_pid: int | None) -> list[LogRow]:
    """Serve until SIGTERM, SIGINT, SIGHUP or the end of the parent. Returns the rows of the log, in
    order of arrival."""
    loop = asyncio.get_running_loop()
    replies = Replies(script, loop)
    stop = asyncio.Event()
    for number in ending_signals():
        loop.add_signal_handler(number, stop.set)
    listener, url = await place.listen(loop, lambda: MockConnection(replies))
    sys.stdout.write(f"READY {url}\n")
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    while not stop.is_set() and (parent_pid is None or os.getppid() == parent_pid):
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue
    listener.close()
    if place.unix is not None:
        place.unix.unlink(missing_ok=True)
    replies.close()
    return replies.rows


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the message without the usage block."""
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m targets.mock_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--unix", type=Path, help="a socket file to listen on instead")
    parser.add_argument("--log", type=Path, help="CSV of every reply, written at exit")
    parser.add_argument("--tls-cert", type=Path, help="PEM file; serve https")
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--parent-pid", type=int, help="end when this parent has ended")
    for name, (_, _, text) in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, action="append", default=[], help=text.replace("%", "%%"))
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the server. Returns 0 after a signal, and 2 if it cannot start, with a line on stderr."""
    options = _arguments(argv)
    place = Place(options.host, options.port, options.unix)
    try:
        pairs = [(name, value) for name in OPTIONS for value in getattr(options, name)]
        script = apply_options(Script(), pairs)
        if options.tls_cert is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(options.tls_cert, options.tls_key)
            place = replace(place, tls=tls)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            rows = runner.run(serve(script, place, options.parent_pid))
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: cannot serve on {place}: {error.strerror or error}\n")
        return 2
    if options.log is not None:
        write_log(rows, options.log)
    return 0


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
