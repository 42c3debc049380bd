"""Whose time it was on the client's cores, as the kernel's clocks tell it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.drive.core_time import (
    TICKS_PER_S,
    Used,
    core_times,
    family_cpu,
    family_cpu_s,
    most_stolen_s,
)

#        user nice system idle iowait irq softirq steal guest
STAT = """\
cpu  33 0 0 0 0 0 0 0 0 0
cpu0 100 10 40 500 50 1 2 30 7 0
cpu1 200 0 60 0 0 3 4 5 0 0
cpu11 1 1 1 1 1 1 1 1 1 1
intr 12345
"""


def test_the_clocks_of_the_asked_cores_are_added():
    tick_s = 1 / TICKS_PER_S
    assert core_times(STAT, {0}) == pytest.approx((550 * tick_s, 150 * tick_s, 733 * tick_s))
    assert core_times(STAT, {0, 1}) == pytest.approx((550 * tick_s, 410 * tick_s, 1005 * tick_s))


def test_of_stolen_time_the_core_counts_that_lost_most():
    later = STAT.replace(" 30 7 0", " 90 7 0").replace("4 5 0 0", "4 8 0 0")
    assert most_stolen_s(later, STAT, {0, 1}) == pytest.approx(60 / TICKS_PER_S)
    assert most_stolen_s(later, STAT, {1}) == pytest.approx(3 / TICKS_PER_S)
    assert most_stolen_s(later, STAT, {2}) is None
    assert most_stolen_s(later, "", {0}) is None


@pytest.mark.parametrize(
    ("stat", "cores"), [(STAT, {2}), (STAT, {0, 2}), (STAT, set()), ("", {0}), ("cpu0 1 2\n", {0})]
)
def test_a_core_that_is_not_listed_is_not_known(stat, cores):
    assert core_times(stat, cores) is None


def write(proc: Path, pid: int, name: str, parent: int, user: int, system: int, reaped: int = 0):
    (proc / str(pid)).mkdir()
    cpu = f"{user} {system} {reaped} {2 * reaped}"
    fields = f"{pid} ({name}) S {parent} 1 1 0 -1 4194304 9 9 9 9 {cpu} 20 0 1 0 5"
    (proc / str(pid) / "stat").write_text(fields)


def test_a_family_is_a_process_and_all_that_come_from_it(tmp_path):
    write(tmp_path, 1, "init", 0, 9, 9)
    write(tmp_path, 10, "slobench", 1, TICKS_PER_S, 0, reaped=TICKS_PER_S)
    write(tmp_path, 11, "shard", 10, 5, 5)
    write(tmp_path, 12, "server) S 1 (", 10, 0, 2 * TICKS_PER_S, reaped=TICKS_PER_S)
    write(tmp_path, 20, "worker", 12, TICKS_PER_S, TICKS_PER_S)
    write(tmp_path, 30, "stranger", 1, 999, 999)
    (tmp_path / "40").mkdir()  # it ended while we looked
    (tmp_path / "self").mkdir()
    assert family_cpu(10, without=[11], proc=tmp_path) == {
        10: Used(1, 1.0, 0.0),  # what it waited for were shards
        12: Used(10, 2.0, 3.0),
        20: Used(12, 2.0, 0.0),
    }
    assert family_cpu(10, proc=tmp_path / "nowhere") == {}


GONE = 2**22 + 1  # above what Linux numbers processes with: where it may run is not known


def test_what_was_used_before_does_not_count_and_new_processes_do():
    before = {GONE: Used(1, 1.0, 4.0), 7: Used(GONE, 5.0, 0.0)}
    after = {GONE: Used(1, 1.5, 4.0), GONE + 1: Used(GONE, 2.0, 1.0)}
    assert family_cpu_s(before, after, frozenset({0})) == pytest.approx(3.5)


def test_a_worker_that_ended_under_its_server_keeps_what_it_used_meanwhile():
    """5 s and 1 s of its own child before, 7 s and that second when the server waited for it."""
    before = {GONE: Used(1, 1.0, 4.0), 7: Used(GONE, 5.0, 1.0)}
    after = {GONE: Used(1, 1.5, 12.0)}
    assert family_cpu_s(before, after, frozenset({0})) == pytest.approx(0.5 + 2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen as on Linux")
def test_a_process_that_may_run_there_may_have_used_all_of_it_there():
    allowed = os.sched_getaffinity(0)
    used = {os.getpid(): Used(1, 6.0, 0.0)}
    assert family_cpu_s({}, used, frozenset({min(allowed)})) == 6.0
    assert family_cpu_s({}, used, frozenset({max(allowed) + 1})) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="`/proc` is Linux'")
def test_what_a_real_process_waited_for_is_told():
    """A child burns a tenth of a second in a child of its own, waits for it, and stays."""
    burn = "import time\nwhile time.process_time() < 0.1: pass"
    keep = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); "
    keep += "print(1, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", keep], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"1"
        assert family_cpu(os.getpid())[child.pid].reaped_s >= 0.09
    finally:
        child.communicate(b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="`/proc` is Linux'")
def test_a_real_child_is_of_the_family_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= set(family_cpu(os.getpid()))
        assert child.pid not in family_cpu(os.getpid(), without=[child.pid])
        assert os.getpid() not in family_cpu(child.pid)
    finally:
        child.communicate(b"\n")
    assert child.pid not in family_cpu(os.getpid())
