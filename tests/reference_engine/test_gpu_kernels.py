"""How the GPU suite times kernels, as far as a CPU can tell."""

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
from rig.gpu_flash import flash, gathered_flash, refuse_another_answer  # noqa: E402
from rig.gpu_kernels import all_kernels, replayed_s  # noqa: E402

from reference_engine.kernels.kv_memory import Kv  # noqa: E402
from reference_engine.kernels.ops import PLAIN  # noqa: E402
from reference_engine.kernels.tiles import Tiles  # noqa: E402

CPU = Place("cpu", torch.float32, 64)
TOP = Ceilings(1e10, 1e10)


def test_calls_are_captured_once_and_their_replay_is_timed():
    cuda = StandIn()
    place = Place("cpu", torch.float32, 1, cuda=cuda)
    took_s = replayed_s(lambda: cuda.calls.append("work"), place, 4)
    captured = ["capture into None", *["work"] * 4, "captured"]
    asked = [what for what in cuda.calls if what != "synchronize"]
    assert asked[:9] == ["work"] * 3 + captured
    assert set(asked[9:]) == {"replay"}
    assert took_s > 0


def test_torchs_attention_over_gathered_blocks_is_the_chunk_kernels():
    """Seven positions after 21, on scattered blocks, two heads for each of K and V."""
    generator = torch.Generator().manual_seed(1)
    cache = Kv(torch.randn(9, 2, 2, 4, 16, generator=generator))
    table = torch.tensor([[8, 1, 5, 0, 7, 2, 3]], dtype=torch.int32)
    q = torch.randn(7, 4, 16, generator=generator)
    tiles = Tiles(torch.tensor([[0, 0, 7, 21]], dtype=torch.int32))
    expected = PLAIN.chunk_attention(q, cache, table, tiles)
    found = gathered_flash(q, cache, table[0], 21, CPU)()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    refuse_another_answer(found, expected)
    with pytest.raises(RuntimeError, match="off by"):
        refuse_another_answer(found.flip(0), expected)
    with pytest.raises(RuntimeError, match="off by nan"):
        refuse_another_answer(found * float("nan"), expected)


def test_its_arguments_are_those_that_torch_takes():
    """On tensors without content: shapes and types are checked, nothing is computed."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    ends = [empty(2, dtype=torch.int32)] * 2
    out = flash(empty(32, 32, 128), empty(160, 8, 128), empty(160, 8, 128), ends)
    assert (out.shape, out.dtype) == ((32, 32, 128), torch.bfloat16)


def test_the_table_says_which_of_the_two_is_faster():
    found = [one for one in all_kernels(PLAIN, SHAPES["nano"], CPU, TOP) if one.of == "matmul"]
    assert [one.kernel for one in found] == ["chunk attention", "gather + torch's flash"] * 2
    for ours, theirs in (found[:2], found[2:]):
        fastest = min(ours, theirs, key=lambda one: one.seconds)
        assert [one for one in (ours, theirs) if one.case.endswith(", the faster one")] == [fastest]


def test_where_torch_has_none_the_table_says_why(monkeypatch):
    def refuse(*arguments):
        def attend():
            raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build.\nat flash.cpp:7")

        return attend

    monkeypatch.setattr(gpu_kernels, "gathered_flash", refuse)
    found = [one for one in all_kernels(PLAIN, SHAPES["nano"], CPU, TOP) if one.of == "matmul"]
    why = " (torch's flash not run: USE_FLASH_ATTENTION was not enabled for build.)"
    assert [one.case for one in found] == [f"32 after {start}{why}" for start in (0, 128)]
