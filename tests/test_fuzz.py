"""Every parser that reads from outside: its seeds, kept failures, and some mutations of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import KEPT, PARSERS, failure, fuzz, kept

pytestmark = pytest.mark.faults
_OWN_PROCESS = ("zmq",)  # imports locust, which patches the process


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in _OWN_PROCESS])
def test_a_parser_raises_only_the_projects_errors(name):
    for path in kept(name):
        assert failure(PARSERS[name], path.read_bytes()) is None, path
    for data in PARSERS[name].seeds():
        assert failure(PARSERS[name], data) is None
    n, problem = fuzz(name, 0, 1, 60)
    assert (n, problem) == (60, None)


@pytest.mark.parametrize("name", _OWN_PROCESS)
def test_a_frame_of_a_stranger_is_read_or_refused(name):
    words = ["-m", "tests.fuzz", name, "--runs=400", "--seed=1"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kept_inputs_belong_to_parsers():
    assert {path.name for path in KEPT.glob("*")} <= set(PARSERS)
