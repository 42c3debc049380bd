"""Self-measurement of a shard's thread: CPU share, run-queue delay, throttling, steal, garbage
collection. `loadgen.measure.validity` decides from these numbers whether the run is valid.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

from loadgen.drive.core_time import (
    TICKS_PER_S,
    core_times,
    cores_of_thread,
    most_stolen_s,
    processor_ticks,
)
from loadgen.manifest.sections import HostSection
from loadgen.manifest.self_report import CoreSeconds, GcReport, ThreadUse

_WAKE_UP_S = 50e-6  # of run-queue delay per timeslice: the cost of waking up (decision 25)
_THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class ThreadMeter:
    """Shares of the time between `start` and `stop`: CPU time, run-queue delay and throttling of
    this thread, steal of the machine; and the use of the cores on which the thread may run.

    None where the system does not report a value. Sources: proc(5) `/proc/<pid>/schedstat`
    (nanoseconds on a run queue, number of timeslices) and `/proc/stat`; cgroup `cpu.stat`.
    """

    def __init__(self) -> None:
        self._before: dict[str, float | None] = {}
        self.use = ThreadUse(0.0, None, None, None, None, None)
        self._stat_before = ""
        self._started_s = self._cpu_before_s = 0.0
        self.window_s = 0.0  # between `start` and `stop`

    def start(self) -> None:
        self._stat_before = _proc_stat()
        self._started_s, self._cpu_before_s = time.monotonic(), time.thread_time()
        self._before = _readings(self._stat_before)

    def so_far(self) -> tuple[float, float, float | None, float | None]:
        """Seconds since `start`, and since then the share of CPU time, of run-queue delay and of
        throttling. The machine's steal is left out: /proc/stat is slow to read on many cores."""
        lasted_s = max(1e-9, time.monotonic() - self._started_s)

        def share(name: str, now_s: float | None) -> float | None:
            before_s = self._before.get(name)
            if before_s is None or now_s is None:
                return None
            return round(max(0.0, now_s - before_s) / lasted_s, 6)

        cpu_share = round((time.thread_time() - self._cpu_before_s) / lasted_s, 6)
        delay = share("run_delay_share", _run_delay_s())
        return lasted_s, cpu_share, delay, share("throttled_share", _throttled_s())

    def stop(self) -> None:
        stat = _proc_stat()
        self.window_s = time.monotonic() - self._started_s
        own_s = time.thread_time() - self._cpu_before_s
        shares = {name: self._share(self._before[name], s) for name, s in _readings(stat).items()}
        self.use = ThreadUse(
            self.window_s,
            cpu_share=self._share(0.0, own_s),
            cores=self._core_use(stat, own_s),
            **shares,
        )

    def _share(self, before_s: float | None, now_s: float | None) -> float | None:
        if before_s is None or now_s is None or self.window_s <= 0:
            return None
        return max(0.0, now_s - before_s) / self.window_s

    def _core_use(self, stat: str, own_s: float) -> CoreSeconds | None:
        """Use of the cores on which the thread may run now; None where it is not reported."""
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


class GcPauses:
    """Turns garbage collection off during the run and records collections that still happen."""

    def __init__(self) -> None:
        self._started_ns = 0
        self._pauses_s: list[float] = []

    def start(self) -> None:
        """Collects once, except objects frozen earlier, and turns the collector off."""
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._record)

    def stop(self) -> None:
        gc.callbacks.remove(self._record)
        gc.enable()
        gc.unfreeze()

    def summary(self) -> GcReport:
        return GcReport(
            collections=len(self._pauses_s), pause_max_s=max(self._pauses_s, default=0.0)
        )

    def _record(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = time.monotonic_ns()
        else:
            self._pauses_s.append((time.monotonic_ns() - self._started_ns) * 1e-9)


def _readings(proc_stat: str) -> dict[str, float | None]:
    return {
        "run_delay_share": _run_delay_s(),
        "throttled_share": _throttled_s(),
        "stolen_share": stolen_s(proc_stat, TICKS_PER_S),
    }


def _run_delay_s() -> float | None:
    try:
        return waiting_s(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text())
    except (OSError, ValueError):
        return None


def waiting_s(schedstat: str) -> float:
    """Seconds spent runnable but not running, less the cost of waking up on an idle machine."""
    _, delay_ns, n_slices = map(int, schedstat.split())
    return delay_ns * 1e-9 - n_slices * _WAKE_UP_S


def _proc_stat() -> str:
    try:
        return Path("/proc/stat").read_text()
    except OSError:
        return ""


def stolen_s(proc_stat: str, ticks_per_s: int) -> float | None:
    """Mean seconds per processor in which the host of a virtual machine ran others instead (steal);
    None where the kernel does not report it."""
    processors = processor_ticks(proc_stat).values()
    if not processors:
        return None
    return sum(stolen for *_, stolen in processors) / ticks_per_s / len(processors)


def _throttled_s(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Seconds for which this process's cgroup was throttled: from cgroup version 2, else 1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in sorted(lines):  # the line of version 2 begins with 0
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        for folder in (root / controllers, root / "cpu"):
            try:
                seconds = throttled_s((folder / group.lstrip("/") / "cpu.stat").read_text())
            except OSError:
                continue
            if seconds is not None:
                return seconds
    return None


def throttled_s(cpu_stat: str) -> float | None:
    """The throttled time in `cpu.stat`, seconds: `throttled_usec` in cgroup version 2,
    `throttled_time` (ns) in version 1; None if it has neither."""
    for line in cpu_stat.splitlines():
        word, _, value = line.partition(" ")
        if word in _THROTTLED and value.isdecimal():
            return int(value) * _THROTTLED[word]
    return None


def _platform() -> str:
    """`platform.platform()`, on Linux without the process `uname -p` that it starts."""
    import platform

    if sys.platform != "linux":
        return platform.platform()
    system = os.uname()
    parts = (system.sysname, system.release, system.machine, "with", "".join(platform.libc_ver()))
    return "-".join(part.replace(" ", "_") for part in parts if part)


def host() -> HostSection:
    """Name, processors and software of this machine, for the manifest."""
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
        platform=_platform(),
        python=platform.python_version(),
    )
