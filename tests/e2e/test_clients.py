"""The openai SDK against `slobench serve`. The nightly workflow also runs LiteLLM, guidellm and
aiperf (scripts/client-check)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "clients" / "openai_examples.py"

pytestmark = pytest.mark.e2e


def test_the_examples_of_the_openai_sdk_run():
    pytest.importorskip("openai", reason="openai is not installed: scripts/client-check openai")
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, "-m", "loadgen", "serve", "--shape", "nano", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("READY ").strip()
            done = subprocess.run(
                [sys.executable, str(EXAMPLES), url], capture_output=True, text=True, timeout=90
            )
            assert done.returncode == 0, done.stderr
        finally:
            server.terminate()
