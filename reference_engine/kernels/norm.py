"""Residual + RMSNorm in one pass over the row. Twin: `plain.add_rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    n_rows, width = residual.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _kernel[(n_rows,)](
        residual, residual if delta is None else delta, weight, out, eps,
        WIDTH=width, BLOCK=block, HAS_DELTA=delta is not None,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _kernel(
    residual,
    delta,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    x = tl.load(residual + at, mask=inside, other=0.0)
    if HAS_DELTA:
        # Rounded before it is squared: the norm is of what is stored, as in the twin.
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(residual + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale * w).to(out.dtype.element_ty), mask=inside)
