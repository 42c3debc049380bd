"""Split q, k, v; norm and turn q and k; write k and v into the paged memory: one pass over the
output of the qkv multiplication. Twin: `plain.rope_write`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    qk_norm: torch.Tensor | None,
    eps: float,
    cache: torch.Tensor,
) -> torch.Tensor:
    _, _, n_kv, block_tokens, head_dim = cache.shape
    n_tokens = len(qkv)
    n_heads = qkv.shape[1] // head_dim
    q = qkv.new_empty((n_tokens, n_heads - 2 * n_kv, head_dim))
    _kernel[(n_tokens, n_heads)](
        qkv, positions, slots, *rotary, qkv if qk_norm is None else qk_norm, cache, q, eps,
        N_Q=n_heads - 2 * n_kv, N_KV=n_kv, PAGE=block_tokens, HEAD=head_dim,
        HAS_NORM=qk_norm is not None, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _kernel(
    qkv,
    positions,
    slots,
    cosines,
    sines,
    qk_norm,
    cache,
    q,
    eps,
    N_Q: tl.constexpr,
    N_KV: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
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
        # The other half of the head, loaded a second time: from the cache, and needing no shuffle.
        other = (d + HEAD // 2) % HEAD
        y = tl.load(source + other).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD + eps)
            x = x * scale * tl.load(qk_norm + head * HEAD + d).to(tl.float32)
            y = y * scale * tl.load(qk_norm + head * HEAD + other).to(tl.float32)
        at = tl.load(positions + token).to(tl.int64) * HEAD + d
        turned = x * tl.load(cosines + at) + y * tl.load(sines + at)
        if head < N_Q:
            tl.store(q + (token * N_Q + head) * HEAD + d, turned.to(q.dtype.element_ty))
        else:
            to = ((page * 2 * N_KV + head - N_Q) * PAGE + offset) * HEAD
            tl.store(cache + to + d, turned.to(cache.dtype.element_ty))
    else:
        to = ((page * 2 * N_KV + head - N_Q) * PAGE + offset) * HEAD
        tl.store(cache + to + d, raw.to(cache.dtype.element_ty))
