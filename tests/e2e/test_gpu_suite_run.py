"""The stages of the GPU suite at a 64th of the size, on a stand-in for a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_suite  # noqa: E402
from rig import gpu_server  # noqa: E402
from rig.gpu_results import combined  # noqa: E402
from rig.gpu_stages import STAGES  # noqa: E402

from targets.embed import engine  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


SMALL = [sys.executable, "-m", "tests.reference_engine.gpu_part_stand_in"]
NOT_INSTALLED = "ModuleNotFoundError: import of transformers halted; None in sys.modules"


def small(name, result, merged, logs):
    return [*SMALL, name, str(result), str(merged), str(logs), "--small"]


# On the GPU machine, by scripts/gpu-wheels; the wheels are read from the script itself.
ON_THE_MACHINE = (
    "torch", "triton", "numpy", "aiohttp", "typer", "pyarrow", "safetensors", "transformers"
)  # fmt: skip
BLOCKING = """
import subprocess
import sys

BLOCKED = frozenset({blocked!r})


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)


sys.meta_path.insert(0, Blocked())
"""


def carried() -> set[str]:
    """Distributions of the GPU machine: the wheels of `scripts/gpu-wheels`, and what is installed
    there with all that it requires."""
    script = (ROOT / "scripts" / "gpu-wheels").read_text(encoding="utf-8")
    wheels = script.partition("--only-binary=:all:")[2].partition("\nkib=")[0]
    names = set(re.findall(r"[a-z][a-z0-9-]+", wheels))
    pending = list(ON_THE_MACHINE)
    while pending:
        name = canonical(pending.pop())
        if name not in names:
            names.add(name)
            pending += required(name)
    return names


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str) -> list[str]:
    """The distributions that `name` requires without extras; none if it is not installed here."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]


@pytest.fixture(autouse=True)
def only_carried(tmp_path, monkeypatch):
    """In all processes that a test starts, only packages of the GPU machine can be imported: all
    others that are installed here are blocked."""
    own = {"slobench", "setuptools"}
    names = carried() | own
    blocked = {
        module
        for module, dists in metadata.packages_distributions().items()
        if not {canonical(dist) for dist in dists} & names
    }
    assert "mypy" in blocked
    assert not {"torch", "pydantic", "rich", "yaml", "msgspec"} & blocked
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKING.format(blocked=sorted(blocked)))
    monkeypatch.setenv("PYTHONPATH", str(site))


def test_a_rehearsal_imports_only_what_the_gpu_machine_has(tmp_path):
    """As the stages of the other tests, but with the command and without a stand-in for the GPU."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip

    assert "blocked: " in run("-c", "import mypy").stderr
    done = run(
        *("benchmarks/gpu_suite.py", "--rehearse", "--only", "ceilings", "--out", str(tmp_path))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("gpu-rehearsal-*.json")
    parts = json.loads(result.read_text(encoding="utf-8"))["parts"]
    assert {name: part["failures"] for name, part in parts.items()} == {"ceilings": {}}


def measured(tmp_path, number: int) -> tuple[int, dict[str, Any]]:
    """The exit code and the result of a stage."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: scripts/gpu-check")
    code = gpu_suite.main(
        ["--stage", str(number), "--out", str(tmp_path)], small, "NVIDIA H200", 10
    )
    (path,) = tmp_path.glob("gpu-h200-*.json")
    result = json.loads(path.read_text())
    assert list(result["parts"]) == list(STAGES[number])
    return code, result


def goals(result: dict[str, Any]) -> set[str]:
    return {goal["name"] for part in result["parts"].values() for goal in part["goals"]}


