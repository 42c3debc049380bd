"""Detection of a load-generating process that has stopped working, such as one under SIGSTOP or in
an endless loop of a plug-in.

The process advances a counter in shared memory, from its event loop and from its decoder. The
controlling process reads it four times a second. Only time in which both processes could run counts
(`StallWatch`), so a suspended or busy machine is no stall.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass

STALL_S = 5.0
"""Seconds without progress after which a process is killed."""
HURRIED_STALL_S = 1.0
"""The same after a second interrupt."""
WATCH_EVERY_S = 0.25
_LONGEST_STEP_S = 2 * WATCH_EVERY_S
_SLOWEST_BYTES_PER_S = 4 << 20  # of decoding; the usual is a hundred times as fast
_SLOT_BYTES = 8
_SIZE = 2 * _SLOT_BYTES
_RUNNABLE, _IN_DISK_WAIT = "R", "D"


class ProgressCounter:
    """A counter that the parent of a process reads. `fd` is inherited by the process, which opens
    it with `ProgressCounter(fd)`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._slots = memoryview(mmap.mmap(fd, _SIZE)).cast("Q")

    @classmethod
    def create(cls) -> ProgressCounter:
        """A new counter in memory."""
        if sys.platform == "linux":
            fd = os.memfd_create("progress")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.truncate(fd, _SIZE)
        return cls(fd)

    def advance(self, n_bytes: int = 0) -> None:
        """Counts a step of work. `n_bytes` to decode before the next step give it more time."""
        self._slots[1] = n_bytes
        self._slots[0] += 1

    def read(self) -> tuple[int, float]:
        """The count, and the seconds that the present step may take in addition to `STALL_S`."""
        return self._slots[0], self._slots[1] / _SLOWEST_BYTES_PER_S

    def close(self) -> None:
        os.close(self.fd)


class ProcessUse(NamedTuple):
    """The state letter of a process (proc(5); "" if unknown) and its CPU time in seconds."""

    state: str
    cpu_s: float


def process_use(pid: int) -> ProcessUse:
    """The present use; empty for a process that has ended, and on systems without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessUse("", 0.0)
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(fields[0], ticks / os.sysconf("SC_CLK_TCK"))


class StallWatch:
    """Adds up the time in which a process could have worked but did not.

    A step of the controlling process counts for at most 0.5 s, so that its own pauses and those of
    the machine do not count. A runnable process is charged the CPU time that it got, a process that
    waits for a disk is charged nothing, any other process the time of the step.
    """

    def __init__(self) -> None:
        self._now_s: float | None = None
        self._count, self._cpu_s = -1, 0.0
        self.idle_s = 0.0

    def look(self, now_s: float, count: int, use: ProcessUse) -> float:
        """The seconds without progress, after a look at `now_s` (monotonic)."""
        step_s = 0.0 if self._now_s is None else min(now_s - self._now_s, _LONGEST_STEP_S)
        used_s = use.cpu_s - self._cpu_s
        if count != self._count:
            self.idle_s = 0.0
        elif use.state == _RUNNABLE:
            self.idle_s += min(used_s, step_s)
        elif use.state != _IN_DISK_WAIT:
            self.idle_s += step_s
        self._now_s, self._count, self._cpu_s = now_s, count, use.cpu_s
        return self.idle_s


class WatchedProcess:
    """A process and its counter. `is_stalled` or `is_idle` is to be called every
    `WATCH_EVERY_S`."""

    def __init__(self, pid: int, counter: ProgressCounter) -> None:
        self._pid, self._counter = pid, counter
        self._watch, self._start = StallWatch(), StallWatch()

    def is_stalled(self, now_s: float, most_s: float = STALL_S) -> bool:
        """Whether the process made no progress for `most_s` of its own time."""
        count, allowance_s = self._counter.read()
        return self._watch.look(now_s, count, process_use(self._pid)) >= most_s + allowance_s

    def is_idle(self, now_s: float) -> bool:
        """Whether a process that is starting, which advances its counter only while it opens
        connections, used no CPU time either for `STALL_S`."""
        use, (count, _) = process_use(self._pid), self._counter.read()
        if not use.state:
            return False  # a system without /proc
        return self._start.look(now_s, count + round(1e3 * use.cpu_s), use) >= STALL_S
