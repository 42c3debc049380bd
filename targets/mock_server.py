"""A scripted OpenAI-compatible server, for tests and for proving the instrument: it does what it is
told, on time, and writes down what it really did.

    python -m targets.mock_server --ttft 50ms --itl 10ms --fail cut:5% --log truth.csv

Prints `READY http://host:port`, or `READY unix:/path`, on stdout. A request may change its own
script with an `x-mock: ttft=80ms,fail=hang` header; its number, which decides what fails, is its
`x-seq` header if it has one. Every write has an absolute deadline on one timer; the log holds the
instants of CLOCK_MONOTONIC, so a client on the same machine can subtract.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import httptools
import msgspec

from loadgen.errors import UsageError
from targets import mock_wire as wire
from targets.mock_reply import LogRow, Replies, Reply, write_log
from targets.mock_script import OPTIONS, Script, apply_options, split_options

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST


class RequestFields(msgspec.Struct):
    """The parts of a request body the mock looks at."""

    model: str = ""
    prompt: str = ""
    messages: list[dict[str, Any]] = []
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    temperature: float | None = None

    def names(self, key: str) -> bool:
        """Whether the body uses a field of REJECTABLE."""
        if key == "continuous_usage_stats":
            return key in (self.stream_options or {})
        value = getattr(self, key)
        return value is not None and value is not False

    @property
    def limit(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def text(self) -> str:
        contents = [str(message.get("content") or "") for message in self.messages]
        return "".join(contents) or self.prompt


_DECODER = msgspec.json.Decoder(RequestFields)


class MockConnection(asyncio.Protocol):
    """One client connection: HTTP/1.1 with keep-alive; pipelined requests wait for the reply before
    them.
    """

    def __init__(self, replies: Replies) -> None:
        self.replies, self.id = replies, replies.n_connections
        replies.n_connections += 1
        self.reply: Reply | None = None
        self._waiting: deque[tuple[str, str, dict[str, str], bytes, int, bool]] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._keep_alive = True
        self._reset_message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is not None:
            self._end("aborted")
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a mistake of ours, not the client's
        except httptools.HttpParserError:
            self.write(wire.whole_response(400, wire.error_body(400, "not an HTTP/1.1 request")))
            self.transport.close()

    # httptools calls these while it parses.
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
        request = (method, self._url, self._headers, b"".join(self._body))
        self._waiting.append((*request, time.monotonic_ns(), self._parser.should_keep_alive()))
        self._reset_message()
        if self.reply is None:
            self._next()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def finish(self, data: bytes) -> None:
        """The end of the present reply; the next request of this connection may be answered."""
        self.write(data)
        self._end(None)
        self._next()

    def cut(self) -> None:
        self._end(None)
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
            method, url, headers, body, read_ns, self._keep_alive = self._waiting.popleft()
            path = url.partition("?")[0]
            if method == "POST" and path.endswith("/completions"):
                self._post(path, headers, body, read_ns)
            else:
                self.write(self._get(method, path))
        if self.reply is None and not self._keep_alive:
            self.transport.close()

    def _get(self, method: str, path: str) -> bytes:
        if method == "GET" and path.endswith("/v1/models"):
            return wire.whole_response(200, wire.models_body(self.replies.script))
        if method == "GET" and path.endswith("/health"):
            return wire.whole_response(200, b"{}")
        return wire.whole_response(404, wire.error_body(404, f"no route {method} {path}"))

    def _post(self, path: str, headers: dict[str, str], body: bytes, read_ns: int) -> None:
        replies = self.replies
        number = len(replies.rows)
        seq = headers.get("x-seq", "")
        is_number = seq.isascii() and seq.isdigit()
        api = "chat" if path.endswith("/chat/completions") else "completions"
        row = LogRow(int(seq) if is_number else -1, number, self.id, api, read_ns=read_ns)
        replies.begin(row)
        refusal, script = None, replies.script
        try:
            script = apply_options(script, split_options(headers.get("x-mock", "")))
            ask = _DECODER.decode(body)
            refusal = refuse(script, ask, headers, api)
        except (ValueError, UsageError) as error:
            ask, refusal = RequestFields(), (400, wire.error_body(400, str(error)))
        failure = script.failure(row.seq if row.seq >= 0 else number)
        if refusal is None and failure is not None and failure.isdigit():
            refusal = int(failure), wire.error_body(int(failure), f"scripted failure {failure}")
        self.reply = self._reply(row, ask, script, failure)
        if refusal is not None:
            row.outcome = str(refusal[0])
            self.reply.refuse(wire.whole_response(*refusal))
        elif failure != "hang":
            self.reply.start()

    def _reply(self, row: LogRow, ask: RequestFields, script: Script, failure: str | None) -> Reply:
        is_chat = row.api == "chat"
        limit = ask.limit
        tokens, finish = script.output_tokens(limit, ask.ignore_eos)
        row.asked_tokens = script.tokens if limit is None else limit
        row.prompt_tokens = script.prompt_tokens(ask.text, is_chat)
        row.outcome = failure or "ok"
        options = ask.stream_options or {}
        wants = bool(options.get("include_usage")) and script.usage == "on"
        text = wire.ReplyText(
            script=script,
            number=row.number,
            is_chat=is_chat,
            model=ask.model or script.models[0],
            prompt_tokens=row.prompt_tokens,
            tokens=tokens,
            finish=finish,
            wants_usage=wants,
            continuous=wants and bool(options.get("continuous_usage_stats")),
        )
        return Reply(self.replies, self, script, row, text, ask.stream, failure)


def refuse(
    script: Script, ask: RequestFields, headers: dict[str, str], api: str
) -> tuple[int, bytes] | None:
    """The (status, body) a request is refused with before anything is generated, as vLLM would;
    None if it is fine.
    """
    if script.api_key is not None and headers.get("authorization") != f"Bearer {script.api_key}":
        return 401, wire.error_body(401, "Incorrect API key provided", code="invalid_api_key")
    for key in script.rejects:
        if ask.names(key):
            message = f"Unrecognized request argument supplied: {key}"
            if key == "max_tokens":  # in the words of hosted reasoning models
                message = "'max_tokens' is not supported; use 'max_completion_tokens' instead."
            return 400, wire.error_body(400, message, param=key)
    if ask.model and ask.model not in script.models:
        return 404, wire.error_body(404, f"The model `{ask.model}` does not exist.", "model")
    limit = ask.limit
    if limit is not None and limit < 1:
        return 400, wire.error_body(400, f"max_tokens is {limit}; at least 1", "max_tokens")
    total = script.prompt_tokens(ask.text, api == "chat") + (limit or script.tokens)
    if script.max_model_len is not None and total > script.max_model_len:
        message = f"maximum context length is {script.max_model_len} tokens, asked for {total}"
        return 400, wire.error_body(400, message, code="context_length_exceeded")
    return None


@dataclass(frozen=True)
class Place:
    """Where to listen: a TCP port (0: any free one), or the socket file `unix` if that is named."""

    host: str
    port: int
    unix: Path | None = None
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"unix:{self.unix}" if self.unix is not None else f"{self.host}:{self.port}"

    async def listen(
        self, loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Server, str]:
        """The listener and the URL it is reached by."""
        if self.unix is not None:
            path = str(self.unix)
            return await loop.create_unix_server(connection, path, backlog=4096), f"unix:{path}"
        listener = await loop.create_server(
            connection, self.host, self.port, ssl=self.tls, backlog=4096
        )
        port = listener.sockets[0].getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return listener, f"{'https' if self.tls else 'http'}://{host}:{port}"


async def serve(script: Script, place: Place, parent_pid: int | None) -> list[LogRow]:
    """Serve until SIGTERM, SIGINT or the parent's end; the rows of the log, in order of arrival."""
    loop = asyncio.get_running_loop()
    replies = Replies(script, loop)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
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
        """One line, without the usage block."""
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m targets.mock_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--unix", type=Path, help="a socket file to listen on instead")
    parser.add_argument("--log", type=Path, help="CSV of what really happened, written at exit")
    parser.add_argument("--tls-cert", type=Path, help="PEM file; serve https")
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--parent-pid", type=int, help="end when this parent has gone")
    for name, (_, _, text) in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, action="append", default=[], help=text.replace("%", "%%"))
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the server; 0 when it was told to end, 2 with one line on stderr when it cannot start."""
    options = _arguments(argv)
    place = Place(options.host, options.port, options.unix)
    try:
        given = [(name, value) for name in OPTIONS for value in getattr(options, name)]
        script = apply_options(Script(), given)
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
