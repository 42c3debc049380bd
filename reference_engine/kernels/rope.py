"""Kernel between the qkv product and attention: splits q, k, v, normalises and rotates q and k, and
writes k and v into the paged memory, in a single pass.

Twin: `plain.rope_write`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.kv_memory import SMALLEST, Kv
from reference_engine.kernels.launching import Launch, launch_by_triton


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    qk_norm: torch.Tensor | None,
    eps: float,
    cache: Kv,
    launch: Launch = launch_by_triton,
) -> torch.Tensor:
    _, _, n_kv, block_tokens, head_dim = cache.numbers.shape
    n_tokens = len(qkv)
    n_heads = qkv.shape[1] // head_dim
    q = qkv.new_empty((n_tokens, n_heads - 2 * n_kv, head_dim))
    launch(
        rope_kernel,
        (n_tokens, n_heads),
        (
            qkv,
            positions,
            slots,
            *rotary,
            qkv if qk_norm is None else qk_norm,
            *cache.arguments(),
            q,
        ),
        (eps,),
        N_Q=n_heads - 2 * n_kv,
        N_KV=n_kv,
        PAGE=block_tokens,
        HEAD=head_dim,
        HAS_NORM=qk_norm is not None,
        LARGEST=cache.largest,
        SMALLEST=SMALLEST,
        IS_INT=cache.numbers.dtype == torch.int8,
        warps=1,
    )
    return q


@triton.jit
def rope_kernel(
    qkv,
    positions,
    slots,
    cosines,
    sines,
    qk_norm,
    cache,
    scales,
    q,
    eps,
    N_Q: tl.constexpr,
    N_KV: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_INT: tl.constexpr,
):
    """A head of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HEAD)
    source = qkv + (token * (N_Q + 2 * N_KV) + head) * HEAD
    raw = tl.load(source + d)
    x = raw.to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    page = slot // PAGE
    offset = slot % PAGE
    if head < N_Q + N_KV:
        # The other half of the head is loaded again: it comes from the cache and needs no shuffle.
        other = (d + HEAD // 2) % HEAD
        y = tl.load(source + other).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD + eps)
            x = x * scale * tl.load(qk_norm + head * HEAD + d).to(tl.float32)
            y = y * scale * tl.load(qk_norm + head * HEAD + other).to(tl.float32)
        at = tl.load(positions + token).to(tl.int64) * HEAD + d
        rotated = x * tl.load(cosines + at) + y * tl.load(sines + at)
        if head < N_Q:
            tl.store(q + (token * N_Q + head) * HEAD + d, rotated.to(q.dtype.element_ty))
        else:
            to = (page * 2 * N_KV + head - N_Q) * PAGE + offset
            write_vector(rotated, to, d, cache, scales, HEAD, LARGEST, SMALLEST, IS_INT)
    else:
        to = (page * 2 * N_KV + head - N_Q) * PAGE + offset
        write_vector(raw, to, d, cache, scales, HEAD, LARGEST, SMALLEST, IS_INT)


@triton.jit
def write_vector(
    x,
    to,
    d,
    cache,
    scales,
    HEAD: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    IS_INT: tl.constexpr,
):
    """Write vector number `to` of the memory, quantised with a scale of its own if `LARGEST` is not
    0."""
    if LARGEST > 0:
        x = x.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST) / LARGEST
        tl.store(scales + to, scale)
        x = x / scale
        x = tl.floor(x + 0.5) if IS_INT else nearest_e4m3(x)
    tl.store(cache + to * HEAD + d, x.to(cache.dtype.element_ty))


@triton.jit
def nearest_e4m3(x):
    """Round float32 to the nearest number of e4m3, ties to even, so that the conversion after it is
    exact. Conversions round differently: Triton's interpreter loses a carry (31.6 becomes 16)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of mantissa remain
    normal = bits.to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 · 2¹⁴: the sum is rounded to a multiple of 2⁻⁹
    return tl.where(tl.abs(x) < 0.015625, small, normal)
