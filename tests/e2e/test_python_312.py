"""What is pinned can be installed on a Python that these tests do not run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER = [
    *("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"),
    *(word for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
                       "any") for word in ("--platform", tag)),
]  # fmt: skip


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A wait for an index that is not there is short."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input",
         "--retries", "1", "--timeout", "5", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def requirements(tmp_path_factory) -> list[str]:
    """What every user installs; extras are left to the workflow, which has a whole Python 3.12.
    Skips where no index answers for the Python that runs."""
    where = tmp_path_factory.mktemp("wheels")
    probe = pip("download", "-q", "--no-deps", "-c", "constraints.txt", "-d", str(where), "mdurl")
    if probe.returncode:
        pytest.skip(f"no package index here: {probe.stderr.strip().splitlines()[-1]}")
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.e2e
def test_every_pin_resolves_for_python_3_12(requirements, tmp_path):
    """To wheels alone, downloading none of them. Markers are those of the Python that runs: pip
    has no other."""
    report = tmp_path / "report.json"
    done = pip(
        "install", "-q", "--dry-run", "--ignore-installed", "--target", str(tmp_path / "to"),
        *OTHER, "-c", "constraints.txt", "--report", str(report), *requirements,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [one["download_info"]["url"].rpartition("/")[2] for one in
             json.loads(report.read_text(encoding="utf-8"))["install"]]  # fmt: skip
    assert len(files) > 25
    compiled = [name for name in files if name.startswith(("numpy-", "uvloop-", "pydantic_core-"))]
    assert len(compiled) == 3
    assert all("-cp312-" in name for name in compiled)


@pytest.mark.e2e
def test_a_version_without_a_wheel_for_it_is_noticed(requirements, tmp_path):
    """numpy 1.25 has wheels for Python 3.9 to 3.11."""
    done = pip("download", "-q", "--no-deps", *OTHER, "-d", str(tmp_path), "numpy==1.25.0")
    assert done.returncode != 0
    assert "No matching distribution found for numpy==1.25.0" in done.stderr
