"""Facts about a machine, and the check of each."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadgen.run.cores import quota_cores, quota_of
from loadgen.studies.doctor.machine_facts import (
    MachineFacts,
    cpu_pressure,
    port_count,
    read_machine,
)
from loadgen.studies.doctor.run import why_not_stored
from loadgen.studies.doctor.trial import TrialSetup
from loadgen.studies.doctor.verdicts import machine_checks
from targets.preflight_result import PreflightCheck

GOOD = MachineFacts(
    cores=8, governor="performance", turbo=False, open_files=65536, open_files_hard=65536,
    ephemeral_ports=28232, timer="TimerFd", alarm_late_s=np.full(200, 5e-5), uvloop="0.21",
    httptools="0.6", clock_source="tsc", clock_read_ns=50.0, hypervisor=False, pressure=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2.0), ("50000 100000", 0.5), ("max 100000", None), ("-1 100000", None),
     ("", None), (None, None), ("100000 0", None)],
)  # fmt: skip
def test_a_quota_is_in_cores(text, cores):
    assert quota_of(text) == cores


def test_the_tightest_quota_around_us_counts(tmp_path):
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("0::/kube/pod/container\n")
    pod = root / "kube" / "pod"
    (pod / "container").mkdir(parents=True)
    (pod / "container" / "cpu.max").write_text("max 100000\n")
    assert quota_cores(membership, root) is None
    (pod / "cpu.max").write_text("150000 100000\n")
    (root / "kube" / "cpu.max").write_text("400000 100000\n")
    assert quota_cores(membership, root) == 1.5
    (root / "cpu").mkdir()  # cgroup version 1
    (root / "cpu" / "cpu.cfs_quota_us").write_text("50000")
    (root / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert quota_cores(membership, root) == 0.5


def test_ports_and_pressure_are_read_from_the_kernels_own_words():
    assert port_count("32768\t60999") == 28232
    assert port_count(None) is None
    psi = "some avg10=12.34 avg60=1.00 avg300=0.10 total=99\nfull avg10=0.00 avg60=0.00\n"
    assert cpu_pressure(psi) == pytest.approx(0.1234)
    assert cpu_pressure(None) is None


def test_a_good_machine_passes_every_check_without_advice():
    checks = machine_checks(GOOD)
    assert [c.check for c in checks if not c.ok] == []
    assert not any(c.consequence for c in checks)


@pytest.mark.parametrize(
    ("change", "check", "ok", "says"),
    [
        ({"cores": 2}, "cores", None, "competes with the client"),
        ({"cores": 1}, "cores", False, "competes with the client"),
        ({"quota_cores": 1.5}, "CPU quota", False, "throttled for tens of milliseconds"),
        ({"quota_cores": 16.0}, "CPU quota", True, ""),
        ({"pressure": 0.5}, "other load", False, "stop the programs or wait"),
        ({"pressure": None}, "other load", None, ""),
        ({"governor": "powersave"}, "governor", None, "-g performance"),
        ({"governor": None}, "governor", None, ""),
        ({"turbo": True}, "turbo", None, "temperature"),
        ({"open_files": 1024}, "open files", False, "`ulimit -n 65536`"),
        ({"ephemeral_ports": 2000}, "ports", False, "ip_local_port_range"),
        ({"alarm_late_s": np.full(200, 2e-3)}, "timer", False, "sent late"),
        ({"clock_source": "hpet", "clock_read_ns": 1200.0}, "clock", False, "clocksource=tsc"),
        ({"uvloop": None}, "uvloop", False, "pip install uvloop"),
        ({"httptools": None}, "httptools", False, "pip install httptools"),
        ({"hypervisor": True}, "virtual", None, "repeat runs"),
    ],
)
def test_each_fact_has_its_meaning_and_its_advice(change, check, ok, says):
    by_name = {c.check: c for c in machine_checks(replace(GOOD, **change))}
    assert (by_name[check].ok, says in by_name[check].consequence) == (ok, True)
    others = [c for name, c in by_name.items() if name != check]
    assert all(c.ok for c in others)


def test_this_machine_can_be_read():
    found = read_machine()
    assert found.cores >= 1
    assert len(found.alarm_late_s) == 200
    assert found.alarm_late_s[0] >= 0  # no alarm rings early
    assert 0 < found.clock_read_ns < 1e6
    assert len(machine_checks(found)) == len(machine_checks(GOOD))


@pytest.mark.parametrize(
    ("judge", "is_calm", "reason"),
    [("mock", True, "no C compiler"), ("truth", False, "other programs"), ("truth", None, ""),
     ("truth", True, "")],
)  # fmt: skip
def test_a_ceiling_is_stored_only_from_the_truth_server_on_a_calm_machine(judge, is_calm, reason):
    setup = TrialSetup(Path(), judge=judge)
    why_not = why_not_stored(setup, [PreflightCheck("other load", is_calm, "")])
    assert why_not[: len(reason)] == reason
    assert bool(why_not) == bool(reason)


def test_a_package_that_another_distribution_provides_too_is_named():
    (found,) = [c for c in machine_checks(GOOD) if c.check == "packages"]
    assert (found.ok, found.detail) == (True, "slobench's alone")
    shared = replace(GOOD, shared_packages={"reports": ["reports", "other"]})
    (found,) = [c for c in machine_checks(shared) if c.check == "packages"]
    assert (found.ok, found.detail) == (False, "reports is also of reports, other")
    assert "environment of its own" in found.consequence
