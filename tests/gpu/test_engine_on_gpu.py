"""The engine on a GPU: tokens by the margin rule, graphs, memory, swap, telemetry."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.gpu.driver import skip_without_driver

skip_without_driver()
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from reference_engine.executors.base import EXECUTORS, Site  # noqa: E402 - only with a GPU
from reference_engine.model.zoo import resolve  # noqa: E402
from reference_engine.state.plan import How  # noqa: E402
from reference_engine.state.sequence import Sampling  # noqa: E402
from tests.reference_engine.engine_kit import Rig, request, rig  # noqa: E402
from tests.reference_engine.margin import shortfalls  # noqa: E402

pytestmark = pytest.mark.gpu
NANO = resolve("nano").config
# Largest shortfall that rounding explains, in standard deviations of the logits: 2⁻⁸ of values up
# to 4 σ in bfloat16, over two layers.
MARGIN = {"float32": 1e-3, "bfloat16": 0.1}


def engine(dtype: str, **options) -> Rig:
    arguments = {"dtype": dtype} | options.pop("arguments", {})
    return rig(executor="torch_cuda", executor_args=arguments, **options)


def fresh():
    return [
        request(f"r{i}", [(7 * i + 3 * j) % 256 for j in range(n)], 24)
        for i, n in enumerate((1, 5, 16, 17, 33, 64, 90))
    ]


def answers(built: Rig) -> list[list[int]]:
    requests = fresh()
    for req in requests:
        built.admit(req)
        built.step()
    built.drain()
    return [req.tokens for req in requests]


@pytest.mark.parametrize("dtype", list(MARGIN))
@pytest.mark.parametrize("depth", [0, 1])
def test_greedy_tokens_are_those_of_the_cpu_model_except_at_near_ties(dtype, depth):
    outputs = answers(engine(dtype, async_depth=depth))
    for req, tokens in zip(fresh(), outputs, strict=True):
        assert len(tokens) == req.n_prompt + 24
        short = shortfalls(NANO, getattr(torch, dtype), tokens, req.n_prompt)
        assert max(short) <= MARGIN[dtype], f"{req.id}: {short}"


def test_float32_tokens_are_those_of_the_cpu_executor():
    assert answers(engine("float32")) == answers(rig(executor="torch_cpu"))


def test_graphs_change_no_token():
    assert answers(engine("float32")) == answers(engine("float32", arguments={"graphs": False}))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_kv_in_8_bits_and_fused_attention_keep_greedy_tokens_near_the_likeliest(kv_dtype, fused):
    arguments = {"kv_dtype": kv_dtype, "fused_attention": fused}
    outputs = answers(engine("bfloat16", arguments=arguments, token_budget=48))
    for req, tokens in zip(fresh(), outputs, strict=True):
        short = shortfalls(NANO, torch.bfloat16, tokens, req.n_prompt)
        assert max(short) <= 2 * MARGIN["bfloat16"], f"{req.id}: {short}"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it is a prototype
def test_no_launch_waits_for_the_device():
    """With all kinds of sampling: torch raises where it would wait."""
    samplings = [
        Sampling(),
        Sampling(0.8),
        Sampling(0.9, 0.95, 50, seed=4),
        Sampling(logprobs=True),
    ]
    built = engine("float32", async_depth=1)
    requests = [
        request(f"r{i}", range(1, 30 + i), 24, sampling=how) for i, how in enumerate(samplings)
    ]
    requests[0].stop_ids, requests[0].min_tokens = frozenset({5, 6}), 12
    built.admit(*requests)
    for _ in range(3):
        built.step()  # compiles kernels and fills caches
    inner: Any = built.executor
    launched = []

    class Strict:
        caps = inner.caps

        def execute(self, batch):
            return self.launch(batch)()

        def can_launch_ahead(self, batch):
            return inner.can_launch_ahead(batch)

        def launch(self, batch):
            launched.append(1)
            try:
                torch.cuda.set_sync_debug_mode("error")
                return inner.launch(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    built.executor = Strict()
    built.drain()
    assert len(launched) > 15
    assert [req.n_output for req in requests] == [24] * 4


@pytest.mark.parametrize("how", [How.recompute, How.swap])
@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_survive_preemption(how, depth):
    tight = engine(
        "float32", n_blocks=9, max_model_len=144, token_budget=48, n_host_blocks=40, how=how,
        async_depth=depth,
    )  # fmt: skip
    assert answers(tight) == answers(engine("float32"))
    assert tight.state.counters.preemptions > 0


def test_kv_gets_the_rest_of_the_memory_share():
    def blocks(share: float) -> int:
        kind = EXECUTORS.build({"kind": "torch_cuda", "memory_share": share, "graphs": False})
        built = kind.build(Site(resolve("110m"), 0, 16, 1024, time.sleep, 0, 32, 1024))
        n_blocks = built.caps.n_blocks
        free, total = torch.cuda.mem_get_info()
        used = 1 - free / total
        assert used <= share + 0.02
        del built
        torch.cuda.empty_cache()
        return n_blocks

    assert blocks(0.2) > 1.2 * blocks(0.15)


def test_telemetry_is_read_from_the_gpu():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    from reference_engine.executors.cuda_stream import CudaStream
    from reference_engine.metrics.gpu import open_gpu

    gpu = open_gpu(CudaStream(torch.device("cuda", 0)).gpu)
    assert gpu is not None
    reading = gpu.read()
    assert reading.name == torch.cuda.get_device_properties(0).name
    assert reading.memory_used_bytes is not None
    assert 0 < reading.memory_used_bytes <= torch.cuda.get_device_properties(0).total_memory * 1.1
