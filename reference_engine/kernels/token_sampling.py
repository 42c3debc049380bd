"""Sampling kernels: the largest logit, or a draw at a temperature, without a sort and without the
host.

Twin: `plain.sample`, which defines the arithmetic. Many programs read a row of a large vocabulary;
a second kernel joins their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.launching import Launch, launch_by_triton

_BLOCK = 4096  # logits per program


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    launch: Launch = launch_by_triton,
) -> torch.Tensor:
    n_rows, n_vocab = logits.shape
    n_parts = triton.cdiv(n_vocab, _BLOCK)
    best = torch.empty((n_rows, n_parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((n_rows, n_parts), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    launch(
        part_kernel,
        (n_rows, n_parts),
        (logits, temperatures, keys, best, where),
        (n_vocab, n_parts),
        BLOCK=min(_BLOCK, triton.next_power_of_2(n_vocab)),
        warps=8,
    )
    launch(
        best_kernel,
        (n_rows,),
        (best, where, tokens),
        (n_parts,),
        BLOCK=max(16, triton.next_power_of_2(n_parts)),
        warps=1,
    )
    return tokens


@triton.jit
def hash_bits(x):
    """murmur3's finaliser, uint32."""
    x = (x ^ (x >> 16)) * tl.full((1,), 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full((1,), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def part_kernel(logits, temperatures, keys, best, where, n_vocab, n_parts, BLOCK: tl.constexpr):
    """The best token of a part of the vocabulary, for a row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_vocab
    x = tl.load(logits + row.to(tl.int64) * n_vocab + at, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        low = tl.load(keys + row * 2 + tl.zeros((1,), tl.int32)).to(tl.uint32, bitcast=True)
        high = tl.load(keys + row * 2 + 1 + tl.zeros((1,), tl.int32)).to(tl.uint32, bitcast=True)
        bits = hash_bits(hash_bits(at.to(tl.uint32) ^ low) + high)
        uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
        x = x / temperature - tl.log(-tl.log(uniform))
        x = tl.where(inside, x, float("-inf"))
    top, index = tl.max(x, 0, return_indices=True)
    tl.store(best + row * n_parts + part, top)
    tl.store(where + row * n_parts + part, part * BLOCK + index)


@triton.jit
def best_kernel(best, where, tokens, n_parts, BLOCK: tl.constexpr):
    """The best token of a row."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(best + row * n_parts + at, mask=at < n_parts, other=float("-inf"))
    index = tl.argmax(x, 0)
    tl.store(tokens + row, tl.load(where + row * n_parts + index).to(tl.int64))
