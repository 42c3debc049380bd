"""Cached launches against Triton's own: the same compiled kernels, grids and arguments.
`tests/e2e/test_kernels_run.py` runs this file in a process of its own, as Triton's driver is
replaced by a stand-in that records launches. By hand:

    python -m pytest tests/reference_engine/recorded_launches.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from rig.triton_stand_in import Launched, StandInDriver

from reference_engine.kernels.launching import CachedLaunches
from reference_engine.kernels.ops import Ops, ops
from reference_engine.kernels.tiles import Tiles, planned
from reference_engine.model.paged import PagedLlama, PagedStep
from reference_engine.model.weights import random_weights
from reference_engine.state.model_config import KvDtype, ModelConfig

CONFIG = ModelConfig(2, 64, 4, 2, 16, 176, 320, qk_norm=True)
DRIVER = StandInDriver()
DRIVER.is_recording = True
DRIVER.activate()


@triton.jit  # type: ignore[untyped-decorator]  # of Triton
def doubled(x, out, n, BLOCK: tl.constexpr, IS_FAST: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0) * 2.0, mask=at < n)


def launched(work) -> list[Launched]:
    """The launches of `work`."""
    begin = len(DRIVER.launches)
    work()
    return DRIVER.launches[begin:]


def step_of(n_decode: int, n_prompt: int) -> PagedStep:
    numbers = torch.zeros(n_decode + n_prompt, dtype=torch.int32)
    tables = torch.zeros(8, 16, dtype=torch.int32)
    rows = torch.zeros(n_decode, dtype=torch.int32)
    tiles = torch.tensor([[0, 0, n_prompt, 0]], dtype=torch.int32)
    work = planned([20] * n_decode, 5)
    return PagedStep(
        numbers, numbers, numbers, tables, n_decode, rows, rows, Tiles(tiles[: bool(n_prompt)]),
        work=work,
    )  # fmt: skip


def without_addresses(launches: list[Launched]) -> list[tuple[object, ...]]:
    """With the order of first use in place of addresses, which differ from call to call."""
    out: list[tuple[object, ...]] = []
    for name, signature, grid, arguments in launches:
        order: dict[object, int] = {}
        plain = [
            order.setdefault(a, len(order)) if isinstance(a, int) and a > 1 << 32 else a
            for a in arguments
        ]
        out.append((name, signature, grid, plain))
    return out


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_model_launches_the_same(is_fused: bool, kv_dtype: KvDtype):
    def model(operations: Ops) -> PagedLlama:
        weights = {name: w.bfloat16() for name, w in random_weights(CONFIG, 0).items()}
        built = PagedLlama(CONFIG, weights, operations, 16, 128, kv_dtype, is_fused)
        built.cache = built.memory(4)
        return built

    logits = torch.empty(16, 320)
    steps = [step_of(*sizes) for sizes in ((1, 0), (3, 0), (3, 5), (1, 9), (3, 5), (1, 0))]
    plain, cached = (model(ops("triton", is_cached=is_on)) for is_on in (False, True))
    with torch.inference_mode():
        for step in steps:
            expected = launched(lambda step=step: plain.forward(step, logits))
            for _ in range(2):
                output = launched(lambda step=step: cached.forward(step, logits))
                assert without_addresses(output) == without_addresses(expected)
            assert len(expected) > 10


def test_sampling_launches_the_same():
    logits, temperatures = torch.zeros(3, 9000), torch.zeros(3)
    keys = torch.zeros(3, 2, dtype=torch.int32)
    both = [ops("triton", is_cached=is_on).sample for is_on in (False, True, True)]
    made = [launched(lambda sample=sample: sample(logits, temperatures, keys)) for sample in both]
    assert [len(launches) for launches in made] == [2, 2, 2]
    assert without_addresses(made[0]) == without_addresses(made[1]) == without_addresses(made[2])


def launch_of(
    launch: CachedLaunches, x: torch.Tensor, out: torch.Tensor, n: int = 9, block: int = 16
) -> Launched:
    (made,) = launched(
        lambda: launch(doubled, (2, 3), (x, out), (n,), warps=1, BLOCK=block, IS_FAST=True)
    )
    return made


def test_the_second_launch_has_its_own_grid_and_arguments():
    launch = CachedLaunches()
    first, second = torch.zeros(64), torch.ones(64)
    made = [launch_of(launch, x, x) for x in (first, second)]
    assert [launch.grid for launch in made] == [(2, 3, 1)] * 2
    assert [launch.arguments for launch in made] == [
        (first.data_ptr(), first.data_ptr(), 9, 16, True),
        (second.data_ptr(), second.data_ptr(), 9, 16, True),
    ]
    assert made[0].signature == made[1].signature


def test_other_types_alignments_numbers_and_constants_are_other_kernels():
    launch = CachedLaunches()
    x, half = torch.zeros(64), torch.zeros(64).half()
    tensors = [(x, x), (x[1:], x), (x, x[1:]), (half, half)]
    for _ in range(2):
        made = [launch_of(launch, *pair) for pair in tensors]
        made += [launch_of(launch, x, x, 16), launch_of(launch, x, x, 1)]
        assert len({launch.signature for launch in made}) == 6
        blocks = [launch_of(launch, x, x, 9, block).arguments[3] for block in (16, 32)]
        assert blocks == [16, 32]


def test_constants_in_another_order_are_an_error():
    launch, x = CachedLaunches(), torch.zeros(64)
    with pytest.raises(AssertionError, match=r"constants are \['BLOCK', 'IS_FAST'\]"):
        launch(doubled, (1,), (x, x), (9,), IS_FAST=True, BLOCK=16)
