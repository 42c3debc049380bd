"""The properties of this machine that affect measuring, read once. `verdicts` judges them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.run.cores import quota_cores
from loadgen.system.shadowing import sharing
from loadgen.system.timer import EARLY_NS, make_timer

_ALARMS = 200
_ALARM_GAP_NS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts about this machine; None if the system does not state it. Shares are 0 to 1."""

    cores: int  # usable by this process
    quota_cores: float | None = None  # of the cgroup
    governor: str | None = None
    turbo: bool | None = None
    open_files: int = 0
    open_files_hard: int = 0
    ephemeral_ports: int | None = None
    timer: str = ""  # class of loadgen.system.timer in use
    alarm_late_s: NDArray[np.float64]  # sorted; alarms a millisecond apart
    uvloop: str | None = None  # its version
    httptools: str | None = None
    clock_source: str | None = None
    clock_read_ns: float = 0.0
    hypervisor: bool | None = None
    shared_packages: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by package
    pressure: float | None = None  # share of the last 10 s in which a task waited for a core


def read_machine() -> MachineFacts:
    """Reads the facts; takes about a third of a second, for the alarms."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    timer, alarm_late_s = _alarms()
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return MachineFacts(
        cores=affine or 1,
        quota_cores=quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
        governor=_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        turbo=_turbo(),
        open_files=soft,
        open_files_hard=hard,
        ephemeral_ports=port_count(_text("/proc/sys/net/ipv4/ip_local_port_range")),
        timer=timer,
        alarm_late_s=alarm_late_s,
        uvloop=_version("uvloop"),
        httptools=_version("httptools"),
        clock_source=_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_read_ns=_clock_read_ns(),
        hypervisor=_hypervisor(_text("/proc/cpuinfo")),
        shared_packages=sharing(),
        pressure=read_pressure(),
    )


def _text(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _turbo() -> bool | None:
    boost = _text("/sys/devices/system/cpu/cpufreq/boost")
    if boost is not None:
        return boost == "1"
    no_turbo = _text("/sys/devices/system/cpu/intel_pstate/no_turbo")
    return None if no_turbo is None else no_turbo == "0"


def port_count(text: str | None) -> int | None:
    """Number of local ports for connections to an address, from the text `low high`."""
    words = (text or "").split()
    return int(words[1]) - int(words[0]) + 1 if len(words) == 2 else None


def read_pressure() -> float | None:
    """Share of the last 10 s in which a task on this machine waited for a core."""
    return cpu_pressure(_text("/proc/pressure/cpu"))


def cpu_pressure(text: str | None) -> float | None:
    """Source: Linux PSI, `some avg10=…` of /proc/pressure/cpu, per cent."""
    match = re.search(r"^some avg10=([\d.]+)", text or "", re.MULTILINE)
    return float(match[1]) / 100 if match else None


def _hypervisor(cpuinfo: str | None) -> bool | None:
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo or "", re.MULTILINE)
    return " hypervisor" in flags[1] if flags else None


def _version(package: str) -> str | None:
    try:
        return installed(package)
    except PackageNotFoundError:
        return None


def _clock_read_ns() -> float:
    """Cost of a clock reading: the smallest of several means, because other programs can only add
    to it."""
    means = []
    for _ in range(5):
        start_ns = time.perf_counter_ns()
        for _ in range(2000):
            time.monotonic_ns()
        means.append((time.perf_counter_ns() - start_ns) / 2000)
    return min(means)


def _alarms() -> tuple[str, NDArray[np.float64]]:
    """The class of the dispatcher's timer and its lateness, on the event loop of the load
    generator."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_ring())


async def _ring() -> tuple[str, NDArray[np.float64]]:
    epoch_ns = time.monotonic_ns()
    timer = make_timer(asyncio.get_running_loop(), epoch_ns, EARLY_NS)
    late_s: list[float] = []
    is_over = asyncio.Event()

    def ring() -> None:
        due_s = (len(late_s) + 1) * _ALARM_GAP_NS * 1e-9
        late_s.append(timer.now_s() - due_s)
        if len(late_s) == _ALARMS:
            is_over.set()
        else:
            timer.arm(due_s + _ALARM_GAP_NS * 1e-9, ring)

    timer.arm(_ALARM_GAP_NS * 1e-9, ring)
    await is_over.wait()
    timer.close()
    return type(timer).__name__, np.sort(late_s)
