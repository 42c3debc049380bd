"""Lock of a directory that a single process may write.

The lock is an flock on a file in the directory, which names the holder. The kernel releases it with
the process, so the file of a dead process never blocks. On a file system without locks there is
none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from loadgen.errors import UsageError

NAME = ".slobench.lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_POLL_S = 0.05


@contextlib.contextmanager
def held(directory: Path, where: str, purpose: str, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the lock of an existing directory. Raises UsageError that begins with `where` and names
    the holder if another process holds it for longer than `wait_s`, or if it cannot be written."""
    path = directory / NAME
    end_s = time.monotonic() + wait_s
    try:
        while (descriptor := _locked(path, purpose)) is None:
            if time.monotonic() >= end_s:
                raise UsageError(
                    f"{where}: in use by {_holder(path)}; wait for its end, or choose another one"
                )
            time.sleep(_POLL_S)
    except OSError as error:
        raise UsageError(f"{where}: cannot be written: {error.strerror or error}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # moved or removed with the directory
            if _is_at(path, descriptor):
                path.unlink()
        os.close(descriptor)


def is_empty(directory: Path) -> bool:
    """Whether a directory holds nothing but perhaps the file of a lock."""
    return all(path.name == NAME for path in directory.iterdir())


def _locked(path: Path, purpose: str) -> int | None:
    """The descriptor of the locked file; None where another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        return descriptor
    if not _is_at(path, descriptor):  # its holder has just removed it
        os.close(descriptor)
        return _locked(path, purpose)
    holder = f"{purpose}, pid {os.getpid()} on {platform.node()} since {datetime.now():%H:%M:%S}"
    os.ftruncate(descriptor, 0)
    os.write(descriptor, holder.encode())
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"
