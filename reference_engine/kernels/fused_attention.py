"""Both attentions of a mixed step in one launch: decoding rows wait for memory, prompts for tensor
cores, so that programs of both kinds on a multiprocessor hide each other. Twin:
`plain.fused_attention`. The first program ids decode, the others take tiles of prompts.

Source: POD-Attention (arXiv 2410.18038), with the assignment left to the hardware: program ids are
begun in order, so that tiles fill what decoding leaves over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.chunk_attention import one_tile
from reference_engine.kernels.decode_attention import (
    KEYS,
    join,
    one_split,
    parts_of_splits,
    rows_of,
)
from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.tiles import TILE_ROWS, Tiles


def fused_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    n_splits: int,
    tiles: Tiles,
) -> torch.Tensor:
    n_rows, (n_q, head_dim) = len(rows), q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    group = n_q // n_kv
    out = torch.empty_like(q)
    part, stats = parts_of_splits(q[:n_rows], n_splits)
    _kernel[((n_rows * n_splits + len(tiles)) * n_kv,)](
        q, q[n_rows:], *cache.arguments(), tables, rows, contexts, tiles.table, out, out[n_rows:],
        part, stats[0], stats[1], head_dim**-0.5 * 1.4426950408889634, tables.stride(0), n_rows,
        N_KV=n_kv, GROUP=group, DECODE_ROWS=rows_of(group), TILE_ROWS=TILE_ROWS, HEAD=head_dim,
        PAGE=block_tokens, KEYS=KEYS, IS_SCALED=cache.scales is not None, SPLITS=n_splits,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if n_splits > 1:
        join[(n_rows * n_q,)](
            part, stats[0], stats[1], out, HEAD=head_dim, SPLITS=n_splits, num_warps=1
        )
    return out


@triton.jit
def _kernel(
    q,
    q_tiles,
    cache,
    scales,
    tables,
    rows,
    contexts,
    tiles,
    out,
    out_tiles,
    part,
    peaks,
    sums,
    scale,
    table_width,
    n_rows,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    program = tl.program_id(0)
    head = program % N_KV
    unit = program // N_KV
    n_decode = n_rows * SPLITS
    if unit < n_decode:
        one_split(
            unit // SPLITS, head, unit % SPLITS, q, cache, scales, tables, rows, contexts, out,
            part, peaks, sums, scale, table_width, N_KV, GROUP, DECODE_ROWS, HEAD, PAGE, KEYS,
            IS_SCALED, SPLITS,
        )  # fmt: skip
    else:
        one_tile(
            unit - n_decode, head, q_tiles, cache, scales, tables, tiles, out_tiles, scale,
            table_width, N_KV, GROUP, TILE_ROWS, HEAD, PAGE, KEYS, IS_SCALED,
        )  # fmt: skip
