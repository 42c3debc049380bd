"""Commands end in time, with all processes of their group."""

import os
import signal
import sys
from pathlib import Path

import pytest

from loadgen.studies.demo.bounded_command import finished
from tests.waits import wait_until

WITH_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
"""
PAUSE = "import signal; signal.pause()"


def wait_for_end(pid):
    def has_ended():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] == "Z"

    wait_until(has_ended, 10.0, f"process {pid} has not ended")


def test_a_command_has_its_own_cpu_time_and_its_output():
    code = "import sys; sum(range(3_000_000)); print('out'); print('err', file=sys.stderr); exit(3)"
    done = finished([sys.executable, "-c", code], {})
    assert (done.exit_code, done.output, done.is_cut) == (3, "out\nerr\n", False)
    assert 0 < done.cpu_s <= done.ended_s - done.started_s


def test_the_environment_is_added():
    done = finished([sys.executable, "-c", "import os; print(os.environ['OF_A_TEST'])"],
                    {"OF_A_TEST": "here"})  # fmt: skip
    assert done.output == "here\n"


def test_a_command_that_does_not_end_is_cut_with_its_children():
    done = finished([sys.executable, "-c", WITH_A_CHILD + PAUSE], {}, limit_s=1.0)
    assert done.is_cut
    assert done.exit_code == -signal.SIGTERM
    assert done.ended_s - done.started_s >= 1.0
    wait_for_end(int(done.output))


def test_children_that_a_command_leaves_are_ended():
    done = finished([sys.executable, "-c", WITH_A_CHILD], {}, limit_s=60.0)
    assert (done.exit_code, done.is_cut) == (0, False)
    wait_for_end(int(done.output))


def test_an_interrupt_ends_the_command(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, pathlib; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); "

    def interrupt(*_):
        if not pid_file.exists():  # not started yet
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            finished([sys.executable, "-c", code + PAUSE], {}, limit_s=60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_program_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        finished(["no-such-program-of-a-test"], {})
