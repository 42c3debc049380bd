"""Files that are written whole or not at all, and read whole up to a limit."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIX = ".partial"
_MOST_RESULT_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file in the same directory, which replaces `path` at the end.
    After an error it is removed and `path` is unchanged. An OSError names `path`."""
    partial = path.with_name(path.name + SUFFIX)
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        _remove(partial)
        reason = error.strerror or str(error)
        raise OSError(error.errno or 0, reason, str(path)) from error
    except BaseException:
        _remove(partial)
        raise


@contextlib.contextmanager
def opened_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a regular file. Raises OSError, also at once for anything but a regular file."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # no wait at a FIFO
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            kind = next((word for is_kind, word in _KINDS if is_kind(mode)), "no file")
            raise OSError(errno.EINVAL, f"is {kind}; expected a regular file")
        yield file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError, also for anything but a regular file and for
    more than `most_bytes`; neither is read."""
    with opened_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            limit = f"{most_bytes >> 20} MiB"
            raise OSError(errno.EFBIG, f"has {size >> 20} MiB; the limit is {limit}")
        return file.read()


def read_result(path: Path) -> str:
    """The text of a file that slobench wrote: a regular file of at most 256 MiB. Raises OSError,
    and UnicodeDecodeError for other text than UTF-8."""
    return read_regular(path, _MOST_RESULT_BYTES).decode()


class CountedFile(io.FileIO):
    """A new file; `advance` is called after each MiB that is written."""

    def __init__(self, path: Path, advance: Callable[[], None]) -> None:
        super().__init__(path, "w")
        self._advance = advance

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        n_bytes = view.nbytes
        while view:
            view = view[super().write(view[:_PIECE_BYTES]) :]
            self._advance()
        return n_bytes


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
