"""The HTTP worker processes of a server: started before the engine, opened when it is ready, ended
before it ends. If a worker dies, the server ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from loadgen.errors import SlobenchError
from reference_engine.serving.guard import running
from reference_engine.serving.http_workers.channel import Open
from reference_engine.serving.http_workers.worker_link import WorkerLink
from reference_engine.serving.service import Service

log = logging.getLogger("reference_engine")

_OPEN_S = 30.0  # limit for accepting connections after the engine is ready
_LEAVE_S = 5.0
# The path of a socket has at most 107 bytes.
_LONGEST_DIRECTORY = 100 - len("/slobench-12345678/engine.sock")
_PROGRAM = "reference_engine.serving.http_workers.http_worker"


class HttpWorkerLost(SlobenchError):
    """An HTTP worker ended or hung, so the server ends with exit code 4."""


class HttpWorkerProcess:
    """A process that waits for `Open` on its channel."""

    def __init__(self, listener: socket.socket) -> None:
        self.end, child_end = socket.socketpair()
        with child_end:
            inherited = child_end.fileno(), listener.fileno()
            self._process = subprocess.Popen(
                # -P: modules in the working directory must not shadow the standard library's.
                [sys.executable, "-P", "-m", _PROGRAM, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # so that Ctrl-C in a terminal reaches only the engine
            )

    def leave(self) -> None:
        """Wait for the process to end after its channel was closed; kill it after 5 s."""
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
        """How a lost process ended."""
        self.leave()
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"HTTP worker {self._process.pid} ended ({how}), so the server ends"


class HttpWorkers:
    """`n` processes that share a listening socket. They start at once, so that they import while
    the model is loading."""

    def __init__(self, n: int, listener: socket.socket) -> None:
        self.is_one_lost = False
        self._workers = [HttpWorkerProcess(listener) for _ in range(n)]

    def __len__(self) -> int:
        return len(self._workers)

    def __enter__(self) -> HttpWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()

    @asynccontextmanager
    async def answering(
        self, service: Service, app: web.Application, opening: Open, stopping: asyncio.Event
    ) -> AsyncIterator[None]:
        """Serve while the block runs: the workers serve completions, and forward everything else
        to `app`. Each worker gets `opening` with its number and the path of the socket.

        If a worker dies, `stopping` is set, draining ends, and HttpWorkerLost is raised at the end.
        """

        def lose() -> None:
            self.is_one_lost = True
            stopping.set()
            service.hurry()

        links = [WorkerLink(service, lose) for _ in self._workers]
        pairs = list(zip(self._workers, links, strict=True))
        with _private_directory() as directory:
            path = f"{directory}/engine.sock"
            async with running(app) as runner:
                await web.UnixSite(runner, path, backlog=1024).start()
                try:
                    opened = [
                        link.open(
                            worker.end,
                            msgspec.structs.replace(opening, worker=number, engine_path=path),
                        )
                        for number, (worker, link) in enumerate(pairs, start=1)
                    ]
                    await _unless(stopping, asyncio.gather(*opened))
                    _check(pairs)
                    yield
                finally:
                    for link in links:
                        link.close()
                    leaving = [asyncio.to_thread(worker.leave) for worker in self._workers]
                    await asyncio.gather(*leaving)
        _check(pairs)


async def _unless(stopping: asyncio.Event, opened: asyncio.Future[list[None]]) -> None:
    """Wait until all workers are open or the server stops. Raises HttpWorkerLost if a worker
    hangs."""
    stop = asyncio.ensure_future(stopping.wait())
    either: list[asyncio.Future[Any]] = [opened, stop]
    try:
        done, _ = await asyncio.wait(either, timeout=_OPEN_S, return_when=asyncio.FIRST_COMPLETED)
        if opened in done:
            opened.result()
    finally:
        for future in either:
            future.cancel()
    if not done:
        raise HttpWorkerLost(f"an HTTP worker did not start within {_OPEN_S:g} s")


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory for a socket, in /tmp if the usual place makes the socket's path too long."""
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= _LONGEST_DIRECTORY
    return tempfile.TemporaryDirectory(prefix="slobench-", dir=usual if is_short else "/tmp")


def _check(pairs: Sequence[tuple[HttpWorkerProcess, WorkerLink]]) -> None:
    for worker, link in pairs:
        if link.is_lost:
            raise HttpWorkerLost(worker.fate())
