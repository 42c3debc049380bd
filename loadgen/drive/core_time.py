"""Whose time it was on the cores that the client may use: idle, the client's own, or others'.

A client that the kernel lets in at once, whoever else runs on its core, shows no delay of its own.
It is there on the scheduler's word all the same, and the cores' own clocks tell it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # of `/proc`'s clocks


class Used(NamedTuple):
    """CPU seconds of a process, and of those of its descendants that ended and were waited for."""

    parent: int
    own_s: float
    reaped_s: float


Cpu = Mapping[int, Used]  # by process
_STEAL = 7  # the clock of it among a processor's eight
_COMM_END = ") "  # a program's name may hold anything, also blanks and parentheses


class CoreTimes(NamedTuple):
    """Seconds of all the cores asked for together: idle, in programs (user, nice, system), and
    everything there was (with interrupts and what a virtual machine's host took)."""

    idle_s: float
    programs_s: float
    total_s: float

    def since(self, before: CoreTimes) -> CoreTimes:
        return CoreTimes(*(now - then for now, then in zip(self, before, strict=True)))


def processor_ticks(proc_stat: str) -> dict[int, list[int]]:
    """Of each processor in `/proc/stat` whose eight clocks are all there: those, in ticks.

    Source: proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
    """
    rows = [line.split() for line in proc_stat.splitlines() if line.startswith("cpu")]
    return {
        int(row[0].removeprefix("cpu")): [int(word) for word in row[1:9]]
        for row in rows
        if row[0] != "cpu" and len(row) > 8
    }


def core_times(proc_stat: str, cores: Collection[int]) -> CoreTimes | None:
    """Of these cores, from `/proc/stat`; None where it does not list one of them."""
    ticks = processor_ticks(proc_stat)
    if not cores or not ticks.keys() >= set(cores):
        return None
    found = zip(*(ticks[core] for core in cores), strict=True)
    user, nice, system, idle, iowait, *rest = (sum(column) for column in found)
    programs, waiting = user + nice + system, idle + iowait
    times = (waiting, programs, programs + waiting + sum(rest))
    return CoreTimes(*(n_ticks / TICKS_PER_S for n_ticks in times))


def most_stolen_s(proc_stat: str, before: str, cores: Collection[int]) -> float | None:
    """What the host of a virtual machine took of that one of these cores of which it took most, s,
    between two readings of `/proc/stat`; None where one of them does not list a core."""
    now, then = processor_ticks(proc_stat), processor_ticks(before)
    if not cores or not (now.keys() & then.keys()) >= set(cores):
        return None
    return max(now[core][_STEAL] - then[core][_STEAL] for core in cores) / TICKS_PER_S


def cores_of_thread() -> frozenset[int]:
    """The cores on which the calling thread may run; none where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def family_cpu(ancestor: int, without: Collection[int] = (), proc: Path = Path("/proc")) -> Cpu:
    """CPU seconds so far of a process and all its descendants that live, without some of them;
    empty where there is no `/proc`. What the ancestor itself has waited for is left out: those
    left out were its children, too.

    Source: proc_stat(5): ppid, utime, stime, cutime, cstime.
    """
    found: dict[int, Used] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(_COMM_END)[2]
        except OSError:  # it has ended meanwhile
            continue
        words = fields.split()
        pid = int(folder.name)
        own, reaped = (sum(map(int, words[k : k + 2])) / TICKS_PER_S for k in (11, 13))
        found[pid] = Used(int(words[1]), own, 0.0 if pid == ancestor else reaped)

    def is_family(pid: int) -> bool:
        while pid > 1 and pid != ancestor:
            pid = found[pid].parent if pid in found else 0
        return pid == ancestor

    return {pid: used for pid, used in found.items() if is_family(pid) and pid not in without}


def family_cpu_s(before: Cpu, after: Cpu, cores: frozenset[int]) -> float:
    """The most that the processes of `after`, and what ended under them, can have used since
    `before` on these cores, s: all of what those used that may run there."""
    return sum(
        now.own_s + now.reaped_s - _used_before(pid, before, after)
        for pid, now in after.items()
        if _may_run_on(pid, cores)
    )


def _used_before(pid: int, before: Cpu, after: Cpu) -> float:
    """What a process had used, and what those had that it has waited for since."""
    then = before.get(pid)
    if then is None:
        return 0.0
    reaped_s = then.reaped_s + sum(
        one.own_s + one.reaped_s
        for child, one in before.items()
        if one.parent == pid and child not in after
    )
    # Where nobody wants to know of them, nobody waits, and what ended is counted nowhere.
    return then.own_s + min(reaped_s, after[pid].reaped_s)


def _may_run_on(pid: int, cores: frozenset[int]) -> bool:
    try:
        return bool(os.sched_getaffinity(pid) & cores)
    except (AttributeError, OSError):  # another platform; or it has ended
        return True
