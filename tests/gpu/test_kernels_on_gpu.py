"""Every kernel on a GPU against its float64 twin, at the sizes of real models."""

from __future__ import annotations

import pytest

from tests.gpu.driver import skip_without_driver

skip_without_driver()
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from tests.reference_engine import kernel_cases as cases  # noqa: E402 - only with a GPU
from tests.reference_engine.kernel_cases import Draw  # noqa: E402

pytestmark = pytest.mark.gpu
HEADS = [(8, 4, 128), (8, 2, 128), (8, 4, 64), (2, 7, 128), (1, 1, 16)]
# Attention in float32 has no tensor cores: with 64 or 128 numbers per head, a kernel takes 7 to 15
# s to compile. It is tested for exactness only; the engine uses it for `nano`, with 16 numbers.
LAYOUTS = {torch.bfloat16: HEADS, torch.float16: HEADS[:1], torch.float32: HEADS[-1:]}
over_layouts = pytest.mark.parametrize(
    ("draw", "heads"),
    [(dtype, heads) for dtype, layouts in LAYOUTS.items() for heads in layouts],
    indirect=["draw"],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)


@pytest.fixture(params=list(LAYOUTS), ids=str)
def draw(request):
    return Draw.of(11, request.param, "cuda")


@pytest.mark.parametrize("width", [64, 1000, 4096])
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_rms_norm(draw, width, has_delta):
    cases.check_norm(draw, 33, width, has_delta)


@pytest.mark.parametrize("width", [176, 14_336])
def test_silu_mul(draw, width):
    cases.check_silu(draw, 33, width)


@over_layouts
@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_write(draw, heads, has_norm):
    n_kv, group, head_dim = heads
    positions = [*range(50), 4095, 1000]
    cases.check_rope(draw, positions, n_kv * group, n_kv, head_dim, 16, has_norm)


@over_layouts
@pytest.mark.parametrize("n_programs", [1, 5, 132])
def test_decode_attention(draw, heads, n_programs):
    n_kv, group, head_dim = heads
    cases.check_decode(draw, [1, 16, 17, 1000, 4097], n_kv, group, head_dim, 16, n_programs)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_decode_attention_of_a_long_row_among_short_rows(kv_dtype):
    draw = Draw.of(12, torch.bfloat16, "cuda")
    cases.check_decode(draw, [32_768, *[1024] * 63], 8, 4, 128, 16, 33, kv_dtype)


def test_cached_launches_compute_what_tritons_own_compute():
    """The first launch of a kind is Triton's own, the others are cached."""
    from reference_engine.kernels.ops import ops

    cached, plain = ops("triton"), ops("triton", is_cached=False)
    for n_rows in (3, 5, 3, 300):
        x, delta, weight = (torch.randn(n_rows, 512, device="cuda").bfloat16() for _ in range(3))
        outputs = []
        for operations in (plain, cached, cached):
            residual = x.clone()
            normed = operations.add_rms_norm(residual, delta, weight[0], 1e-5)
            outputs.append((normed, residual, operations.silu_mul(x)))
        for output in outputs[1:]:
            for one, other in zip(outputs[0], output, strict=True):
                assert torch.equal(one, other)


@over_layouts
def test_chunk_attention(draw, heads):
    n_kv, group, head_dim = heads
    pieces = [(0, 1), (0, 300), (1000, 129), (17, 64)]
    cases.check_chunk(draw, pieces, n_kv, group, head_dim, 16)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@over_layouts
def test_kv_in_8_bits(draw, heads, kv_dtype):
    n_kv, group, head_dim = heads
    cases.check_rope(draw, [*range(50), 4095], n_kv * group, n_kv, head_dim, 16, True, kv_dtype)
    cases.check_decode(draw, [1, 17, 1000, 4097], n_kv, group, head_dim, 16, 4, kv_dtype)
    cases.check_chunk(draw, [(0, 300), (1000, 129)], n_kv, group, head_dim, 16, kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("tuning", cases.VARIANTS)
def test_every_choice_of_sizes(tuning, kv_dtype):
    draw, pieces = Draw.of(13, torch.bfloat16, "cuda"), [(0, 300), (1000, 129)]
    cases.check_decode(draw, [1, 17, 1000, 4097], 8, 4, 128, 16, 33, kv_dtype, tuning)
    cases.check_chunk(draw, pieces, 8, 4, 128, 16, kv_dtype, tuning)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@over_layouts
def test_fused_attention(draw, heads, kv_dtype):
    cases.check_fused(draw, [1, 17, 4097], [(0, 300), (1000, 129)], heads, 4, kv_dtype)


@pytest.mark.parametrize("n_vocab", [320, 128_256])
def test_sample(n_vocab):
    cases.check_sample(Draw.of(11, torch.float32, "cuda"), 37, n_vocab)
