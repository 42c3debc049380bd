"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".partial"


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


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
