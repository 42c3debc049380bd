"""What the facts of a machine mean for measuring on it, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.doctor.machine_facts import MachineFacts
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.wording import format_count, format_number, format_share, format_value
from targets.preflight_result import PreflightCheck

_LEAST_FILES = 4096
_LEAST_PORTS = 20_000
_LATE_ALARM_S = 1e-3
_SLOW_CLOCK_NS = 500.0
_PRESSED = 0.1
_STEADY_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen")


def machine_checks(machine: MachineFacts) -> list[PreflightCheck]:
    """One line per fact, in a fixed order; `consequence` is what it costs and what to do."""
    return list(_checks(machine))


def _checks(m: MachineFacts) -> Iterator[PreflightCheck]:
    yield _cores(m)
    yield _quota(m)
    yield other_load(m.pressure)
    yield _governor(m)
    yield _turbo(m)
    yield _files(m)
    yield _ports(m)
    yield _timer(m)
    yield _clock(m)
    yield _library("uvloop", m.uvloop, "the event loop costs about twice the CPU per token")
    yield _library("httptools", m.httptools, "the fast transport cannot run")
    yield _virtual(m)


def _cores(m: MachineFacts) -> PreflightCheck:
    if m.cores >= 4:
        return PreflightCheck("cores", True, f"{m.cores} usable")
    return PreflightCheck(
        "cores",
        False if m.cores == 1 else None,
        f"{m.cores} usable",
        "a server on this machine competes with the client; measure a remote one, or keep the "
        "rate low",
    )


def _quota(m: MachineFacts) -> PreflightCheck:
    if m.quota_cores is None:
        return PreflightCheck("CPU quota", True, "none")
    is_tight = m.quota_cores < m.cores
    return PreflightCheck(
        "CPU quota",
        not is_tight,
        f"{format_number(m.quota_cores)} cores by the cgroup, of {m.cores}",
        "a burst that uses the quota up is throttled for tens of milliseconds; raise the "
        "container's CPU limit to whole cores" if is_tight else "",
    )  # fmt: skip


def other_load(pressure: float | None) -> PreflightCheck:
    """Whether others want this machine's cores, by the share of time in which tasks waited."""
    if pressure is None:
        return PreflightCheck("other load", None, "this kernel does not say (no /proc/pressure)")
    detail = f"tasks waited for a core during {format_share(pressure)} of the last 10 s"
    if pressure <= _PRESSED:
        return PreflightCheck("other load", True, detail)
    advice = "others use this machine: what they cost the client is charged to no server, but "
    return PreflightCheck(
        "other load", False, detail, f"{advice}runs may be INVALID; stop them or wait"
    )


def _governor(m: MachineFacts) -> PreflightCheck:
    if m.governor is None:
        return PreflightCheck("governor", None, "not readable here (usual in virtual machines)")
    if m.governor == "performance":
        return PreflightCheck("governor", True, m.governor)
    advice = (
        "cores that clock down answer later at low rates; `cpupower frequency-set -g performance`"
    )
    return PreflightCheck("governor", None, m.governor, advice)


def _turbo(m: MachineFacts) -> PreflightCheck:
    if m.turbo is None:
        return PreflightCheck("turbo", None, "not readable here")
    if not m.turbo:
        return PreflightCheck("turbo", True, "off")
    return PreflightCheck(
        "turbo", None, "on", "CPU figures of two runs may differ with temperature"
    )


def _files(m: MachineFacts) -> PreflightCheck:
    detail = f"{format_count(m.open_files)} at most"
    if m.open_files >= _LEAST_FILES:
        return PreflightCheck("open files", True, detail)
    return PreflightCheck(
        "open files",
        False,
        detail,
        f"each request in flight holds one; `ulimit -n {m.open_files_hard}` allows more",
    )


def _ports(m: MachineFacts) -> PreflightCheck:
    if m.ephemeral_ports is None:
        return PreflightCheck("ports", None, "not readable here")
    detail = f"{format_count(m.ephemeral_ports)} ephemeral ports"
    if m.ephemeral_ports >= _LEAST_PORTS:
        return PreflightCheck("ports", True, detail)
    return PreflightCheck(
        "ports",
        False,
        detail,
        "bounds connections, and with `connections: never` the rate (a closed one holds its port "
        "for a minute); `sysctl net.ipv4.ip_local_port_range='10240 65535'`",
    )


def _timer(m: MachineFacts) -> PreflightCheck:
    n = len(m.alarm_late_s)
    p50, p99 = (float(m.alarm_late_s[nearest_rank(n, q) - 1]) for q in (0.5, 0.99))
    detail = (
        f"{m.timer}: {n} alarms, p50 {format_value(p50, 's')} late, p99 {format_value(p99, 's')}"
    )
    if p99 <= _LATE_ALARM_S:
        return PreflightCheck("timer", True, detail)
    return PreflightCheck(
        "timer",
        False,
        detail,
        "requests are sent as late as that; the machine is busy, or its timers are coarse",
    )


def _clock(m: MachineFacts) -> PreflightCheck:
    name = m.clock_source or "unknown"
    detail = f"{name}, {format_number(m.clock_read_ns)} ns to read"
    if m.clock_read_ns <= _SLOW_CLOCK_NS:
        return PreflightCheck("clock", True if name in _STEADY_CLOCKS else None, detail)
    advice = "every socket read is stamped with it; boot with clocksource=tsc if the CPU has one"
    return PreflightCheck("clock", False, detail, advice)


def _library(name: str, version: str | None, cost: str) -> PreflightCheck:
    if version is not None:
        return PreflightCheck(name, True, version)
    return PreflightCheck(name, False, "not installed", f"{cost}; pip install {name}")


def _virtual(m: MachineFacts) -> PreflightCheck:
    if m.hypervisor is None:
        return PreflightCheck("virtual", None, "not readable here")
    if not m.hypervisor:
        return PreflightCheck("virtual", True, "no hypervisor")
    return PreflightCheck(
        "virtual",
        None,
        "a virtual machine",
        "the host may take its cores away for milliseconds, unseen from inside; repeat runs",
    )
