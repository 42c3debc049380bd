"""Standard streams that are closed, and readers that leave: run, report and exit code stay."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.faults]
RUN = ("run", "--target=mock", "--engine=ttft=5ms,itl=1ms", "--rate=40/s", "--input-len=64")


def words(cli, seconds):
    slo = ["--slo=ttft<=30s", *cli.lenient, "--out=run"]
    return [*RUN, "--output-len=8", f"--duration={seconds}s", *slo]


@contextmanager
def piped(cli, cwd, seconds):
    """A run with stdout and stderr in one pipe; yields the process and the read end of the pipe."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *words(cli, seconds)],
        cwd=cwd, env=cli.environ, stdout=writer, stderr=writer,
    )  # fmt: skip
    os.close(writer)
    try:
        with os.fdopen(reader, "rb", buffering=0) as output:
            yield process, output
    finally:
        process.kill()
        process.wait()


def read_until(output, text):
    seen = b""
    while text not in seen:
        data = output.read(1 << 12)
        assert data, f"the output ended without {text!r}: {seen.decode()}"
        seen += data


def verdict(directory):
    assert (directory / "report.html").is_file()
    return json.loads((directory / "summary.json").read_text())["verdict"]


def test_a_reader_that_leaves_does_not_change_the_verdict(cli, tmp_path):
    with piped(cli, tmp_path, 2) as (process, output):
        read_until(output, b"sending")
        output.close()
        assert process.wait(60) == 0
    assert verdict(tmp_path / "run") == "met"


def test_ctrl_c_drains_and_reports_after_tee_has_died(cli, tmp_path):
    with piped(cli, tmp_path, 60) as (process, output):
        read_until(output, b"5/60 s")
        output.close()  # Ctrl-C ends `tee` at once
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert verdict(tmp_path / "run") == "no_verdict"
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["ended"] == "interrupted"


@pytest.mark.parametrize("closed", ["| true", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_met_run_exits_0_without_a_place_for_its_output(cli, tmp_path, closed):
    script = f'"$@" {closed}; exit ${{PIPESTATUS[0]}}'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "loadgen", *words(cli, 1)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert verdict(tmp_path / "run") == "met"


@pytest.mark.parametrize("verb", [["list", "--json"], ["--help"], ["preview", "quickstart"]])
def test_a_reader_of_the_first_line_does_not_fail_a_verb(cli, tmp_path, verb):
    script = '"$@" | head -1; exit ${PIPESTATUS[0]}'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "loadgen", *verb]
    ended = subprocess.run(
        command, cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
