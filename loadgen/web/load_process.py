"""The load process next to a worker: `python -m loadgen.web.load_process DIR PROGRESS_FD`.

It is a shard like those of `slobench run`, but receives its task on stdin, as the messages `assign`
and `piece`, each after its length. After that the same lines go in and out. It imports neither
locust nor gevent. When its worker ends, its input ends: it sends no more and writes its rows to
DIR, where `slobench collect` finds them.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path

from loadgen.archive.collect import DONE, KeptShare
from loadgen.archive.store import join_parts, joined, part_bytes, part_of_file, read_parts
from loadgen.cli.scale import PLUGINS, TARGET
from loadgen.drive.recorder import log
from loadgen.drive.shard import own_stdout, prepare, serve
from loadgen.drive.stall_watch import ProgressCounter
from loadgen.drive.worker_messages import MessageWriter, ReceivedParts, part_messages
from loadgen.errors import SlobenchError
from loadgen.system.plugins import load_plugin
from loadgen.web.assignment import fingerprint, task_of
from loadgen.web.control_messages import (
    MAX_BYTES,
    Assign,
    Bad,
    LoadPiece,
    PieceAssembler,
    read_down,
)


def main() -> None:
    prepare()
    assert not {"gevent", "locust"} & set(sys.modules), "the load process is patched"
    folder = Path(sys.argv[1])
    out = Outbox(own_stdout(), folder)
    try:
        for plugin in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            load_plugin(Path(plugin))
        assign, data = _assignment(0)
        target_file = os.environ.get(TARGET)
        task = task_of(assign, data, os.environ, Path(target_file) if target_file else None, folder)
        KeptShare(folder, assign.run, assign.shard).note()
        out.write("task", sha256=fingerprint(task))
    except (SlobenchError, Bad) as error:
        out.write("refused", reason=str(error))
        return
    progress = ProgressCounter(int(sys.argv[2]))
    serve(task, 0, out.write, progress, lambda: remove_if_empty(folder))


class Outbox:
    """Writes messages. The rows are joined into the last part, or, if the disk is full, sent ahead
    of `done`; the self-report of `done` goes to `folder`, too, next to the rows."""

    def __init__(self, fd: int, folder: Path) -> None:
        self._messages, self._folder = MessageWriter(fd), folder
        self._unwritten = ReceivedParts()

    def write(self, kind: str, **fields: object) -> None:
        if kind == "part":
            self._unwritten.add(fields)
            return
        if kind == "done":
            try:
                self._join()
                (self._folder / DONE).write_text(json.dumps(fields["instrument"]))
            except OSError as error:
                log(f"{self._folder}: {error.strerror}")
                self._send_rows()
        self._messages.write(kind, **fields)

    def _join(self) -> None:
        """Raises OSError if rows are in memory only, too."""
        for last in self._folder.glob("shard-*.npz"):
            if last.stem.count("-") == 1:  # the others have a second number
                join_parts(last)
        if self._unwritten.whole:
            raise OSError(errno.ENOSPC, "its rows go to the master, and no copy stays")

    def _send_rows(self) -> None:
        parts = read_parts(self._folder)
        for name, content in self._unwritten.whole.items():
            parts.append(part_of_file(io.BytesIO(content), name))
        for message in part_messages("rows", part_bytes(*joined(parts))):
            self._messages.write("part", **message)


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
            shutil.rmtree(sys.argv[1], ignore_errors=True)
            os._exit(0)  # the worker ended before its message was complete
        received += data
    return bytes(received)


def remove_if_empty(folder: Path) -> None:
    """Removes a share's folder that holds no rows: the run ended before it began."""
    if not any(folder.glob("shard-*.npz")):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
