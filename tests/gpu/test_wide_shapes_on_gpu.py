"""Greedy tokens of models with matrices, heads and vocabularies of real sizes."""

from __future__ import annotations

import pytest

from tests.gpu.driver import skip_without_driver

skip_without_driver()
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from reference_engine.executors.cuda_stream import CudaStream  # noqa: E402 - only with a GPU
from reference_engine.kernels.ops import ops  # noqa: E402
from tests.reference_engine.wide_shapes import WIDE, greedy_shortfalls  # noqa: E402

pytestmark = pytest.mark.gpu
# As for small shapes: the largest shortfall that rounding explains, over two layers.
MARGIN = 0.1


@pytest.mark.parametrize("name", list(WIDE))
def test_greedy_tokens_of_wide_shapes_are_the_likeliest_except_at_near_ties(name):
    config = WIDE[name]
    room = torch.cuda.get_device_properties(0).total_memory
    if 12 * config.n_params > 0.8 * room:
        pytest.skip("float64 weights of this shape are too large for the device")
    short = greedy_shortfalls(
        config, torch.bfloat16, CudaStream(torch.device("cuda", 0)), ops("triton")
    )
    torch.cuda.empty_cache()
    assert max(short) <= MARGIN, short
