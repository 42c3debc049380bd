"""Kernels of a single pass over rows: residual + RMSNorm, and silu(gate)·up.

Twins: `plain.add_rms_norm`, `plain.silu_mul`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.launching import Launch, launch_by_triton

_SILU_BLOCK = 1024


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    launch: Launch = launch_by_triton,
) -> torch.Tensor:
    n_rows, width = residual.shape
    out = torch.empty_like(residual)
    block = 1 << (width - 1).bit_length()
    launch(
        norm_kernel,
        (n_rows,),
        (residual, residual if delta is None else delta, weight, out),
        (eps,),
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        warps=4 if block <= 2048 else 8,
    )
    return out


def silu_mul(gate_up: torch.Tensor, launch: Launch = launch_by_triton) -> torch.Tensor:
    n_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((n_rows, width))
    grid = n_rows, -(-width // _SILU_BLOCK)
    launch(silu_kernel, grid, (gate_up, out), WIDTH=width, BLOCK=_SILU_BLOCK)
    return out


@triton.jit
def norm_kernel(
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
        # Rounded before it is squared: the norm is of the stored numbers, as in the twin.
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(residual + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)
