"""Causal attention of pieces of prompts over their paged context, their own part of it already
written. Twin: `plain.chunk_attention`. One program per tile (`tiles`) and KV head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.online import turn
from reference_engine.kernels.tiles import TILE_ROWS, Tiles

_KEYS = 64


def chunk_attention(q: torch.Tensor, cache: Kv, tables: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    n_q, head_dim = q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    out = torch.empty_like(q)
    _kernel[(len(tiles), n_kv)](
        q, *cache.arguments(), tables, tiles.table, out, head_dim**-0.5 * 1.4426950408889634,
        tables.stride(0),
        N_KV=n_kv, GROUP=n_q // n_kv, ROWS=TILE_ROWS, HEAD=head_dim, PAGE=block_tokens, KEYS=_KEYS,
        IS_SCALED=cache.scales is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _kernel(
    q,
    cache,
    scales,
    tables,
    tiles,
    out,
    scale,
    table_width,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    one_tile(
        tl.program_id(0), tl.program_id(1), q, cache, scales, tables, tiles, out, scale,
        table_width, N_KV, GROUP, ROWS, HEAD, PAGE, KEYS, IS_SCALED,
    )  # fmt: skip


@triton.jit
def one_tile(
    number,
    head,
    q,
    cache,
    scales,
    tables,
    tiles,
    out,
    scale,
    table_width,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Tile `number` and a KV head; the first position of all tiles is the first of `q` and
    `out`."""
    tile = tiles + number * 4
    table = tables + tl.load(tile).to(tl.int64) * table_width
    first = tl.load(tile + 1).to(tl.int64)
    n_tokens = tl.load(tile + 2)
    start = tl.load(tile + 3)
    row = tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    d = tl.arange(0, HEAD)
    token = row // GROUP  # the heads of a position are neighbours
    is_row = token < n_tokens
    q_at = (((first + token) * N_KV + head) * GROUP + row % GROUP)[:, None] * HEAD + d[None, :]
    query = tl.load(q + q_at, mask=is_row[:, None], other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, HEAD), tl.float32)
    end = start + n_tokens
    for begin in range(0, end, KEYS):
        at = begin + key
        inside = at < end
        # Position 0 is visible to every row, so that no row is empty, not even one of nobody.
        is_seen = inside[None, :] & (at[None, :] <= (start + token)[:, None])
        peak, total, mixed = turn(
            query, cache, scales, table, head, at, inside, is_seen, d, scale,
            peak, total, mixed, N_KV, HEAD, PAGE, IS_SCALED,
        )  # fmt: skip
    value = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_at, value, mask=is_row[:, None])
