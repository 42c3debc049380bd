"""`slobench web` as a process: how a signal ends it."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.e2e.test_distributed import MOCK, free_port, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_master_that_waits_for_workers_ends_at_sigterm(cli, tmp_path):
    with started(
        cli, "web", "--headless", "--expect-workers=1", f"--master-port={free_port()}", *MOCK,
        "--scenario=quickstart", cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as master:  # fmt: skip
        assert any("waiting for 1 workers" in line for line in master.stderr)
        master.send_signal(signal.SIGTERM)
        said = master.stderr.read()
        assert master.wait(60) == 130, said
        assert "Traceback" not in said


def test_sigterm_keeps_the_run(cli, tmp_path):
    """Like the end of a container: only the main process receives it, and ends the others."""
    with started(
        cli, "web", "--headless", "--workers=1", *MOCK, "--scenario=quickstart", "--rate=10/s",
        "--duration=100s", "--warmup=0s", *cli.lenient, "--out=run",
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as master:  # fmt: skip
        assert any(line.startswith("sending") for line in master.stderr)
        master.send_signal(signal.SIGTERM)
        said = master.stderr.read()  # to its end: whoever else held it has ended, too
        assert master.wait(60) == 130, said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "no_verdict"
