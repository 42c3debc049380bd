"""Why there is no connection, in one line, and whether it is this machine that had none to give."""

from __future__ import annotations

import errno

from loadgen.records import CLIENT_LIMIT

_OURS = (
    errno.EADDRNOTAVAIL,  # no free local port, or no local address to reach that one from
    errno.EMFILE,  # open files of the process
    errno.ENFILE,  # of the machine
    errno.ENOBUFS,
    errno.ENOMEM,
)


def connect_reason(to: object, error: OSError) -> str:
    """Ends in `CLIENT_LIMIT` where no server was asked, for want of something on this machine."""
    why = f"connect to {to}: {error.strerror or str(error) or type(error).__name__}"
    return why + CLIENT_LIMIT if error.errno in _OURS else why
