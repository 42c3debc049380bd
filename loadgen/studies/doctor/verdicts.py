"""The checks of `doctor` on this machine: the consequence of each fact for measuring, and the
remedy."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.wording import format_count, format_number, format_share, format_value
from loadgen.studies.doctor.machine_facts import MachineFacts
from targets.preflight_result import PreflightCheck

_LEAST_FILES = 4096
_LEAST_PORTS = 20_000
_LATE_ALARM_S = 1e-3
_SLOW_CLOCK_NS = 500.0
_PRESSED = 0.1
_STEADY_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen")


def machine_checks(machine: MachineFacts) -> list[PreflightCheck]:
    """A check per fact, in a fixed order; `consequence` holds the effect on measurements and the
    remedy."""
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
    yield _packages(m)
    yield _virtual(m)


def _check(name: str, ok: bool | None, detail: str, consequence: str) -> PreflightCheck:
    return PreflightCheck(name, ok, detail, "" if ok else consequence)


def _unread(name: str, note: str = "") -> PreflightCheck:
    return PreflightCheck(name, None, f"not readable here{note}")


def _cores(m: MachineFacts) -> PreflightCheck:
    advice = (
        "a server on this machine competes with the client; measure a remote server, or keep "
        "the rate low"
    )
    ok = True if m.cores >= 4 else False if m.cores == 1 else None
    return _check("cores", ok, f"{m.cores} usable", advice)


def _quota(m: MachineFacts) -> PreflightCheck:
    if m.quota_cores is None:
        return PreflightCheck("CPU quota", True, "none")
    advice = (
        "a burst that exhausts the quota is throttled for tens of milliseconds; raise the "
        "container's CPU limit to whole cores"
    )
    detail = f"{format_number(m.quota_cores)} cores by the cgroup, of {m.cores}"
    return _check("CPU quota", m.quota_cores >= m.cores, detail, advice)


def other_load(pressure: float | None) -> PreflightCheck:
    """Checks whether other programs use this machine's cores, by the share of time in which tasks
    waited."""
    if pressure is None:
        return PreflightCheck("other load", None, "not reported by this kernel (no /proc/pressure)")
    detail = f"tasks waited for a core during {format_share(pressure)} of the last 10 s"
    advice = "other programs use this machine; runs may be INVALID: stop the programs or wait"
    return _check("other load", pressure <= _PRESSED, detail, advice)


def _governor(m: MachineFacts) -> PreflightCheck:
    if m.governor is None:
        return _unread("governor", " (usual in virtual machines)")
    advice = "idle cores clock down and respond later; run `cpupower frequency-set -g performance`"
    return _check("governor", m.governor == "performance" or None, m.governor, advice)


def _turbo(m: MachineFacts) -> PreflightCheck:
    if m.turbo is None:
        return _unread("turbo")
    advice = "CPU times of two runs may differ with the temperature"
    return _check("turbo", None if m.turbo else True, "on" if m.turbo else "off", advice)


def _files(m: MachineFacts) -> PreflightCheck:
    advice = f"a request takes a descriptor; `ulimit -n {m.open_files_hard}` raises the limit"
    detail = f"{format_count(m.open_files)} at most"
    return _check("open files", m.open_files >= _LEAST_FILES, detail, advice)


def _ports(m: MachineFacts) -> PreflightCheck:
    if m.ephemeral_ports is None:
        return _unread("ports")
    advice = (
        "limits connections, and with `connections: never` the rate (a closed connection holds "
        "its port for a minute); run `sysctl net.ipv4.ip_local_port_range='10240 65535'`"
    )
    detail = f"{format_count(m.ephemeral_ports)} ephemeral ports"
    return _check("ports", m.ephemeral_ports >= _LEAST_PORTS, detail, advice)


def _timer(m: MachineFacts) -> PreflightCheck:
    n = len(m.alarm_late_s)
    p50, p99 = (float(m.alarm_late_s[nearest_rank(n, q) - 1]) for q in (0.5, 0.99))
    detail = (
        f"{m.timer}: {n} alarms, p50 {format_value(p50, 's')} late, p99 {format_value(p99, 's')}"
    )
    advice = "requests are sent late by that much; the machine is busy, or its timers are coarse"
    return _check("timer", p99 <= _LATE_ALARM_S, detail, advice)


def _clock(m: MachineFacts) -> PreflightCheck:
    name = m.clock_source or "unknown"
    detail = f"{name}, {format_number(m.clock_read_ns)} ns to read"
    if m.clock_read_ns <= _SLOW_CLOCK_NS:
        return PreflightCheck("clock", name in _STEADY_CLOCKS or None, detail)
    advice = "each socket read takes a timestamp; boot with clocksource=tsc if the CPU has a TSC"
    return PreflightCheck("clock", False, detail, advice)


def _library(name: str, version: str | None, cost: str) -> PreflightCheck:
    detail = "not installed" if version is None else version
    return _check(name, version is not None, detail, f"{cost}; pip install {name}")


def _packages(m: MachineFacts) -> PreflightCheck:
    named = [f"{name} is also of {', '.join(own)}" for name, own in m.shared_packages.items()]
    advice = (
        "one distribution may overwrite files of the other; install slobench into an environment "
        "of its own"
    )
    return _check("packages", not named, "; ".join(named) or "slobench's alone", advice)


def _virtual(m: MachineFacts) -> PreflightCheck:
    if m.hypervisor is None:
        return _unread("virtual")
    detail = "a virtual machine" if m.hypervisor else "no hypervisor"
    advice = "the host may suspend it for milliseconds without a trace inside; repeat runs"
    return _check("virtual", None if m.hypervisor else True, detail, advice)
