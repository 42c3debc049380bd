"""The program of an HTTP worker process: HTTP on a listening socket that other workers may share,
and a channel to the engine.

    python -m reference_engine.serving.http_workers.http_worker CHANNEL LISTENER

CHANNEL and LISTENER are inherited file descriptors. The engine's process starts the program
(`processes`).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvloop
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from yarl import URL

from loadgen.system.clock import Clock, MonotonicClock
from loadgen.system.endings import ending_signals
from reference_engine.serving.guard import Guard, running
from reference_engine.serving.http_workers import channel
from reference_engine.serving.routes.completions import CompletionRoutes
from reference_engine.serving.streams import StreamProgress, TokenStream
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError

log = logging.getLogger("reference_engine")

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 1.0
_GONE = "the engine's process has ended"
_REQUEST_HEADERS = ("Content-Type", "x-tenant", "x-actor")  # all that the engine's routes read
_RESPONSE_HEADERS = ("Content-Type", "Content-Length", "Retry-After")


class HttpWorker:
    """Serves HTTP on `listener` from the engine's `Open` until its `Bye`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._channel: channel.Channel[channel.FromEngine] = channel.Channel(
            channel.FromEngine, self._on_message, self._on_end
        )
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[channel.Open | None] = loop.create_future()
        self._ended = asyncio.Event()
        self._link: EngineLink | None = None
        self._has_bye = False

    async def run(self, end: socket.socket) -> bool:
        """Serve until the channel ends. Returns whether the engine said goodbye; if not, its
        process has died."""
        await self._channel.open(end)
        opening = await self._opened
        if opening is None:
            return False
        async with self._answering(opening):
            self._channel.send(channel.Listening())
            await self._ended.wait()
        if not self._has_bye:
            _clean_up(Path(opening.engine_path))
        return self._has_bye

    @asynccontextmanager
    async def _answering(self, opening: channel.Open) -> AsyncIterator[None]:
        assert self._link is not None, "the link is made when Open arrives"
        completions = CompletionRoutes(self._link, opening.identity)
        guard = Guard(
            opening.api_key,
            opening.max_body_bytes,
            opening.cors,
            opening.operator_token,
            opening.names,
        )
        # No limits on connections or time: a forwarded request may take as long as the engine does.
        connector = UnixConnector(opening.engine_path, limit=0)
        async with (
            ClientSession(connector=connector, timeout=ClientTimeout(total=None)) as session,
            running(guard.app([*completions.routes(), *forward_routes(session)])) as runner,
        ):
            assert runner.server is not None, "setup makes it"
            accepting = asyncio.create_task(_accept(self._listener, runner.server))
            try:
                yield
            finally:
                accepting.cancel()
                with suppress(asyncio.CancelledError):
                    await accepting

    def _on_message(self, message: channel.FromEngine) -> None:
        if isinstance(message, channel.Open):
            clock = MonotonicClock(message.epoch_ns)
            self._link = EngineLink(self._channel.send, clock, message.outbox)
            self._opened.set_result(message)
        elif isinstance(message, channel.Bye):
            self._has_bye = True
        elif self._link is not None:
            self._link.receive(message)

    def _on_end(self) -> None:
        if self._link is not None:
            self._link.lose()
        if not self._opened.done():
            self._opened.set_result(None)
        self._ended.set()


