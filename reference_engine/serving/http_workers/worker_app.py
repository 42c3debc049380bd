"""What runs in a worker: HTTP on a listening socket that others may share, the engine at the other
end of a channel."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from loadgen.clock import MonotonicClock
from reference_engine.serving.guard import Guard
from reference_engine.serving.http_workers.channel import Channel
from reference_engine.serving.http_workers.engine_link import EngineLink
from reference_engine.serving.http_workers.engine_messages import Bye, FromEngine, Listening, Open
from reference_engine.serving.routes.completions import CompletionRoutes
from reference_engine.serving.routes.forward import ForwardRoutes, session_to

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
