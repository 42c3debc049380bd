"""Files that are written whole or not at all, and read whole up to a limit."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".partial"
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


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError, also for anything but a regular file and for
    more than `most_bytes`; neither is read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # no wait at a FIFO
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            kind = next((word for is_kind, word in _KINDS if is_kind(state.st_mode)), "no file")
            raise OSError(errno.EINVAL, f"is {kind}; expected a regular file")
        if state.st_size > most_bytes:
            limit = f"{most_bytes >> 20} MiB"
            raise OSError(errno.EFBIG, f"has {state.st_size >> 20} MiB; the limit is {limit}")
        return file.read()


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
