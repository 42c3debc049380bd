"""How soon a thread that wakes up gets the processor back.

Linux lets a waking thread in before one that runs only if its slice ends earlier. With slices of
equal length (some milliseconds) a load generator that shares its core waits for theirs to end; who
asks for short ones is let in at once and is, in return, interrupted as often.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SHORT_S = 100e-6  # the shortest that Linux grants
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # sched_attr of 48 bytes: size … nice … runtime …


def ask_for_short_slices() -> None:
    """Slices of SHORT_S for the calling thread, if it is scheduled the usual way: a policy that
    somebody chose for it stays. Changes nothing before Linux 6.12, and nothing elsewhere.

    Source: sched(7), sched_setattr(2); Linux 6.12 `sched_attr::sched_runtime` of SCHED_OTHER.
    """
    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    size, nice = _ATTRIBUTES.size, os.getpriority(os.PRIO_PROCESS, 0)
    asked = _ATTRIBUTES.pack(size, os.SCHED_OTHER, 0, nice, 0, round(SHORT_S * 1e9), 0, 0)
    ctypes.CDLL(None).syscall(numbers[0], 0, asked, 0)


def time_slice_s() -> float | None:
    """The slice of the calling thread; None where the system does not tell."""
    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return None
    told = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(numbers[1], 0, told, _ATTRIBUTES.size, 0) != 0:
        return None
    slice_ns: int = _ATTRIBUTES.unpack(told.raw)[5]
    return slice_ns * 1e-9 or None
