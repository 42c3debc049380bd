"""The load process next to a worker: `python -m loadgen.web.load_process DIR
PROGRESS_FD`.

It is a shard like those of `slobench run`, but receives its task on stdin, as the messages `assign`
and `piece`, each after its length. After that the same lines go in and out. It imports neither
locust nor gevent. It ends when its worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from loadgen.cli.scale import PLUGINS, TARGET
from loadgen.drive.shard import prepare, serve
from loadgen.drive.stall_watch import ProgressCounter
from loadgen.errors import SlobenchError
from loadgen.plugins import load_plugin
from loadgen.web.assignment import fingerprint, task_of
from loadgen.web.control_messages import (
    MAX_BYTES,
    Assign,
    Bad,
    LoadPiece,
    PieceAssembler,
    read_down,
)

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGTERM, _exit_at_once)
    _die_with_parent()
    prepare()
    assert not {"gevent", "locust"} & set(sys.modules), "the load process is patched"
    out = Outbox(1)
    try:
        for plugin in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            load_plugin(Path(plugin))
        assign, data = _assignment(0)
        target_file = os.environ.get(TARGET)
        task = task_of(
            assign, data, os.environ, Path(target_file) if target_file else None, Path(sys.argv[1])
        )
        out.write("task", sha256=fingerprint(task))
    except (SlobenchError, Bad) as error:
        out.write("refused", reason=str(error))
        return
    progress = ProgressCounter(int(sys.argv[2]))
    serve(task, 0, out.write, progress, lambda: remove_if_orphaned(0, Path(sys.argv[1])))


class Outbox:
    """Writes JSON lines without blocking: the worker may stop for seconds, and a write to a full
    pipe would stop the clock of the run. Unwritten bytes go out with the next line; only the last
    line blocks."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pending = fd, bytearray()
        os.set_blocking(fd, False)

    def write(self, kind: str, **fields: object) -> None:
        self._pending += json.dumps({"kind": kind, **fields}).encode() + b"\n"
        if kind in ("done", "refused"):
            os.set_blocking(self._fd, True)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._pending:
                del self._pending[: os.write(self._fd, self._pending)]


def _assignment(fd: int) -> tuple[Assign, bytes]:
    assign = _message(fd)
    if not isinstance(assign, Assign):
        raise Bad(f"expected an assignment, received {type(assign).__name__}")
    load = PieceAssembler(assign.n_pieces)
    while not load.is_whole:
        piece = _message(fd)
        if not isinstance(piece, LoadPiece):
            raise Bad(f"expected a piece, received {type(piece).__name__}")
        load.add(piece)
    return assign, load.data()


def _message(fd: int) -> object:
    size = int.from_bytes(_exactly(fd, 4), "big")
    if size > MAX_BYTES:
        raise Bad(f"a message of {size} bytes exceeds the limit of {MAX_BYTES} bytes")
    return read_down(_exactly(fd, size))


def _exactly(fd: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        data = os.read(fd, size - len(received))
        if not data:
            _exit_at_once()  # the worker ended before its message was complete
        received += data
    return bytes(received)


def remove_if_orphaned(commands_fd: int, folder: Path) -> None:
    """Removes `folder` if the worker, the reader of its rows, has ended: a killed worker's pipe
    closes a moment before the signal of its death arrives. The descriptor must not block."""
    with contextlib.suppress(BlockingIOError):  # the pipe is open and empty: the worker runs
        while os.read(commands_fd, 65536):
            pass
        shutil.rmtree(folder, ignore_errors=True)


def _exit_at_once(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """Exits without cleanup handlers and removes the recorded rows: no process is left to read
    them."""
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(128 + number if number else 0)


def _die_with_parent() -> None:
    """Ends this process with its parent. Linux only; elsewhere the end of stdin ends the run."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the prctl call
        _exit_at_once()


if __name__ == "__main__":
    main()
