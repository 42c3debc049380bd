"""What runs in a worker: HTTP on a listening socket that others may share, the engine at the other
end of a channel."""

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

from loadgen.clock import Clock, MonotonicClock
from reference_engine.serving.guard import Guard
from reference_engine.serving.http_workers.channel import (
    Admitted,
    Broken,
    Bye,
    Channel,
    Closed,
    CutOff,
    FromEngine,
    Listening,
    Message,
    Open,
    RequestRefused,
    StepOutput,
    Submit,
)
from reference_engine.serving.routes.completions import CompletionRoutes
from reference_engine.serving.streams import StreamBroken, StreamProgress, TokenStream
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError

log = logging.getLogger(__name__)

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 1.0
_LEAVE_S = 1.0  # for answers to be told their end


class HttpWorker:
    """Answers on `listener` from the engine's word that it is ready until its last."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._channel: Channel[FromEngine] = Channel(FromEngine, self._on_message, self._on_end)
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Open | None] = loop.create_future()
        self._ended = asyncio.Event()
        self._link: EngineLink | None = None
        self._is_told = False

    async def run(self, end: socket.socket) -> bool:
        """Whether the engine said that it stops; else its process is gone."""
        await self._channel.open(end)
        what = await self._opened
        if what is None:
            return False
        async with self._answering(what):
            self._channel.send(Listening())
            await self._ended.wait()
        if not self._is_told:
            _sweep_up(Path(what.engine_path))
        return self._is_told

    @asynccontextmanager
    async def _answering(self, what: Open) -> AsyncIterator[None]:
        assert self._link is not None, "made of the same message"
        async with session_to(what.engine_path) as session:
            app = Guard(what.api_key, what.max_body_bytes).app(
                [
                    *CompletionRoutes(self._link, what.about, f"{what.worker}-").routes(),
                    *ForwardRoutes(session).routes(),
                ]
            )
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, shutdown_timeout=_LEAVE_S
            )
            await runner.setup()
            assert runner.server is not None, "setup makes it"
            accepting = asyncio.create_task(_accept(self._listener, runner.server))
            try:
                yield
            finally:
                accepting.cancel()
                with suppress(asyncio.CancelledError):
                    await accepting
                await runner.cleanup()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Open):
            clock = MonotonicClock(message.epoch_ns)
            self._link = EngineLink(self._channel.send, clock, message.outbox)
            self._opened.set_result(message)
        elif isinstance(message, Bye):
            self._is_told = True
        elif self._link is not None:
            self._link.take(message)

    def _on_end(self) -> None:
        if self._link is not None:
            self._link.lose()
        if not self._opened.done():
            self._opened.set_result(None)
        self._ended.set()


def _sweep_up(engine_socket: Path) -> None:
    """What an engine that was killed could not remove; another HTTP worker may be doing it, too."""
    with suppress(FileNotFoundError):
        engine_socket.unlink()
        engine_socket.parent.rmdir()


async def _accept(listener: socket.socket, server: web.Server) -> None:
    """One connection a turn: of workers that share the socket, the idle ones take more."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
            await loop.connect_accepted_socket(server, connection)
        except OSError as error:  # the next one may do better
            if error.errno in _NO_ROOM:
                log.warning("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(_PAUSE_S)


_GONE = "the engine's process has ended"


class EngineLink:
    """Stands for the service in a worker. A stream whose reader falls `outbox` deltas behind is cut
    off here, and the engine counts it."""

    def __init__(self, send: Callable[[Message], None], clock: Clock, outbox: int) -> None:
        self.clock = clock
        self._send, self._outbox = send, outbox
        self._streams: dict[int, TokenStream] = {}
        self._n_submitted = 0
        self._is_gone = False

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream:
        """Queue a call; whether the engine takes it is known when the stream is `admitted`. Raises
        WireError where there is no engine any more."""
        if self._is_gone:
            raise WireError(_GONE, status=500, type_="server_error", code="engine_failed")
        self._n_submitted += 1
        number = self._n_submitted
        stream = TokenStream(StreamProgress(arrived_s=arrived_s), lambda _: self._close(number))
        self._streams[number] = stream
        self._send(Submit(number, call, request_id, arrived_s))
        return stream

    def take(self, message: FromEngine) -> None:
        """What the engine says of a request, unless nobody reads it any more."""
        match message:
            case StepOutput(told, deltas):
                for number, facts in told:
                    if number in self._streams:
                        self._streams[number].request = facts
                for number, delta in deltas:
                    stream = self._streams.get(number)
                    if stream is None:
                        continue
                    n_unread = stream.put(delta)
                    # As in the service: behind because of the socket, not because we are late.
                    if n_unread > self._outbox and stream.is_blocked:
                        self._cut_off(number, stream)
            case Admitted(number, facts):
                if number in self._streams:
                    self._streams[number].request = facts
                    self._streams[number].admit()
            case RequestRefused(number):
                self._fail(number, message.error())
            case Broken(number, why, status):
                self._fail(number, StreamBroken(why, status))

    def lose(self) -> None:
        """The engine is gone: tell every reader."""
        self._is_gone = True
        for number in list(self._streams):
            self._fail(number, StreamBroken(_GONE))

    def _fail(self, number: int, why: Exception) -> None:
        if number in self._streams:
            self._streams[number].fail(why)

    def _cut_off(self, number: int, stream: TokenStream) -> None:
        del self._streams[number]
        self._send(CutOff(number))
        stream.cut_off()

    def _close(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._send(Closed(number))


_ASKED = ("x-tenant", "x-actor")  # all that the engine looks at
_TOLD = ("Content-Type", "Content-Length", "Retry-After")


class ForwardRoutes:
    """Everything that has no route before it."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{path:.*}", self.forward)]

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        url = URL(f"http://engine{request.rel_url.raw_path_qs}", encoded=True)
        headers = {name: _text(name, request) for name in _ASKED if name in request.headers}
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                told = {name: answer.headers[name] for name in _TOLD if name in answer.headers}
                return web.Response(body=await answer.read(), status=answer.status, headers=told)
        except ClientError as error:
            raise WireError(
                f"the engine's process does not answer: {error}", status=500, type_="server_error"
            ) from error


def session_to(engine_path: str) -> ClientSession:
    """For any number of questions at once, however long they take."""
    connector = UnixConnector(engine_path, limit=0)
    return ClientSession(connector=connector, timeout=ClientTimeout(total=None))


def _text(name: str, request: web.Request) -> str:
    value = request.headers[name]
    if not value.isprintable():  # bytes that are no UTF-8 come as lone surrogates
        raise WireError(f"the header {name} must be printable", param=name)
    return value


async def _run(channel: int, listener: int) -> int:
    worker = HttpWorker(socket.socket(fileno=listener))
    gc.freeze()  # what is there by now stays
    if await worker.run(socket.socket(fileno=channel)):
        return 0
    logging.getLogger("reference_engine").error("the engine's process is gone; leaving")
    return 1


def main(arguments: list[str]) -> int:
    # Who stops a server may signal all of its processes. A worker has answers to bring to their
    # end, and leaves when its channel does.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    channel, listener = map(int, arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(channel, listener))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
