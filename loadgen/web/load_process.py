"""The process beside a worker that generates load: `python -m loadgen.web.load_process DIR`.

It is a shard like those of `slobench run`, but for where its task comes from: on stdin, as the
messages `assign` and `piece`, each behind its length. After that the same lines go in and come out.
Neither locust nor gevent is in it. It ends when its worker does.
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
    signal.signal(signal.SIGTERM, _leave)
    _die_with_parent()
    prepare()
    assert not {"gevent", "locust"} & set(sys.modules), "the generator's process is patched"
    out = Outbox(1)
    try:
        for plugin in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            load_plugin(Path(plugin))
        assign, data = _assignment(0)
        own = os.environ.get(TARGET)
        task = task_of(assign, data, os.environ, Path(own) if own else None, Path(sys.argv[1]))
        out.say("task", sha256=fingerprint(task))
    except (SlobenchError, Bad) as error:
        out.say("refused", reason=str(error))
        return
    serve(task, 0, out.say, at_end=lambda: clear_up(0, Path(sys.argv[1])))


class Outbox:
    """JSON lines out, without ever waiting: the worker may be stopped for seconds, and a full pipe
    would stop the clock of the run. What does not fit goes with the next line; the last line is
    waited for."""

    def __init__(self, fd: int) -> None:
        self._fd, self._left = fd, bytearray()
        os.set_blocking(fd, False)

    def say(self, kind: str, **fields: object) -> None:
        self._left += json.dumps({"kind": kind, **fields}).encode() + b"\n"
        if kind in ("done", "refused"):
            os.set_blocking(self._fd, True)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._left:
                del self._left[: os.write(self._fd, self._left)]


def _assignment(fd: int) -> tuple[Assign, bytes]:
    assign = _message(fd)
    if not isinstance(assign, Assign):
        raise Bad(f"expected an assignment, not {type(assign).__name__}")
    load = PieceAssembler(assign.n_pieces)
    while not load.is_whole:
        piece = _message(fd)
        if not isinstance(piece, LoadPiece):
            raise Bad(f"expected a piece, not {type(piece).__name__}")
        load.add(piece)
    return assign, load.data()


def _message(fd: int) -> object:
    size = int.from_bytes(_exactly(fd, 4), "big")
    if size > MAX_BYTES:
        raise Bad(f"a message of {size} bytes")
    return read_down(_exactly(fd, size))


def _exactly(fd: int, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = os.read(fd, size - len(found))
        if not data:
            _leave()  # the worker is gone before it said all
        found += data
    return bytes(found)


def clear_up(commands_fd: int, folder: Path) -> None:
    """Remove `folder` if whoever commanded, and would have asked for its rows, is gone: a killed
    worker's pipe ends a moment before its death is signalled. The descriptor must not block."""
    with contextlib.suppress(BlockingIOError):  # it is there, and has nothing to say
        while os.read(commands_fd, 65536):
            pass
        shutil.rmtree(folder, ignore_errors=True)


def _leave(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """At once, with what was recorded: nobody is left to ask for it."""
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(128 + number if number else 0)


def _die_with_parent() -> None:
    """Linux only; elsewhere the end of stdin ends the run."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked
        _leave()


if __name__ == "__main__":
    main()
