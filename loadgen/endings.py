"""Signals that end a program in order: requests in flight may finish, and results are kept."""

from __future__ import annotations

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and SIGHUP (the terminal has closed); not SIGHUP where it is ignored, as
    under nohup, nor on systems without it."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hangup
