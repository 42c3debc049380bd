"""A timer finer than the event loop's: fires a callback at an absolute monotonic nanosecond.

asyncio and uvloop round their sleeps to the millisecond of epoll_wait; a server scripted to 50 ms
must not answer at 51. On Linux this is one timerfd in the loop (lateness some tens of µs);
elsewhere `loop.call_at`, and its millisecond.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_CLOCK_MONOTONIC = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_PR_SET_TIMERSLACK = 29
_NEVER_NS = 2**63


class _TimerSpec(ctypes.Structure):
    """struct itimerspec (timerfd_settime(2)): interval, then first expiration."""

    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


class DeadlineTimer:
    """One pending deadline: `arm` with an earlier instant replaces it, with a later one does
    nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop, self._on_due, self._armed_ns = loop, on_due, _NEVER_NS
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # this thread; the default is 50 µs
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._fired)

    def arm(self, due_ns: int) -> None:
        """Fire at `due_ns` of CLOCK_MONOTONIC, or at once if that has passed."""
        if due_ns >= self._armed_ns:
            return
        self._armed_ns = due_ns
        if self._fd >= 0:
            seconds, nanoseconds = divmod(max(due_ns, 1), 1_000_000_000)  # 0 would disarm
            spec = _TimerSpec(0, 0, seconds, nanoseconds)
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        delay_s = (due_ns - time.monotonic_ns()) * 1e-9
        self._handle = self._loop.call_later(max(0.0, delay_s), self._fired)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):  # re-armed between the wake-up and this read
                os.read(self._fd, 8)
        self._armed_ns = _NEVER_NS
        self._on_due()
