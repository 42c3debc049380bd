"""`scripts/gpu-check` with a stand-in driver and a stand-in torch that finds a GPU, on a machine
whose Python is a virtual environment without the packages that slobench needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

if None in (find_spec("pip"), find_spec("setuptools")):
    pytest.skip("pip or setuptools is not installed", allow_module_level=True)

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
SUITE = """
import importlib.metadata, json, sys
import lacking, torch
kinds = importlib.metadata.entry_points(group="slobench.executors")
found = {"arguments": sys.argv[1:], "lacking": lacking.__file__, "torch": torch.__file__}
print(json.dumps(found | {"kinds": sorted(kind.name for kind in kinds)}))
"""


@pytest.fixture
def machine(tmp_path):
    """The checkout, the environment variables to run it with, and torch's site-packages."""
    checkout, base, driver = tmp_path / "checkout", tmp_path / "base", tmp_path / "bin"
    (checkout / "benchmarks").mkdir(parents=True)
    (checkout / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu-check", checkout / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("loadgen", "reference_engine"):
        (checkout / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", checkout / name)
    (checkout / "slobench.py").touch()
    (checkout / "benchmarks" / "gpu_suite.py").write_text(SUITE)
    driver.mkdir()
    (driver / "nvidia-smi").touch(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    site = next((base / "lib").glob("python3*")) / "site-packages"
    (site / "ours.pth").write_text(sysconfig.get_path("purelib"))  # pip and setuptools
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "PATH": f"{driver}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(base / "bin" / "python"),
    }
    return checkout, environment, site


def wheel(directory: Path) -> None:
    """Write the wheel of `lacking`, a package that the machine does not have."""
    directory.mkdir(exist_ok=True)
    info = "lacking-1.0.dist-info"
    with zipfile.ZipFile(directory / "lacking-1.0-py3-none-any.whl", "w") as file:
        file.writestr("lacking.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: lacking\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def checked(machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    checkout, environment, _ = machine
    return subprocess.run(
        [checkout / "scripts" / "gpu-check", *arguments],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_it_runs_on_the_machines_torch_with_the_wheels_and_the_kinds_of_this_checkout(machine):
    checkout, _, site = machine
    wheel(checkout / ".gpu-wheels")
    before = sorted(path.name for path in checkout.iterdir())
    for _ in range(2):  # the second run finds the files of the first
        done = checked(machine, "--stage", "2")
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"] == str(site / "torch" / "__init__.py")
    assert found["lacking"] == str(checkout / ".gpu-site" / "lacking.py")
    assert found["kinds"] == ["simulated", "torch_cpu", "torch_cuda", "toy"]
    budget, left_s, *others = found["arguments"]
    assert budget == "--budget"
    assert 320 <= int(left_s) <= 420  # seven minutes less the setup
    assert others == ["--stage", "2"]
    assert sorted(path.name for path in checkout.iterdir()) == sorted([*before, ".gpu-site"])


def test_without_wheels_the_error_has_the_command_to_get_them(machine):
    done = checked(machine)
    assert done.returncode == 1
    assert ".gpu-wheels is missing; run scripts/gpu-wheels" in done.stderr


def test_a_torch_that_finds_no_gpu_is_an_error(machine):
    _, _, site = machine
    (site / "torch" / "__init__.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    done = checked(machine)
    assert done.returncode == 1
    assert "has a torch that finds the GPU" in done.stderr


def test_without_a_driver_nothing_is_measured(machine):
    _, environment, _ = machine
    environment["PATH"] = os.path.dirname(shutil.which("dirname") or "/usr/bin")
    if shutil.which("nvidia-smi", path=environment["PATH"]):
        pytest.skip("there is a driver in the folder of the other tools")
    done = checked(machine)
    assert done.returncode == 0
    assert done.stdout == "gpu-check: no NVIDIA driver here, nothing was measured\n"
