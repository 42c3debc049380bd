"""Signals that end a program in order: requests in flight may finish, and results are kept; and how
a process ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterator


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and SIGHUP (the terminal has closed); not SIGHUP where it is ignored, as
    under nohup, nor on systems without it."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hangup


@contextlib.contextmanager
def blocked(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Blocks signals for a process that starts meanwhile; it ignores or unblocks them when it is
    ready. This process gets them at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_words(code: int) -> str:
    """How a process ended, from its exit status as `subprocess` returns it.

    >>> exit_words(1), exit_words(-9)
    ('exit status 1', 'ended by SIGKILL')
    """
    if code >= 0:
        return f"exit status {code}"
    name = f"signal {-code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        name = signal.Signals(-code).name
    return f"ended by {name}"
