"""Commands in the directory of a command that is still running."""

import json
import signal
import subprocess
import sys

import pytest

from loadgen.archive.store import read_run
from tests.studies.nightly import few
from tests.waits import wait_until

pytestmark = pytest.mark.e2e

PROGRAM = [sys.executable, "-m", "loadgen"]
LOAD = ["--rate=5/s", "--input-len=20", "--output-len=8", "--target=mock"]


@pytest.fixture
def start(cli, tmp_path):
    """Starts a command line; it is killed at the end of the test."""
    started = []

    def launch(*words):
        process = subprocess.Popen(
            [*PROGRAM, *words],
            cwd=tmp_path,
            env=cli.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.faults
def test_a_live_run_and_a_live_search_are_not_disturbed(cli, start, tmp_path):
    run = start("run", *LOAD, "--duration=80s", "--out=a")
    wait_until((tmp_path / "a" / "manifest.json").exists, 60, "the run has not begun")
    for words in (
        ["run", *LOAD, "--duration=1s", "--out=a", "--force"],
        ["run", *LOAD, "--duration=1s", "--out=a"],
        ["report", "a"],
    ):
        result = cli(*words, cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        assert f"in use by the run command_line, pid {run.pid} on " in result.stderr
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert read_run(tmp_path / "a").manifest.ended == "interrupted"

    words = ["capacity", *LOAD, "--duration=20s", "--slo=ttft<=1s", "--out=c"]
    search = start(*words)
    wait_until((tmp_path / "c" / "probes" / "01").exists, 60, "the search has not begun")
    result = cli(*words, "--resume", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert f"in use by the capacity search command_line, pid {search.pid}" in result.stderr
    assert search.poll() is None


@pytest.mark.faults
def test_two_nights_in_the_same_second_have_two_names(start, tmp_path):
    """Started together; whether or not the second is the same, both have a directory each and are
    in the baseline."""
    few.write(tmp_path, "baseline: baseline\n")
    nights = [start("nightly", "nightly.yaml") for _ in range(2)]
    for night in nights:
        output, _ = night.communicate(timeout=120)
        assert night.returncode == 0, output
    directories = sorted((tmp_path / "runs").glob("nightly-*"))
    facts = [json.loads((d / "nightly.json").read_text()) for d in directories]
    assert len({fact["night"] for fact in facts}) == 2
    stored = [p.stem for p in (tmp_path / "baseline").glob("*/nights/*.json")]
    assert sorted(stored) == sorted(fact["night"] for fact in facts)


@pytest.mark.faults
def test_a_live_comparison_of_modes_is_not_disturbed(cli, start, tmp_path):
    words = ["modes", "long_prompt_interference", "--modes=chunked,static", "--out=m"]
    modes = start(*words, "--seeds=40", "--workers=1")
    wait_until(lambda: list(tmp_path.glob("m/cells/*.json")), 60, "no cell is done")
    result = cli(*words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "in use by the comparison of modes long_prompt_interference, pid" in result.stderr
    modes.send_signal(signal.SIGINT)
    output, _ = modes.communicate(timeout=60)
    assert modes.returncode == 130, output
    assert not (tmp_path / "m" / ".slobench.lock").exists()