def test_stage_1_measures_compares_with_goals_and_writes(tmp_path, capsys):
    """Goals may be missed, and tests/gpu skips itself: the exit code is 1."""
    code, result = measured(tmp_path, 1)
    assert code == 1
    assert combined(result, "failures") == {
        "tests": "RuntimeError: the tests of tests/gpu ended with 5 and 5"
    }
    figures = combined(result, "figures")
    assert len(figures["kernels"]) == 14
    assert all(len(row["each_s"]) == 2 for row in figures["kernels"])
    assert [(row["shape"], row["rows"]) for row in figures["decode_steps"]] == [
        ("0.6b", 1), ("0.6b", 32), ("0.6b", 256), ("8b", 1), ("8b", 32), ("8b", 256)
    ]  # fmt: skip
    assert len(figures["throughput"]["runs"]) == 2
    assert goals(result) == {
        "decode attention, batch 4, context 16", "decode attention, batch 4, context 128",
        "decode step 0.6b, batch 32", "decode step 0.6b, batch 256", "decode step 8b, batch 32",
        "decode step 8b, batch 256", "8 requests, in/out U(4, 20), 0.6b",
        "plan + prepare at 256 sequences",
    }  # fmt: skip
    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    assert text in capsys.readouterr().out
    for heading in ("| target |", "| kernel |", "| part |", "- **failed**: tests"):
        assert heading in text


def test_stage_2_measures_http_and_modes_and_records_that_transformers_is_missing(tmp_path):
    code, result = measured(tmp_path, 2)
    assert code == 1
    assert combined(result, "failures") == {
        "generate_batch": NOT_INSTALLED, "generate": NOT_INSTALLED
    }  # fmt: skip
    figures = combined(result, "figures")
    assert list(figures["modes"]["of"]) == ["static", "continuous", "prefill_first", "chunked"]
    assert len(figures["modes"]["capacity_per_s"]) == 2
    assert len(figures["http"]["served"]) == len(figures["http"]["alone"]) == 2
    assert len(figures["long_answers"]["points"]) == 3
    assert goals(result) == {
        "8b, batch 32, 8 k outputs, extrapolated",
        "HTTP path against the engine alone, 256 streams, 1b",
    }
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as tar:
        assert {"logs/steps-http/engine_steps.parquet", "logs/http.txt"} <= set(tar.getnames())


def test_stage_3_measures_mixed_contexts_other_tiles_and_whole_outputs(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 12 passed in 9 s; echo ERROR SUMMARY: 0 errors\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    code, result = measured(tmp_path, 3)
    assert code == 1
    assert combined(result, "failures") == {}
    figures = combined(result, "figures")
    assert figures["sanitizer"] == dict.fromkeys(
        ("memcheck", "racecheck", "initcheck"), "clean: 12 tests"
    )
    assert len(figures["mixed_contexts"]) == len(figures["mixed_steps"]) == 3
    assert len(figures["sweep"]) == 20
    assert figures["tuning"]["entry"].startswith('"H200": Tuning(')
    assert list(figures["experiments"]["attention"]) == ["auto", "fp8", "int8"]
    assert figures["experiments"]["parts of a GPU"].startswith("not run: No module named 'cuda'")
    assert figures["long"]["whole_s"] > 0
    assert "decode attention, a row of 32 k among 63 of 1 k" in goals(result)


def test_the_clients_count_the_tokens_of_a_real_server(tmp_path):
    with engine({"device": "toy", "shape": "nano"}, tmp_path) as served:
        url = served.endpoint.url
        with gpu_server.clients(2) as clients:
            timings = gpu_server.send_requests(clients, url, [(0.0, 20, 5), (0.1, 30, 6)])
            again = gpu_server.send_requests(clients, url, [(0.0, 20, 7)])
            with pytest.raises(RuntimeError, match="a client failed with exit code 1"):
                gpu_server.send_requests(clients, url, [(0.0, 20, -1)])
    assert sorted(int(timing[4]) for timing in timings) == [5, 6]
    assert [int(timing[4]) for timing in again] == [7]
    assert all(at <= sent <= first <= last for at, sent, first, last, _ in timings)