class EngineLink:
    """Takes the place of the service in an HTTP worker. A stream whose reader falls `outbox` deltas
    behind is cut off here; the engine counts it."""

    def __init__(self, send: Callable[[channel.Message], None], clock: Clock, outbox: int) -> None:
        self.clock = clock
        self._send, self._outbox = send, outbox
        self._streams: dict[int, TokenStream] = {}
        self._n_submitted = 0
        self._is_gone = False

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream:
        """Send a call to the engine; `TokenStream.admitted` returns once the engine has admitted
        the request. Raises WireError if the engine is gone."""
        if self._is_gone:
            raise WireError(_GONE, status=500, code="engine_failed")
        self._n_submitted += 1
        number = self._n_submitted
        stream = TokenStream(StreamProgress(arrived_s=arrived_s), lambda _: self._close(number))
        self._streams[number] = stream
        self._send(channel.Submit(number, call, request_id, arrived_s))
        return stream

    def receive(self, message: channel.FromEngine) -> None:
        """Pass a message to its streams; streams that are closed are skipped."""
        match message:
            case channel.StepOutput(progress, deltas):
                for number, request in progress:
                    if number in self._streams:
                        self._streams[number].request = request
                for number, delta in deltas:
                    stream = self._streams.get(number)
                    if stream is None:
                        continue
                    n_unread = stream.put(delta)
                    # A backlog counts only if the socket is full; this loop may be late itself.
                    if n_unread > self._outbox and stream.is_blocked:
                        self._cut_off(number, stream)
            case channel.Admitted(number, request):
                if number in self._streams:
                    self._streams[number].request = request
                    self._streams[number].admit()
            case channel.Failed(number):
                self._fail(number, message.error())

    def lose(self) -> None:
        """Fail every stream, because the engine is gone."""
        self._is_gone = True
        for number in list(self._streams):
            self._fail(number, WireError(_GONE, status=500))

    def _fail(self, number: int, error: WireError) -> None:
        if number in self._streams:
            self._streams[number].fail(error)

    def _cut_off(self, number: int, stream: TokenStream) -> None:
        del self._streams[number]
        self._send(channel.CutOff(number))
        stream.cut_off()

    def _close(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._send(channel.Closed(number))


def forward_routes(session: ClientSession) -> list[web.RouteDef]:
    """A route for all other requests, which forwards them to the engine's process."""

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        url = URL(f"http://engine{request.rel_url.raw_path_qs}", encoded=True)
        sent = {key: _printable(key, request) for key in _REQUEST_HEADERS if key in request.headers}
        try:
            async with session.request(
                request.method, url, data=body or None, headers=sent, allow_redirects=False
            ) as answer:
                headers = {k: answer.headers[k] for k in _RESPONSE_HEADERS if k in answer.headers}
                content = await answer.read()
                return web.Response(body=content, status=answer.status, headers=headers)
        except ClientError as error:
            message = f"the engine's process does not respond: {error}"
            raise WireError(message, status=500) from error

    return [web.route("*", "/{path:.*}", forward)]


def _printable(name: str, request: web.Request) -> str:
    value = request.headers[name]
    if not value.isprintable():  # bytes that are not UTF-8 are lone surrogates here
        raise WireError(f"the header {name} must be printable text", param=name)
    return value


def _clean_up(engine_socket: Path) -> None:
    """Remove the socket of an engine that was killed; another worker may do so at the same time."""
    with suppress(FileNotFoundError):
        engine_socket.unlink()
        engine_socket.parent.rmdir()


async def _accept(listener: socket.socket, server: web.Server) -> None:
    """Accept a connection per turn of the event loop. Workers share the socket, and idle workers
    turn faster, so they take more connections."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
            await loop.connect_accepted_socket(server, connection)
        except OSError as error:  # of this connection only
            if error.errno in _NO_ROOM:
                log.warning("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(_PAUSE_S)


async def _run(channel_fd: int, listener_fd: int) -> int:
    worker = HttpWorker(socket.socket(fileno=listener_fd))
    gc.freeze()  # what was imported lives as long as the process
    if await worker.run(socket.socket(fileno=channel_fd)):
        return 0
    log.error("the engine's process is gone; leaving")
    return 1


def main(arguments: list[str]) -> int:
    """Run until the channel ends; returns the exit code."""
    # A service manager may signal every process of a server. A worker has answers to complete, and
    # ends when its channel does.
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    channel_fd, listener_fd = map(int, arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(channel_fd, listener_fd))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
