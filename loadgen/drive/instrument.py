"""What the client measures about itself while it measures the server.

A stall the client suffered is the client's and must not be charged to the server. Whether these
numbers are good enough is judged in `loadgen.measure.validity`; here they are only taken.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from loadgen.drive.core_time import (
    TICKS_PER_S,
    core_times,
    cores_of_thread,
    most_stolen_s,
    processor_ticks,
)
from loadgen.manifest import HostSection
from loadgen.self_report import CoreSeconds, GcReport

_WAKE_UP_S = 50e-6
_THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class ThreadUse(NamedTuple):
    """Readings of a `ThreadMeter`: shares of `window_s` (s), None where the system does not state
    them."""

    window_s: float
    cpu_share: float | None
    run_delay_share: float | None
    throttled_share: float | None
    stolen_share: float | None
    cores: CoreSeconds | None


class ThreadMeter:
    """CPU share, run-queue delay and throttling of this thread between `start` and `stop`, what
    share of the machine's own time its host took away (steal), and how the time of the cores that
    the thread may use was spent.

    Source: proc(5) `/proc/<pid>/schedstat` (nanoseconds spent waiting on a run queue, number of
    timeslices) and `/proc/stat`, Linux cgroup `cpu.stat`. `None` where the system does not tell. Of
    the run-queue delay, 50 µs per timeslice are taken for the cost of waking up: decision 25.
    """

    def __init__(self) -> None:
        self._before: dict[str, float | None] = {}
        self._use = ThreadUse(0.0, None, None, None, None, None)
        self._stat_before = ""
        self.window_s = 0.0  # between `start` and `stop`

    def start(self) -> None:
        self._stat_before = _proc_stat()
        self._before = _readings(self._stat_before)

    def stop(self) -> None:
        stat = _proc_stat()
        after, before = _readings(stat), self._before
        wall_s = (after["wall_s"] or 0.0) - (before["wall_s"] or 0.0)
        self.window_s = wall_s

        def share(reading: str) -> float | None:
            now, then = after[reading], before[reading]
            known = now is not None and then is not None and wall_s > 0
            return max(0.0, now - then) / wall_s if known else None  # type: ignore[operator]  # both are known

        own_s = (after["cpu_s"] or 0.0) - (before["cpu_s"] or 0.0)
        self._use = ThreadUse(
            wall_s,
            cpu_share=share("cpu_s"),
            run_delay_share=share("run_delay_s"),
            throttled_share=share("throttled_s"),
            stolen_share=share("stolen_s"),
            cores=self._core_use(stat, own_s),
        )

    def _core_use(self, stat: str, own_s: float) -> CoreSeconds | None:
        """Of the cores that the thread may use now; None where the system does not tell."""
        cores = cores_of_thread()
        now, then = (core_times(text, cores) for text in (stat, self._stat_before))
        if now is None or then is None:
            return None
        spent = now.since(then)
        return CoreSeconds(
            allowed=tuple(sorted(cores)),
            online=os.cpu_count(),
            own_s=own_s,
            idle_s=round(spent.idle_s, 6),
            programs_s=round(spent.programs_s, 6),
            total_s=round(spent.total_s, 6),
            most_stolen_s=most_stolen_s(stat, self._stat_before, cores),
        )

    def summary(self) -> ThreadUse:
        return self._use


class GcPauses:
    """Garbage collection frozen and off while measuring; what still happens is recorded."""

    def __init__(self) -> None:
        self._started_ns = 0
        self._pauses_s: list[float] = []

    def start(self) -> None:
        """What is there now, but for what is frozen already, is looked through once more."""
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        gc.callbacks.remove(self._note)
        gc.enable()
        gc.unfreeze()

    def summary(self) -> GcReport:
        return GcReport(
            collections=len(self._pauses_s), pause_max_s=max(self._pauses_s, default=0.0)
        )

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = time.monotonic_ns()
        else:
            self._pauses_s.append((time.monotonic_ns() - self._started_ns) * 1e-9)


def _readings(proc_stat: str) -> dict[str, float | None]:
    return {
        "wall_s": time.monotonic(),
        "cpu_s": time.thread_time(),
        "run_delay_s": _run_delay_s(),
        "throttled_s": _throttled_s(),
        "stolen_s": stolen_s(proc_stat, TICKS_PER_S),
    }


def _run_delay_s() -> float | None:
    try:
        return waiting_s(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text())
    except (OSError, ValueError):
        return None


def waiting_s(schedstat: str) -> float:
    """Seconds spent runnable but not running, beyond what waking up costs on an idle machine."""
    _, delay_ns, n_slices = map(int, schedstat.split())
    return delay_ns * 1e-9 - n_slices * _WAKE_UP_S


def _proc_stat() -> str:
    try:
        return Path("/proc/stat").read_text()
    except OSError:
        return ""


def stolen_s(proc_stat: str, ticks_per_s: int) -> float | None:
    """Seconds per processor that a virtual machine wanted to run and its host ran others; None
    where the kernel does not count them."""
    processors = processor_ticks(proc_stat).values()
    if not processors:
        return None
    return sum(stolen for *_, stolen in processors) / ticks_per_s / len(processors)


def _throttled_s(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Seconds that our cgroup was held back; version 2's own file, else version 1's."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in sorted(lines):  # version 2's begins with 0
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        for folder in (root / controllers, root / "cpu"):
            try:
                found = throttled_s((folder / group.lstrip("/") / "cpu.stat").read_text())
            except OSError:
                continue
            if found is not None:
                return found
    return None


def throttled_s(cpu_stat: str) -> float | None:
    """What `cpu.stat` says: `throttled_usec` in version 2 of cgroups, `throttled_time` (ns) in
    version 1; None where it says neither."""
    for line in cpu_stat.splitlines():
        word, _, value = line.partition(" ")
        if word in _THROTTLED and value.isdecimal():
            return int(value) * _THROTTLED[word]
    return None


def host() -> HostSection:
    """The machine, for the manifest."""
    import platform

    cpu_model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu_model = line.partition(":")[2].strip()
                break
    except OSError:
        cpu_model = platform.processor()
    return HostSection(
        hostname=platform.node(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        cpu_model=cpu_model,
        platform=platform.platform(),
        python=platform.python_version(),
    )
