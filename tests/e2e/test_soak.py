"""The engine's server among rude clients and restless operators; the full size is a benchmark."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "soak.py"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_nothing_leaks_sticks_or_grows(workers):
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--requests",
            "600",
            "--seed",
            "7",
            "--http-workers",
            workers,
        ],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=SCRIPT.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "OK"
    assert "cut_off" in done.stdout
