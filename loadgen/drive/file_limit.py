"""The limit of open files (ulimit -n) of a load-generating process."""

from __future__ import annotations

import contextlib
import math
import sys

_OWN_FILES = 40  # pipes, timers, logs and the sockets of name resolution


def raise_file_limit() -> None:
    """Raises this process's limit, 1024 in most shells, to the most that the system allows."""
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # not every system grants "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_files() -> float:
    """The most files that this process, or a child of it, may open after `raise_file_limit`."""
    if sys.platform == "win32":
        return math.inf
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most


def file_limit_problem(n_connections: int, most: float | None = None) -> str:
    """A sentence if a process that may open `most` files, by default as many as this process,
    cannot have `n_connections`; else ""."""
    n_needed, most = n_connections + _OWN_FILES, most_files() if most is None else most
    if n_needed <= most:
        return ""
    return (
        f"a load-generating process needs {n_needed} open files, {n_connections} of them for "
        f"connections, and the limit is {most}: raise it with ulimit -n {n_needed}, or use more "
        "--workers"
    )
