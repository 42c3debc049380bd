"""Every Triton kernel against its float64 twin, in Triton's interpreter.
`tests/e2e/test_kernels_run.py` runs this file in a process with TRITON_INTERPRET=1. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/reference_engine/interpreted_kernels.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference_engine import kernel_cases as cases
from tests.reference_engine.kernel_cases import Draw

SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=4, deadline=None, database=None, derandomize=True)
HEADS = st.sampled_from([(1, 1), (2, 2), (1, 7), (2, 3)])  # KV heads, query heads per KV head


@few
@given(SEEDS, st.integers(1, 3), st.integers(1, 70), st.booleans())
def test_add_rms_norm(seed, n_rows, width, has_delta):
    cases.check_norm(Draw.of(seed), n_rows, width, has_delta)


@few
@given(SEEDS, st.integers(1, 3), st.sampled_from([1, 17, 1024, 1025]))
def test_silu_mul(seed, n_rows, width):
    cases.check_silu(Draw.of(seed), n_rows, width)


@few
@given(SEEDS, st.lists(st.integers(0, 40), min_size=1, max_size=5), HEADS, st.booleans())
def test_rope_write(seed, positions, heads, has_norm):
    n_kv, group = heads
    cases.check_rope(Draw.of(seed), positions, n_kv * group, n_kv, 16, 4, has_norm)


@few
@given(
    SEEDS,
    st.lists(st.sampled_from([1, 15, 16, 17, 64, 65]), min_size=1, max_size=3),
    HEADS,
    st.sampled_from([1, 2, 8]),
)
def test_decode_attention(seed, contexts, heads, n_programs):
    n_kv, group = heads
    cases.check_decode(Draw.of(seed), contexts, n_kv, group, 16, 16, n_programs)


@pytest.mark.parametrize(
    ("contexts", "n_programs", "kv_dtype"),
    [([2500, 1, 64, 65], 5, "auto"), ([3000, *[90] * 5], 3, "auto"), ([1300, 70, 5], 5, "fp8")],
)
def test_decode_attention_over_unequal_contexts(contexts, n_programs, kv_dtype):
    """The longest context is cut into up to 20 pieces, more than a join reads at once."""
    cases.check_decode(Draw.of(4), contexts, 1, 3, 16, 16, n_programs, kv_dtype)


@few
@given(
    SEEDS,
    st.lists(
        st.tuples(st.sampled_from([0, 1, 16, 70]), st.sampled_from([1, 2, 33, 65])),
        min_size=1,
        max_size=2,
    ),
    HEADS,
)
def test_chunk_attention(seed, pieces, heads):
    n_kv, group = heads
    cases.check_chunk(Draw.of(seed), pieces, n_kv, group, 16, 16)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("tuning", cases.VARIANTS)
def test_every_choice_of_sizes(tuning, kv_dtype):
    draw, pieces = Draw.of(7), [(0, 65), (70, 33)]
    cases.check_decode(draw, [1, 130, 300], 2, 3, 16, 16, 4, kv_dtype, tuning)
    cases.check_chunk(draw, pieces, 2, 3, 16, 16, kv_dtype, tuning)


@pytest.mark.parametrize(
    ("heads", "n_programs", "kv_dtype"),
    [((2, 3, 16), 1, "auto"), ((1, 7, 16), 4, "auto"), ((2, 2, 16), 2, "int8")],
)
def test_fused_attention(heads, n_programs, kv_dtype):
    cases.check_fused(Draw.of(8), [17, 265], [(20, 13), (0, 5)], heads, n_programs, kv_dtype)


@few
@given(SEEDS, st.integers(1, 4), st.sampled_from([1, 320, 4096, 5000]))
def test_sample(seed, n_rows, n_vocab):
    cases.check_sample(Draw.of(seed), n_rows, n_vocab)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_write_in_8_bits(kv_dtype, has_norm):
    cases.check_rope(Draw.of(6), [0, 1, 7, 39], 4, 2, 16, 4, has_norm, kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_over_8_bits(kv_dtype, dtype):
    draw = Draw.of(7, dtype)
    cases.check_decode(draw, [1, 17, 65], 2, 3, 16, 16, 2, kv_dtype)
    cases.check_chunk(draw, [(50, 20), (0, 5)], 2, 2, 32, 16, kv_dtype)


@pytest.mark.parametrize("name", ["norm", "decode", "chunk"])
def test_half_precision(name):
    draw = Draw.of(5, torch.float16)
    arguments = {
        "norm": (3, 64, True),
        "decode": ([70, 3], 2, 2, 32, 16, 2),
        "chunk": ([(20, 40), (0, 5)], 2, 2, 32, 16),
    }[name]
    cases.CHECKS[name](draw, *arguments)
