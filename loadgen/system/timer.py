"""One alarm at an absolute instant, finer than an event loop's timers.

asyncio and uvloop round timers to the millisecond of epoll: `call_at` is 0.5 ms late at the median
and 1–2 ms at p99, and uvloop's may fire early. A timerfd read through `add_reader` is 26–86 µs late
(p99 97–172 µs) at 100–3000 alarms a second. Setting it earlier by that much leaves only the time
between wake-up and callback; `benchmarks/fidelity.py` measures it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_PR_SET_TIMERSLACK = 29
NEVER_NS = 2**63 - 1
EARLY_NS = 80_000
"""Time from a timerfd's alarm to our callback: at most this in 7 of 8 wake-ups (median 45 µs)."""


class Timer(Protocol):
    """A single alarm: arming it again replaces the earlier instant."""

    def now_s(self) -> float: ...
    def arm(self, at_s: float, callback: Callable[[], None]) -> None: ...


class Alarm(Protocol):
    """An armed timer, for code that occupies the loop's thread: after `due_ns` (CLOCK_MONOTONIC) it
    may call `ring` at once instead of waiting for the loop's next iteration."""

    due_ns: int

    def ring(self) -> None: ...


class NoAlarm:
    """An alarm that is never due."""

    due_ns = NEVER_NS

    def ring(self) -> None:
        """Does nothing."""


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class TimerFd:
    """A Linux timerfd on CLOCK_MONOTONIC.

    The constructor sets the thread's timer slack to 1 ns, because the kernel adds the default of
    50 µs to every wake-up. The kernel wakes the thread `early_ns` before the instant; a tight loop
    waits for the rest. `epoch_ns` may be changed until the first alarm is armed.

    Source: timerfd_create(2), prctl(2).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, epoch_ns: int, early_ns: int = 0) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self.epoch_ns, self.due_ns = epoch_ns, NEVER_NS
        self._callback: Callable[[], None] | None = None
        self._loop, self._early_ns = loop, early_ns
        self._spec = _Itimerspec()
        self._to_ring = self._spec.it_value
        self._set = self._libc.timerfd_settime
        self._set.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._spec_at = ctypes.addressof(self._spec)
        loop.add_reader(self._fd, self._fired)

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.epoch_ns) * 1e-9

    def arm(self, at_s: float, callback: Callable[[], None]) -> None:
        self.arm_ns(self.epoch_ns + round(at_s * 1e9), callback)

    def arm_ns(self, at_ns: int, callback: Callable[[], None]) -> None:
        self._callback, self.due_ns = callback, at_ns
        wake_ns = max(1, at_ns - self._early_ns)  # 0 would disarm
        self._to_ring.tv_sec, self._to_ring.tv_nsec = divmod(wake_ns, 10**9)
        self._set(self._fd, _TFD_TIMER_ABSTIME, self._spec_at, None)

    def ring(self) -> None:
        """Call the callback now, if an alarm is armed, and disarm it."""
        callback, self._callback, self.due_ns = self._callback, None, NEVER_NS
        if callback is not None:
            callback()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # re-armed between the wake-up and this read
            return
        if self._callback is None:  # `ring` was called; the kernel's alarm was left armed
            return
        while time.monotonic_ns() < self.due_ns:
            pass
        self.ring()


class LoopTimer:
    """The portable fallback: the loop's own timer, then a tight loop of at most `spin_s`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, epoch_ns: int, spin_s: float = 0.002
    ) -> None:
        self._loop, self.epoch_ns, self._spin_s = loop, epoch_ns, spin_s
        self.due_ns = NEVER_NS
        self._handle: asyncio.TimerHandle | None = None
        self._callback: Callable[[], None] | None = None

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.epoch_ns) * 1e-9

    def arm(self, at_s: float, callback: Callable[[], None]) -> None:
        self.arm_ns(self.epoch_ns + round(at_s * 1e9), callback)

    def arm_ns(self, at_ns: int, callback: Callable[[], None]) -> None:
        self.close()
        self._callback, self.due_ns = callback, at_ns
        left_s = (at_ns - time.monotonic_ns()) * 1e-9
        self._handle = self._loop.call_later(max(0.0, left_s - self._spin_s), self._spin, at_ns)

    def ring(self) -> None:
        """Call the callback now, if an alarm is armed, and disarm it."""
        self.close()
        callback, self._callback, self.due_ns = self._callback, None, NEVER_NS
        if callback is not None:
            callback()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _spin(self, at_ns: int) -> None:
        while time.monotonic_ns() < at_ns:
            pass
        self.ring()


def make_timer(
    loop: asyncio.AbstractEventLoop, epoch_ns: int = 0, early_ns: int = 0
) -> TimerFd | LoopTimer:
    """The most precise timer of this platform. `epoch_ns` is the zero of the seconds of `arm`."""
    linux = sys.platform == "linux"
    return TimerFd(loop, epoch_ns, early_ns) if linux else LoopTimer(loop, epoch_ns)


def make_quiet_timer(loop: asyncio.AbstractEventLoop) -> TimerFd | LoopTimer:
    """A timer that never spins, for alarms that only take a sample."""
    return TimerFd(loop, 0) if sys.platform == "linux" else LoopTimer(loop, 0, spin_s=0.0)
