"""The whole GPU suite at a 64th of the size, on a stand-in for a GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_suite  # noqa: E402
from rig import gpu_server  # noqa: E402
from rig.gpu_ceilings import Place  # noqa: E402

from targets.embed import engine  # noqa: E402
from tests.reference_engine.cuda_stand_in import StandIn  # noqa: E402

pytestmark = pytest.mark.e2e


def test_the_whole_suite_measures_compares_with_goals_and_writes(tmp_path, monkeypatch, capsys):
    """Goals may be missed, tests/gpu skips itself, and transformers is made to be missing: the exit
    code is 1."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: make gpu-check")
    monkeypatch.setitem(sys.modules, "transformers", None)
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 12 passed in 9 s; echo ERROR SUMMARY: 0 errors\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    out, place = tmp_path / "results", Place("cpu", torch.float32, 64, cuda=StandIn())
    assert gpu_suite.main(["--experiments", "--out", str(out)], place) == 1
    (path,) = out.glob("gpu-h200-*.json")
    results = json.loads(path.read_text())
    failures = results["failures"]
    assert set(failures) == {"transformers", "tests"}
    assert failures["tests"] == "RuntimeError: the tests of tests/gpu ended with 5 and 5"
    assert list(results["seconds"]) == [*gpu_suite.PARTS, "experiments"]
    assert results["gpu"] == {"name": "NVIDIA H200", "memory_bytes": 8 << 30}
    assert len(results["kernels"]) == 14
    assert [(row["shape"], row["rows"]) for row in results["decode_steps"]] == [
        ("0.6b", 1), ("0.6b", 32), ("0.6b", 256), ("8b", 1), ("8b", 32), ("8b", 256)
    ]  # fmt: skip
    assert list(results["modes"]["of"]) == ["static", "continuous", "prefill_first", "chunked"]
    assert results["sanitizer"] == "clean: 12 tests"
    assert list(results["experiments"]["attention"]) == ["auto", "fp8", "int8"]
    assert {goal["name"] for goal in results["goals"]} == {
        "decode attention, batch 4, context 16", "decode attention, batch 4, context 128",
        "decode step 0.6b, batch 32", "decode step 0.6b, batch 256", "decode step 8b, batch 32",
        "decode step 8b, batch 256", "8b, batch 32, 8 k outputs, extrapolated",
        "8 requests, in/out U(4, 20), 0.6b", "plan + prepare at 256 sequences",
        "HTTP path against the engine alone, 256 streams, 1b",
    }  # fmt: skip
    assert {path.name for path in (out / "gpu-logs" / "steps").iterdir()} == {
        "engine_events.parquet", "engine_steps.parquet"
    }  # fmt: skip
    text = path.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    for heading in ("| target |", "| kernel |", "| mode |", "| KV | decode", "- **failed**: tests"):
        assert heading in text
    assert "Parts of the GPU: not run: No module named 'cuda'" in text


def test_the_clients_count_the_tokens_of_a_real_server(tmp_path):
    with engine({"device": "toy", "shape": "nano"}, tmp_path) as served:
        timings = gpu_server.send_requests(served.endpoint.url, [(0.0, 20, 5), (0.1, 30, 6)])
    assert sorted(int(timing[4]) for timing in timings) == [5, 6]
    assert all(at <= sent <= first <= last for at, sent, first, last, _ in timings)
