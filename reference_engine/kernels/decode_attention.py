"""Attention of one position per sequence over its paged context. Twin: `plain.decode_attention`.

Each program reads one KV head's part of one split of one sequence once, for all the query heads
that share it (at least 16 rows, as tensor cores want); a second kernel joins the splits.
The grid depends on the batch alone, so that a CUDA graph can hold it whatever the contexts are.

Source: Flash-Decoding (Dao et al., 2023, pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.online import turn

KEYS = 64  # keys per turn of the loop


def decode_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    n_splits: int,
) -> torch.Tensor:
    n_rows, n_q, head_dim = q.shape
    n_kv, block_tokens = cache.numbers.shape[2:4]
    group = n_q // n_kv
    out = torch.empty_like(q)
    part, stats = parts_of_splits(q, n_splits)
    _partial[(n_rows, n_kv, n_splits)](
        q, *cache.arguments(), tables, rows, contexts, out, part, stats[0], stats[1],
        head_dim**-0.5 * 1.4426950408889634, tables.stride(0),
        N_KV=n_kv, GROUP=group, ROWS=rows_of(group), HEAD=head_dim,
        PAGE=block_tokens, KEYS=KEYS, IS_SCALED=cache.scales is not None, SPLITS=n_splits,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if n_splits > 1:
        join[(n_rows * n_q,)](
            part, stats[0], stats[1], out, HEAD=head_dim, SPLITS=n_splits, num_warps=1
        )
    return out


def parts_of_splits(q: torch.Tensor, n_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What splits leave for `join`: values, and peaks and sums. Without splits nothing is read from
    either."""
    shape = (*q.shape[:2], n_splits)
    part = q.new_empty((*shape, q.shape[2]), dtype=torch.float32)
    return part, q.new_empty((2, *shape), dtype=torch.float32)


def rows_of(group: int) -> int:
    """Rows of a program: the query heads of a KV head, at least what tensor cores want."""
    return max(16, int(triton.next_power_of_2(group)))


@triton.jit
def _partial(
    q,
    cache,
    scales,
    tables,
    rows,
    contexts,
    out,
    part,
    peaks,
    sums,
    scale,
    table_width,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    one_split(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, cache, scales, tables, rows,
        contexts, out, part, peaks, sums, scale, table_width, N_KV, GROUP, ROWS, HEAD, PAGE, KEYS,
        IS_SCALED, SPLITS,
    )  # fmt: skip


@triton.jit
def one_split(
    sequence,
    head,
    split,
    q,
    cache,
    scales,
    tables,
    rows,
    contexts,
    out,
    part,
    peaks,
    sums,
    scale,
    table_width,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """What a KV head's part of a split of a sequence brings, to `out` or for `join`."""
    context = tl.load(contexts + sequence)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_width
    size = tl.cdiv(tl.cdiv(context, SPLITS), KEYS) * KEYS
    begin = split * size
    end = tl.minimum(begin + size, context)
    row = tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    d = tl.arange(0, HEAD)
    is_row = row < GROUP
    q_head = (sequence * N_KV + head) * GROUP + row
    query = tl.load(q + q_head[:, None] * HEAD + d[None, :], mask=is_row[:, None], other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, HEAD), tl.float32)
    for start in range(begin, end, KEYS):
        at = start + key
        inside = at < end
        peak, total, mixed = turn(
            query, cache, scales, table, head, at, inside, inside[None, :], d, scale,
            peak, total, mixed, N_KV, HEAD, PAGE, IS_SCALED,
        )  # fmt: skip
    if SPLITS == 1:
        value = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + q_head[:, None] * HEAD + d[None, :], value, mask=is_row[:, None])
    else:
        to = q_head.to(tl.int64) * SPLITS + split
        tl.store(part + to[:, None] * HEAD + d[None, :], mixed, mask=is_row[:, None])
        tl.store(peaks + to, peak, mask=is_row)
        tl.store(sums + to, total, mask=is_row)


@triton.jit
def join(part, peaks, sums, out, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    split = head * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD)
    peak = tl.load(peaks + split)  # -inf of a split beyond the context, whose weight is then 0
    weight = tl.exp2(peak - tl.max(peak, 0))
    mixed = tl.load(part + split[:, None] * HEAD + d[None, :])
    value = tl.sum(mixed * weight[:, None], 0) / tl.sum(tl.load(sums + split) * weight, 0)
    tl.store(out + head * HEAD + d, value.to(out.dtype.element_ty))
