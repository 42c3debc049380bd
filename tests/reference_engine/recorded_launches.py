"""Cached launches against Triton's own: the same compiled kernels, grids and arguments.
`tests/e2e/test_kernels_run.py` runs this file in a process of its own, as Triton's driver is
replaced by a stand-in that records launches. By hand:

    python -m pytest tests/reference_engine/recorded_launches.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from rig.triton_stand_in import Launched, StandInDriver

from reference_engine.executors.base import Site
from reference_engine.executors.cuda_stream import CpuStream
from reference_engine.executors.torch_cuda import TorchCuda
from reference_engine.kernels import paged_attention, pointwise, rope, token_sampling
from reference_engine.kernels.launching import CachedLaunches
from reference_engine.kernels.launching import launch_by_triton as plain_launch
from reference_engine.kernels.ops import Ops, ops
from reference_engine.kernels.tiles import Tiles, planned
from reference_engine.model.paged import PagedLlama, PagedStep
from reference_engine.model.weights import random_weights
from reference_engine.state.batch import StepBatch
from reference_engine.state.cost_model import Padding
from reference_engine.state.model_config import KvDtype, ModelConfig, ModelSource
from reference_engine.state.sequence import Sampling
from tests.reference_engine.engine_kit import request, rig

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


SAMPLINGS = [
    Sampling(), Sampling(0.8), Sampling(0.9, 0.95, 50, seed=4), Sampling(logprobs=True),
    Sampling(presence_penalty=1.5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (CONFIG, {"kv_dtype": "auto"}),
        (CONFIG, {"kv_dtype": "fp8", "is_fused": True}),
        # Groups of 7: an odd number of partial results times 14 heads is no multiple of 16 bytes.
        (replace(CONFIG, n_heads=14, d_model=224, qk_norm=False), {"kv_dtype": "int8"}),
    ],
)
@pytest.mark.parametrize("has_graphs", [True, False])
def test_no_kernel_is_compiled_while_requests_run(config, arguments, has_graphs, monkeypatch):
    """Whatever the number of decodes, prompts, padding and sampled rows of a step, and however long
    the contexts: all that requests can need is compiled by the build. Steps outside graphs launch
    cached kernels only."""
    compiled: list[str] = []
    by_triton: list[str] = []

    def launch_by_triton(kernel: Any, *arguments: Any, **constants: Any) -> Any:
        by_triton.append(kernel.fn.__name__)
        return plain_launch(kernel, *arguments, **constants)

    def record(*, fn: Any, **others: object) -> None:
        compiled.append(fn.name)

    for module in (paged_attention, pointwise, rope, token_sampling):
        for function in vars(module).values():
            if hasattr(function, "device_caches"):
                function.device_caches.clear()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    monkeypatch.setitem(CachedLaunches.__call__.__globals__, "launch_by_triton", launch_by_triton)
    chosen = zeroed_samples(ops("triton"), CachedLaunches())
    weights = {name: w.bfloat16() for name, w in random_weights(config, 0).items()}
    model = PagedLlama(config, weights, chosen, 16, 300, **arguments)
    site = Site(ModelSource("case", config), 120, 16, 300, lambda s: None, 20, 20)
    executor = TorchCuda(model, chosen, site, 120, CpuStream(), has_graphs)
    executor.warm_up()
    assert compiled
    compiled.clear()
    by_triton.clear()
    engine = rig(n_blocks=120, max_model_len=300, token_budget=90, max_num_seqs=20, async_depth=1)
    engine.executor = executor
    for i in range(24):
        how = SAMPLINGS[i % len(SAMPLINGS)]
        engine.admit(request(f"r{i}", [3] * (1 + 11 * i), 3 + i % 17, sampling=how))
        engine.step()
    engine.drain()
    for padding in (Padding(1, 0, 0), Padding(0, 3, 90), Padding(77, 0, 0), Padding(64, 17, 2000)):
        executor.execute(StepBatch(padding=padding))
    assert compiled == []
    assert has_graphs or by_triton == []


def zeroed_samples(operations: Ops, launch: CachedLaunches) -> Ops:
    """The operations with launches that compute nothing: memory is zeroed, so that tokens are in
    the vocabulary."""

    def zeroed(operation: Any, *tensors: Any) -> Any:
        return operation(*tensors).zero_()

    cached: list[partial[torch.Tensor]] = []
    for operation in operations:
        assert isinstance(operation, partial)
        cached.append(partial(operation.func, **operation.keywords | {"launch": launch}))
    return Ops(*(partial(zeroed, operation) for operation in cached))
