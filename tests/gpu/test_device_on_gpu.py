"""The executor on a GPU under stress: graphs at every size, delayed copies, large KV, many builds,
HTTP, errors. `tests/reference_engine/test_device_cases.py` rehearses these checks on the CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.driver import skip_without_driver

skip_without_driver()
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from loadgen.errors import UsageError  # noqa: E402 - only with a GPU
from reference_engine.executors.base import EXECUTORS, Site  # noqa: E402
from reference_engine.executors.cuda_stream import CudaStream  # noqa: E402
from reference_engine.kernels import (  # noqa: E402
    launching,
    paged_attention,
    pointwise,
    rope,
    token_sampling,
)
from reference_engine.kernels.ops import ops  # noqa: E402
from reference_engine.model.zoo import SHAPES, resolve  # noqa: E402
from reference_engine.state.plan import How  # noqa: E402
from tests.reference_engine import device_cases as cases  # noqa: E402
from tests.reference_engine import kernel_cases  # noqa: E402
from tests.reference_engine.engine_kit import rig  # noqa: E402

pytestmark = pytest.mark.gpu
STREAM = CudaStream(torch.device("cuda", 0))
BFLOAT, FLOAT = (cases.Device(STREAM, "triton", dtype) for dtype in (torch.bfloat16, torch.float32))
BREAKING = Path(cases.__file__).with_name("breaking_mode.py")
FLAGS = ["--device", "cuda", "--shape", "nano", "--max-model-len", "256", "--set", "dtype=float32",
         "--set", "max_num_seqs=8", "--set", "kv_blocks=64", "--set", "async_depth=1"]  # fmt: skip
_CYCLES = 4_000_000  # about 2 ms


@pytest.fixture(autouse=True)
def poisoned():
    """NaN in the memory that the next tensors get."""
    torch.cuda.empty_cache()
    sizes = [1 << n for n in range(9, 24)]
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in sizes for _ in range(4)]
    del blocks
    yield
    torch.cuda.empty_cache()


def test_graphs_compute_what_launches_compute_at_every_bucket():
    config = replace(SHAPES["1b"], n_layers=2, vocab_size=4096, eos_ids=frozenset())
    assert max(cases.graph_shortfalls(BFLOAT, config, 256, 17)) <= cases.MARGIN[torch.bfloat16]


@pytest.mark.parametrize("how", [How.recompute, How.swap])
def test_delayed_copies_change_no_token_and_repeats_are_equal(how):
    plain = cases.delayed_answers(FLOAT, lambda: None, how)
    delayed = [
        cases.delayed_answers(FLOAT, lambda: torch.cuda._sleep(_CYCLES), how) for _ in range(2)
    ]
    assert delayed == [plain, plain]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_swapped_blocks_with_shared_prefixes_keep_their_kv(kv_dtype):
    cases.check_swap_with_shared_prefixes(BFLOAT, kv_dtype)


def test_ten_builds_leak_no_memory():
    def used_bytes() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    cases.check_builds_in_turn(BFLOAT, used_bytes)


def test_layers_above_2_to_the_31_numbers_are_written_and_read_at_the_top():
    n_blocks = 70_000  # of 32 768 numbers: 2.3 · 10⁹
    cases.check_top_blocks(BFLOAT, n_blocks)


def test_tokens_through_http_are_those_of_this_process():
    cases.check_tokens_through_http(FLOAT, FLAGS)


def test_a_cuda_error_in_a_run_reaches_the_streams_and_the_exit_code():
    cases.check_error_in_a_run(BREAKING, FLAGS, "CUDA error: device-side assert")


@pytest.mark.parametrize("fused", [False, True])
def test_no_kernel_is_compiled_while_requests_run(fused, monkeypatch):
    """With prompts, decodes and both, of all sizes; the number of blocks is given."""
    triton = pytest.importorskip("triton")
    modules = (paged_attention, pointwise, rope, token_sampling)
    for function in (function for module in modules for function in vars(module).values()):
        if hasattr(function, "device_caches"):
            function.device_caches.clear()
    monkeypatch.setattr(launching, "CACHED", launching.CachedLaunches())
    compiled: list[str] = []

    def record(*, fn, **others: object) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    engine = rig(
        executor="torch_cuda", executor_args=BFLOAT.arguments | {"fused_attention": fused},
        token_budget=48, async_depth=1, max_num_seqs=20,
    )  # fmt: skip
    assert compiled
    compiled.clear()
    cases.answers(engine)
    assert compiled == []


def test_draws_follow_the_softmax():
    kernel_cases.check_frequencies("cuda", ops("triton").sample)


def test_blocks_beyond_the_memory_are_an_error_of_their_option():
    n_blocks = 10**9
    kind = EXECUTORS.build({"kind": "torch_cuda"})
    with pytest.raises(UsageError, match=f"kv_blocks: {n_blocks} blocks need"):
        kind.build(Site(resolve("nano"), n_blocks, 16, 64, time.sleep, 0, 4))


def test_weights_beyond_the_memory_are_an_error_of_the_shape():
    total = torch.cuda.get_device_properties(0).total_memory
    if total > 139e9:
        pytest.skip("the largest shape fits into this device")
    with pytest.raises(UsageError, match=r"shape: '70b' needs 14[01]\.\d GB"):
        EXECUTORS.build({"kind": "torch_cuda"}).build(
            Site(resolve("70b"), 0, 16, 64, time.sleep, 0, 4)
        )
