"""Runs against servers that slobench launches itself: real processes from start to reaping."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
TARGET = "launch: {preset: reference, model: nano, args: [--device, toy]}\n"
FLAGS = ["--rate=20/s", "--input-len=64", "--output-len=8"]


def test_a_launched_server_that_dies_ends_the_run_with_its_reason(cli, tmp_path):
    (tmp_path / "local.yaml").write_text(TARGET)
    with subprocess.Popen(
        [sys.executable, "-m", "loadgen", "run", *FLAGS, "--duration=60s", "--target=local.yaml",
         "--slo=ttft<=30s", *cli.lenient, "--out=run", "--json"],
        cwd=tmp_path, env=cli.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:
            assert any("5/60 s" in line for line in process.stderr), "it ended before it began"
            server = server_of(tmp_path)
            os.kill(server, signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 3, stderr
    summary = json.loads(stdout)
    assert summary["verdict"] == "no_verdict"
    assert "the server under test was killed by SIGKILL" in summary["reasons"][0]
    assert any("ended by itself" in finding for finding in summary["findings"])
    assert summary["counts"]["ok"] > 50
    assert not Path(f"/proc/{server}").exists()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["target"]["launch"]["command"].endswith("--port {port} --device toy")
    assert manifest["target"]["labels"]["engine"] == "reference"


def server_of(directory):
    """The process id of the server whose log is in a directory's run."""
    log = (directory / "run" / "logs" / "server.log").resolve()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            writes_there = (entry / "fd" / "1").resolve() == log
        except OSError:
            continue
        if writes_there:
            return int(entry.name)
    raise AssertionError(f"nobody writes to {log}")


def test_a_launch_that_fails_shows_and_keeps_what_the_server_said(cli, tmp_path):
    (tmp_path / "local.yaml").write_text(TARGET.replace("nano", "nanoo"))
    result = cli("run", *FLAGS, "--duration=1s", "--target=local.yaml", "--out=run", cwd=tmp_path)
    assert result.returncode == 3
    assert "did you mean 'nano'?" in result.stderr
    kept = re.search(r"its whole output is in (\S+)", result.stderr)
    assert kept is not None
    assert "nanoo" in (tmp_path / kept[1]).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local.yaml", "run.server.log"]


TRAFFIC = "--rate=4/s --input-len=8 --output-len=4 --duration=1s"
LAUNCHING = [
    f"run --target=local.yaml {TRAFFIC} --out=out",
    f"capacity --target=local.yaml {TRAFFIC} --slo=ttft<=1s --out=out",
    f"sweep --target=local.yaml {TRAFFIC} --over=rate=4/s,8/s --repeats=1 --out=out",
    "nightly nightly.yaml --out=out",
    f"compare --target local.yaml --target local.yaml {TRAFFIC} --out=out",
    "calibrate --target=local.yaml --shape=nano --out=out.yaml",
    "doctor --target=local.yaml",
    f"web --headless --target=local.yaml {TRAFFIC} --out=out",
]


@pytest.mark.faults
@pytest.mark.parametrize("command", LAUNCHING)
def test_the_command_of_a_launch_is_printed_and_can_be_refused(cli, tmp_path, command):
    """A target file of someone else is a program; this one leaves a file and ends."""
    script = tmp_path / "program.sh"
    script.write_text(f"touch {tmp_path / 'was_started'}\nexit 7\n")
    (tmp_path / "local.yaml").write_text(f"launch: {{command: 'sh {script} {{port}}'}}\n")
    (tmp_path / "steady.yaml").write_text(
        "schema: 1\nname: steady\narrivals: {kind: constant, rate: 4/s}\n"
        "requests: {input_tokens: 8, output_tokens: 4}\nphases: {measure: 1s}\n"
    )
    (tmp_path / "nightly.yaml").write_text(
        "schema: 1\nbaseline: baseline\nscenarios: [steady.yaml]\ntargets: [local.yaml]\n"
    )
    refused = cli(*command.split(), "--no-launch", cwd=tmp_path)
    told = " ".join((refused.stdout + refused.stderr).split())
    assert f"--no-launch (SLOBENCH_NO_LAUNCH) refuses to start it: sh {script} {{port}}" in told
    assert refused.returncode in (2, 3), told
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    by_environment = cli(*command.split(), cwd=tmp_path, environ={"SLOBENCH_NO_LAUNCH": "1"})
    assert "refuses" in by_environment.stdout + by_environment.stderr
    assert not (tmp_path / "was_started").exists()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    started = cli(*command.split(), cwd=tmp_path)
    assert f"launching: sh {script} {{port}}" in started.stdout + started.stderr
    assert (tmp_path / "was_started").exists()
