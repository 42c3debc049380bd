"""Kernel timings of the GPU suite: the order of CUDA calls, and torch's FlashAttention as a
check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reference_engine.model.zoo import SHAPES
from tests.reference_engine.cuda_stand_in import StandIn

torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from rig import gpu_kernels  # noqa: E402
from rig.gpu_ceilings import Ceilings, Place  # noqa: E402
from rig.gpu_kernels import (  # noqa: E402
    check_equal,
    flash_attention,
    gathered_flash,
    kernel_cases,
    replayed,
)

from reference_engine.kernels.kv_memory import Kv  # noqa: E402
from reference_engine.kernels.ops import PLAIN  # noqa: E402
from reference_engine.kernels.tiles import Tiles  # noqa: E402

CPU = Place("cpu", torch.float32, 64)
TOP = Ceilings(1e10, 1e10)


def test_calls_are_captured_once_and_their_replay_is_timed():
    cuda = StandIn()
    place = Place("cpu", torch.float32, 1, cuda=cuda)
    took = replayed(lambda: cuda.calls.append("work"), place, 4)
    captured = ["capture into None", *["work"] * 4, "captured"]
    calls = [call for call in cuda.calls if call != "synchronize"]
    assert calls[:9] == ["work"] * 3 + captured
    assert set(calls[9:]) == {"replay"}
    assert len(took.each_s) == 2
    assert min(took.each_s) > 0


def test_torchs_attention_over_gathered_blocks_equals_the_chunk_kernel():
    """Seven positions after 21, on scattered blocks, two heads for each of K and V."""
    generator = torch.Generator().manual_seed(1)
    cache = Kv(torch.randn(9, 2, 2, 4, 16, generator=generator))
    table = torch.tensor([[8, 1, 5, 0, 7, 2, 3]], dtype=torch.int32)
    q = torch.randn(7, 4, 16, generator=generator)
    tiles = Tiles(torch.tensor([[0, 0, 7, 21]], dtype=torch.int32))
    expected = PLAIN.chunk_attention(q, cache, table, tiles)
    output = gathered_flash(q, cache, table[0], 21, CPU)()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    check_equal(output, expected)
    with pytest.raises(RuntimeError, match="off by"):
        check_equal(output.flip(0), expected)
    with pytest.raises(RuntimeError, match="off by nan"):
        check_equal(output * float("nan"), expected)


def test_torch_accepts_the_arguments_of_flash_attention():
    """On tensors without content, shapes and dtypes are checked and nothing is computed."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    ends = [empty(2, dtype=torch.int32)] * 2
    out = flash_attention(empty(32, 32, 128), empty(160, 8, 128), empty(160, 8, 128), ends)
    assert (out.shape, out.dtype) == ((32, 32, 128), torch.bfloat16)


def attention_timings():
    return [
        timing
        for name, measure in kernel_cases(PLAIN, SHAPES["nano"], CPU, TOP)
        if name.startswith("chunk")
        for timing in measure()
    ]


def test_the_table_marks_the_faster_of_the_two():
    timings = attention_timings()
    assert [timing.kernel for timing in timings] == [
        "chunk attention",
        "gather + torch's flash",
    ] * 2
    for pair in (timings[:2], timings[2:]):
        fastest = min(pair, key=lambda timing: timing.seconds)
        assert [timing for timing in pair if timing.case.endswith(", faster")] == [fastest]


def test_the_table_gives_the_reason_if_torch_has_no_flash_attention(monkeypatch):
    def refuse(*arguments):
        def attend():
            raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build.\nat flash.cpp:7")

        return attend

    monkeypatch.setattr(gpu_kernels, "gathered_flash", refuse)
    reason = " (torch's flash not run: USE_FLASH_ATTENTION was not enabled for build.)"
    cases = [timing.case for timing in attention_timings()]
    assert cases == [f"32 after {start}{reason}" for start in (0, 128)]
