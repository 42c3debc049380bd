"""Simulating processes of `slobench modes`: their ends, and that of their parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.errors import TargetError
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.servers import CellServer
from loadgen.workload.scenario import scenario_from_flags
from tests.e2e.test_distributed import descendants
from tests.faults.test_hangup import started
from tests.waits import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(120)]
LONG = ("modes", "quickstart", "--duration=100000s", "--modes=continuous,chunked", "--workers=2")
MODES = (*LONG, "--rates=20", "--out=modes")


def simulating(process):
    """The simulating processes once both are past their start."""
    return wait_until(lambda: both(process.pid), 60, "two processes do not simulate")


def both(pid):
    spawned = [pid for pid, words in descendants(pid).items() if "spawn_main" in words]
    return spawned if len(spawned) == 2 and all(map(ignores_sigterm, spawned)) else None


def ignores_sigterm(pid):
    """Whether it is past its start: `SigIgn` of proc(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def are_gone(pids):
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_the_simulating_processes_end_with_a_killed_parent(cli, tmp_path):
    with started(cli, *MODES, cwd=tmp_path) as process:
        pids = simulating(process)
        process.kill()
        process.wait()
        wait_until(lambda: are_gone(pids), 10, "processes are left")


def test_the_death_of_a_simulating_process_is_named(cli, tmp_path):
    with started(cli, *MODES, cwd=tmp_path) as process:
        pids = simulating(process)
        os.kill(pids[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=40)
        assert are_gone(pids)
    assert process.returncode == 3, stderr
    assert "slobench: a simulating process died (ended by SIGKILL); the finished cells" in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_every_process_of_a_comparison_is_the_users(cli, tmp_path, number):
    with started(cli, *MODES, cwd=tmp_path) as process:
        pids = simulating(process)
        for pid in (*pids, process.pid):  # as a service manager does
            os.kill(pid, number)
        _, stderr = process.communicate(timeout=40)
        assert are_gone(pids)
    assert process.returncode == 130, stderr


def test_a_signal_to_a_simulating_process_alone_is_left_to_its_parent(cli, tmp_path):
    with started(cli, *MODES, cwd=tmp_path) as process:
        pids = simulating(process)
        os.kill(pids[0], signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=40)
        assert are_gone(pids)
    assert process.returncode == 130, stderr
    assert "died" not in stderr


def test_an_engine_that_is_still_loading_ends_with_its_parent(cli, tmp_path):
    with subprocess.Popen(["sleep", "300"]) as parent:
        words = ("--set=port=0", "--set=device=toy", f"--parent-pid={parent.pid}")
        command = [sys.executable, "-m", "reference_engine", *words]
        with subprocess.Popen(
            command, cwd=tmp_path, env=cli.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as engine:
            parent.kill()
            parent.wait()
            stdout, stderr = engine.communicate(timeout=60)
    assert (engine.returncode, stdout, stderr) == (0, b"", b"")


def test_an_engine_that_dies_at_its_start_leaves_no_half_written_log(tmp_path):
    logs = tmp_path / "servers" / "a"
    target = tmp_path / "local.yaml"
    script = tmp_path / "dies.sh"
    script.write_text(f"cd {logs}\ntouch engine_steps.partial other\nexit 7\n")
    target.write_text(f"launch: {{command: 'sh {script} {{port}}'}}\n")
    scenario = scenario_from_flags(name="a", rate="1/s", duration="1s", input_len=1, output_len=1)
    cell = Cell("a", scenario, str(target), RunOptions())
    with pytest.raises(TargetError, match="ended with code 7"):
        CellServer(cell, tmp_path / "servers", Console(quiet=True))
    assert (logs / "other").exists()
    assert not [*logs.glob("*.partial")]
