"""The tutorial's commands against the mock server with vLLM's wire: as they stand each night,
with shorter phases in CI."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from targets.embed import mock

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
SERVER = "http://localhost:8000"
VERDICTS = {"doctor": (0, 3), "compare": (0, 1, 3)}
SHORTER = {"--duration 20s": "--duration 3s", "--budget 1m": "--budget 10s --between 40/s:80/s"}
AS_THEY_STAND = pytest.param({}, id="as-they-stand", marks=pytest.mark.release)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("replaced", [pytest.param(SHORTER, id="shorter"), AS_THEY_STAND])
def test_every_command_of_the_tutorial_runs(replaced, tmp_path):
    text = PAGE.read_text()
    for flag, shorter in replaced.items():
        assert flag in text
        text = text.replace(flag, shorter)
    commands = re.findall(r"^slobench .*$", text, re.MULTILINE)
    assert [shlex.split(command)[1] for command in commands] == [
        "doctor", "run", "report", "rescore", "capacity", "run", "compare",
    ]  # fmt: skip
    with mock({"persona": "vllm", "ttft": "30ms", "itl": "8ms"}, tmp_path) as served:
        for command in commands:
            words = shlex.split(command.replace(SERVER, served.endpoint.url))[1:]
            done = subprocess.run(
                [sys.executable, "-m", "loadgen", *words],
                cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
            )  # fmt: skip
            codes = VERDICTS.get(words[0], (0, 3))
            assert done.returncode in codes, f"{command}: {done.stdout}{done.stderr}"
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert (tmp_path / "runs" / "capacity" / "report.html").is_file()
