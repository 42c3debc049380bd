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
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        None in (find_spec("torch"), find_spec("triton")),
        reason="torch or triton is not installed",
    ),
]
ROOT = Path(__file__).parents[2]
# Of a thread, at most: those of Triton 3.6, which uses more than later versions. Up to 255, two
# programs of four warps fit on a multiprocessor.
REGISTERS = {"decode_narrow": 152, "decode": 208, "chunk_tall": 255, "chunk": 240, "fused": 255}
# Bytes, with Triton 3.9: a candidate of part `sweep`, not the default.
SPILLED = {"decode_narrow_int8": 8}
INTERPRETED = "tests/reference_engine/interpreted_kernels.py"
RECORDED = "tests/reference_engine/recorded_launches.py"
COMPILING = {"TRITON_DEFAULT_FP_FUSION": "1"}


def test_every_kernel_agrees_with_its_twin():
    """In a process of its own, as Triton chooses its interpreter at import."""
    assert passed(INTERPRETED, {"TRITON_INTERPRET": "1"}) >= 9


def test_cached_launches_are_those_of_triton(tmp_path):
    """In a process of its own, as it replaces Triton's driver."""
    assert passed(RECORDED, COMPILING | {"TRITON_CACHE_DIR": str(tmp_path)}) == 14


def passed(path: str, environment: dict[str, str]) -> int:
    """The number of tests in `path`, all of which pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) passed", done.stdout)
    assert count is not None
    return int(count[1])


def registers(name: str) -> int:
    """The limit of a kernel, whose name may have the dtype of KV behind it."""
    return next(limit for kernel, limit in REGISTERS.items() if name.startswith(kernel))


def test_every_kernel_compiles_for_hopper_and_reads_in_wide_pieces(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference_engine.compiled_kernels"],
        cwd=ROOT,
        env=os.environ | COMPILING | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) == 27
    attentions = {name: count for name, count in counts.items() if "spilled" in count}
    assert len(attentions) == 20
    join = attentions.pop("decode_join")
    assert join["spilled"] == 0
    assert join["registers"] <= 128
    for name, count in attentions.items():
        assert count["cp.async"] > 0, f"{name}: the loop is not pipelined"
        assert count["ld.global.b16"] == count["ld.global.b8"] == 0, f"{name}: narrow loads"
        assert count["spilled"] <= SPILLED.get(name, 0), name
        assert count["registers"] <= registers(name), name
        if name.startswith("decode"):  # two programs of a multiprocessor share 227 KiB
            assert 2 * count["shared_bytes"] <= 227 << 10, name
        if name == "decode_narrow":  # four, with all their registers
            assert 4 * count["shared_bytes"] <= 227 << 10
            assert 4 * 128 * count["registers"] <= 65_536
        assert (count["mma.sync"] > 0) is name.startswith(("decode", "fused")), name
        assert (count["wgmma.mma_async"] > 0) is name.startswith(("chunk", "fused")), name
    spills = {name: c for name, c in counts.items() if c["st.local"] or c["ld.local"]}
    assert not spills
