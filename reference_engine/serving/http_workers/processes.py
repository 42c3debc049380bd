"""Front processes beside the engine's: started with it, opened when it is ready, and gone before
it is. One that dies ends the server."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

from aiohttp import web

from loadgen.errors import SlobenchError
from reference_engine.serving.http_workers.channel import Open
from reference_engine.serving.http_workers.worker_link import WorkerLink
from reference_engine.serving.service import Service

log = logging.getLogger("reference_engine")

_OPEN_S = 30.0  # to accept connections, once the model is there
_LEAVE_S = 5.0
_LONGEST_DIRECTORY = 100 - len("/slobench-12345678/engine.sock")  # a socket's path has 108 bytes


What = Callable[[int, str], Open]


class HttpWorkerLost(SlobenchError):
    """A process that spoke HTTP ended unasked, and the server with it."""


class HttpWorkerProcess:
    """One that has been told nothing yet."""

    def __init__(self, listener: socket.socket) -> None:
        self.end, theirs = socket.socketpair()
        with theirs:
            inherited = theirs.fileno(), listener.fileno()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "reference_engine.serving.http_workers.http_worker",
                    *map(str, inherited),
                ],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C is the engine's to answer
            )

    def leave(self) -> None:
        """Wait for its end, which follows that of its channel."""
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            log.warning("HTTP worker %d does not end; killed", self._process.pid)
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.end.close()

    def fate(self) -> str:
        """What became of one whose channel has ended."""
        self.leave()
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"HTTP worker {self._process.pid} ended ({how}), and the server with it"


class HttpWorkers:
    """`n` processes that share a listening socket. They import while the model is loading."""

    def __init__(self, n: int, listener: socket.socket) -> None:
        self.is_one_lost = False
        self._workers = [HttpWorkerProcess(listener) for _ in range(n)]

    def __len__(self) -> int:
        return len(self._workers)

    def __enter__(self) -> HttpWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()

    @asynccontextmanager
    async def answering(
        self, service: Service, app: web.Application, what: What, stopping: asyncio.Event
    ) -> AsyncIterator[None]:
        """Completions by the workers, and all else through them by `app`; `what` they are told,
        given a worker's number and the path of its socket. When one of them dies `stopping` is set
        and the draining broken off, and HttpWorkerLost raised at the end."""

        def lose() -> None:
            self.is_one_lost = True
            stopping.set()
            service.hurry()

        links = [WorkerLink(service, lose) for _ in self._workers]
        with _private_directory() as directory:
            path = f"{directory}/engine.sock"
            async with _on_unix_socket(app, path):
                try:
                    pairs = zip(self._workers, links, strict=True)
                    opening = [
                        link.open(worker.end, what(number, path))
                        for number, (worker, link) in enumerate(pairs, start=1)
                    ]
                    await _unless(stopping, asyncio.gather(*opening))
                    _check(self._workers, links)
                    yield
                finally:
                    for link in links:
                        link.close()
                    leaving = [asyncio.to_thread(worker.leave) for worker in self._workers]
                    await asyncio.gather(*leaving)
        _check(self._workers, links)


async def _unless(stopping: asyncio.Event, opening: asyncio.Future[list[None]]) -> None:
    """Wait for the workers to open, but not when the server stops. Raises HttpWorkerLost when
    one of them hangs."""
    stop = asyncio.ensure_future(stopping.wait())
    either: list[asyncio.Future[Any]] = [opening, stop]
    try:
        done, _ = await asyncio.wait(either, timeout=_OPEN_S, return_when=asyncio.FIRST_COMPLETED)
        if opening in done:
            opening.result()
    finally:
        for one in either:
            one.cancel()
    if not done:
        raise HttpWorkerLost(f"an HTTP worker does not begin within {_OPEN_S:g} s")


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """For a socket, whose path must be short."""
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= _LONGEST_DIRECTORY
    return tempfile.TemporaryDirectory(prefix="slobench-", dir=usual if is_short else "/tmp")


def _check(workers: Sequence[HttpWorkerProcess], links: Sequence[WorkerLink]) -> None:
    for worker, link in zip(workers, links, strict=True):
        if link.is_lost:
            raise HttpWorkerLost(worker.fate())


@asynccontextmanager
async def _on_unix_socket(app: web.Application, path: str) -> AsyncIterator[None]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.UnixSite(runner, path, backlog=1024).start()
        yield
    finally:
        await runner.cleanup()
