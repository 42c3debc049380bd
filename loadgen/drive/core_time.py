"""Use of the cores on which the client may run: idle, the client itself, or other programs.

Run-queue delay is not enough: with short time slices the kernel runs the client at once although
another program keeps its core busy, and the run's numbers then depend on the scheduler's favour.
The idle time of the core reveals that; docs/decisions/0046.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = (
    os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
)  # unit of the times in /proc


class Used(NamedTuple):
    """CPU seconds of a process (`own_s`), and of its descendants that ended and were waited for
    (`reaped_s`)."""

    parent: int
    own_s: float
    reaped_s: float


Cpu = Mapping[int, Used]  # by process id
_STEAL = 7  # index among the eight times of a processor
_COMM_END = ") "  # the program name before it may contain anything, also blanks and parentheses


class CoreTimes(NamedTuple):
    """Seconds, summed over some cores: idle, in programs (user, nice, system), and in total, which
    includes interrupts and steal."""

    idle_s: float
    programs_s: float
    total_s: float

    def since(self, before: CoreTimes) -> CoreTimes:
        return CoreTimes(*(now - then for now, then in zip(self, before, strict=True)))


def processor_ticks(proc_stat: str) -> dict[int, list[int]]:
    """The eight times of each processor in `/proc/stat`, in ticks; incomplete processors
    are left out.

    Source: proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal; user holds guests.
    """
    rows = [line.split() for line in proc_stat.splitlines() if line.startswith("cpu")]
    return {
        int(row[0].removeprefix("cpu")): [int(word) for word in row[1:9]]
        for row in rows
        if row[0] != "cpu" and len(row) > 8
    }


def core_times(proc_stat: str, cores: Collection[int]) -> CoreTimes | None:
    """Times of `cores` since boot, from `/proc/stat`; None if a core is missing."""
    ticks = processor_ticks(proc_stat)
    if not cores or not ticks.keys() >= set(cores):
        return None
    columns = zip(*(ticks[core] for core in cores), strict=True)
    user, nice, system, idle, iowait, *rest = (sum(column) / TICKS_PER_S for column in columns)
    programs_s, idle_s = user + nice + system, idle + iowait
    return CoreTimes(idle_s, programs_s, programs_s + idle_s + sum(rest))


def most_stolen_s(proc_stat: str, before: str, cores: Collection[int]) -> float | None:
    """The largest steal of a core in `cores`, seconds, between the readings `before` and
    `proc_stat` of `/proc/stat`; None if a core is missing in a reading."""
    now, then = processor_ticks(proc_stat), processor_ticks(before)
    if not cores or not (now.keys() & then.keys()) >= set(cores):
        return None
    return max(now[core][_STEAL] - then[core][_STEAL] for core in cores) / TICKS_PER_S


def cores_of_thread() -> frozenset[int]:
    """The cores on which the calling thread may run; empty where the system does not report it."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def family_cpu(ancestor: int, without: Collection[int] = (), proc: Path = Path("/proc")) -> Cpu:
    """CPU seconds so far of a process and its living descendants, except the processes `without`;
    empty where there is no `/proc`. The ancestor's `reaped_s` is 0: the processes it has waited for
    may be among `without`.

    Source: proc_stat(5): ppid, utime, stime, cutime, cstime.
    """
    processes: dict[int, Used] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(_COMM_END)[2]
        except OSError:  # the process has ended
            continue
        words = fields.split()
        pid = int(folder.name)
        own, reaped = (sum(map(int, words[k : k + 2])) / TICKS_PER_S for k in (11, 13))
        processes[pid] = Used(int(words[1]), own, 0.0 if pid == ancestor else reaped)

    def is_family(pid: int) -> bool:
        while pid > 1 and pid != ancestor:
            pid = processes[pid].parent if pid in processes else 0
        return pid == ancestor

    return {pid: used for pid, used in processes.items() if is_family(pid) and pid not in without}


def family_cpu_s(before: Cpu, after: Cpu, cores: frozenset[int]) -> float:
    """Upper bound, seconds, of the time that the processes of `after` and their ended descendants
    used on `cores` since `before`: all time of the processes that may run on any of `cores`."""
    return sum(
        now.own_s + now.reaped_s - _used_before(pid, before, after)
        for pid, now in after.items()
        if _may_run_on(pid, cores)
    )


def _used_before(pid: int, before: Cpu, after: Cpu) -> float:
    """CPU seconds of a process at `before`, with its children that have been waited for since."""
    then = before.get(pid)
    if then is None:
        return 0.0
    reaped_s = then.reaped_s + sum(
        used.own_s + used.reaped_s
        for child, used in before.items()
        if used.parent == pid and child not in after
    )
    # A parent that ignores SIGCHLD waits for no child; the kernel then counts its time nowhere.
    return then.own_s + min(reaped_s, after[pid].reaped_s)


def _may_run_on(pid: int, cores: frozenset[int]) -> bool:
    try:
        return bool(os.sched_getaffinity(pid) & cores)
    except (AttributeError, OSError):  # not Linux, or the process has ended
        return True
