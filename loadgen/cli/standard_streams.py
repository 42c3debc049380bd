"""Standard streams that never fail: text that cannot be written is dropped, so a reader that leaves
does not end a run."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TextIO

_READER_LEFT = (errno.EPIPE, errno.EIO, errno.EBADF)  # a pipe, a terminal, a closed descriptor
_STREAMS = ("stdin", "stdout", "stderr")


class DroppingOutput(io.RawIOBase):
    """Unbuffered writes to a descriptor. After the first failed write, `error` holds its reason and
    everything is dropped. `fd` stays open."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd, self.error = fd, None if _is_open(fd) else OSError(errno.EBADF, "closed")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return _is_open(self._fd) and os.isatty(self._fd)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # typeshed knows no buffer before 3.12
        while self.error is None:
            try:
                return os.write(self._fd, view)
            except BlockingIOError:  # another process made the terminal non-blocking
                select.select([], [self._fd], [])
            except OSError as error:
                self.error = error
        return view.nbytes


def install() -> None:
    """Replaces sys.stdout and sys.stderr by streams that drop what they cannot write, and opens
    /dev/null for each standard stream that is closed: the number of a closed stream would otherwise
    go to the next file or socket."""
    for number, name in enumerate(_STREAMS):
        if not _is_open(number):
            _open_null(number)
            mode = "r" if name == "stdin" else "w"
            for attribute in (name, f"__{name}__"):
                setattr(sys, attribute, os.fdopen(number, mode, closefd=False))
    for number, name in ((1, "stdout"), (2, "stderr")):
        before: TextIO = getattr(sys, name)
        before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(DroppingOutput(number)),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, stream)


def output_error() -> OSError | None:
    """The reason why standard output is incomplete although its reader waits for it, such as a full
    disk. None if all was written, and if the reader has left."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, DroppingOutput) else None
    return None if error is None or error.errno in _READER_LEFT else error


def _open_null(number: int) -> None:
    fd = os.open(os.devnull, os.O_RDWR)
    if fd != number:
        os.dup2(fd, number)
        os.close(fd)
    os.set_inheritable(number, True)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
