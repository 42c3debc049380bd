"""The kernels in Triton's interpreter against their twins, and compiled for a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        None in (find_spec("torch"), find_spec("triton")),
        reason="torch or triton is not installed",
    ),
]
ROOT = Path(__file__).parents[2]
# Of a thread, at most: those of Triton 3.6, which uses more than later versions. Up to 255, two
# programs of four warps fit on a multiprocessor.
REGISTERS = {"decode": 208, "chunk": 240, "fused": 255}
INTERPRETED = "tests/reference_engine/interpreted_kernels.py"


def test_every_kernel_agrees_with_its_twin():
    """In a process of its own, as Triton chooses its interpreter at import."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", INTERPRETED],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 9


def test_every_kernel_compiles_for_hopper_and_reads_in_wide_pieces(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference_engine.compiled_kernels"],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) == 17
    attentions = {name: count for name, count in counts.items() if "spilled" in count}
    assert len(attentions) == 10
    join = attentions.pop("decode_join")
    assert join["spilled"] == 0
    assert join["registers"] <= 128
    for name, count in attentions.items():
        assert count["cp.async"] > 0, f"{name}: the loop is not pipelined"
        assert count["ld.global.b16"] == count["ld.global.b8"] == 0, f"{name}: narrow loads"
        assert count["spilled"] == 0, name
        assert count["registers"] <= REGISTERS[name.partition("_")[0]], name
        if name.startswith("decode"):  # two programs of a multiprocessor share 227 KiB
            assert 2 * count["shared_bytes"] <= 227 << 10, name
        assert (count["mma.sync"] > 0) is name.startswith(("decode", "fused")), name
        assert (count["wgmma.mma_async"] > 0) is name.startswith(("chunk", "fused")), name
    spills = {name: c for name, c in counts.items() if c["st.local"] or c["ld.local"]}
    assert not spills
