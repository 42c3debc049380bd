"""Attention kernels over paged KV memory: for decoding rows, pieces of prompts, and both at once.

    decode_attention   a program per sequence, KV head and split of the context
    chunk_attention    a program per tile of a prompt and KV head
    fused_attention    the programs of both in a single launch

Each has a twin of the same name in `plain`. A program reads the keys and values of its KV head
once, for all query heads that share it.

Sources: online softmax of FlashAttention-2 (arXiv 2307.08691), Algorithm 1; block tables of
PagedAttention (SOSP'23); Flash-Decoding (Dao et al., 2023, pytorch.org/blog/flash-decoding);
POD-Attention (arXiv 2410.18038) for the single launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.tiles import DEFAULT_TUNING, TILE_ROWS, Tiles, Tuning

_LOG2_E = 1.4426950408889634  # scores are in units of log 2: a GPU has an instruction for exp2


def decode_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    n_splits: int,
    tuning: Tuning = DEFAULT_TUNING,
) -> torch.Tensor:
    """The grid depends on the size of the batch alone, so that a CUDA graph serves all context
    lengths. The price is programs without work where a context is short."""
    n_rows, n_q, head_dim = q.shape
    n_kv, block_tokens = cache.numbers.shape[2:4]
    group = n_q // n_kv
    out = torch.empty_like(q)
    part, stats = _split_results(q, n_splits)
    decode_kernel[(n_rows, n_kv, n_splits)](
        q, *cache.arguments(), tables, rows, contexts, out, part, stats[0], stats[1],
        head_dim**-0.5 * _LOG2_E, tables.stride(0),
        N_KV=n_kv, GROUP=group, ROWS=_decode_rows(group), HEAD=head_dim,
        PAGE=block_tokens, KEYS=tuning.decode_keys, IS_SCALED=cache.scales is not None,
        SPLITS=n_splits, num_warps=tuning.decode_warps, num_stages=tuning.decode_stages,
    )  # fmt: skip
    _join(part, stats, out)
    return out


def chunk_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    tiles: Tiles,
    tuning: Tuning = DEFAULT_TUNING,
) -> torch.Tensor:
    n_q, head_dim = q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    out = torch.empty_like(q)
    chunk_kernel[(len(tiles), n_kv)](
        q, *cache.arguments(), tables, tiles.table, out, head_dim**-0.5 * _LOG2_E,
        tables.stride(0),
        N_KV=n_kv, GROUP=n_q // n_kv, ROWS=TILE_ROWS, HEAD=head_dim, PAGE=block_tokens,
        KEYS=tuning.chunk_keys, IS_SCALED=cache.scales is not None,
        num_warps=tuning.chunk_warps, num_stages=tuning.chunk_stages,
    )  # fmt: skip
    return out


def fused_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    n_splits: int,
    tiles: Tiles,
    tuning: Tuning = DEFAULT_TUNING,
) -> torch.Tensor:
    """Decoding is limited by memory and prompts by the tensor cores, so programs of both kinds on
    a multiprocessor fill each other's waits. The first program ids decode: the hardware starts
    programs in the order of their ids, and tiles fill the multiprocessors that decoding leaves
    free."""
    n_rows, (n_q, head_dim) = len(rows), q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    group = n_q // n_kv
    out = torch.empty_like(q)
    part, stats = _split_results(q[:n_rows], n_splits)
    fused_kernel[((n_rows * n_splits + len(tiles)) * n_kv,)](
        q, q[n_rows:], *cache.arguments(), tables, rows, contexts, tiles.table, out, out[n_rows:],
        part, stats[0], stats[1], head_dim**-0.5 * _LOG2_E, tables.stride(0), n_rows,
        N_KV=n_kv, GROUP=group, DECODE_ROWS=_decode_rows(group), TILE_ROWS=TILE_ROWS, HEAD=head_dim,
        PAGE=block_tokens, KEYS=tuning.chunk_keys, IS_SCALED=cache.scales is not None,
        SPLITS=n_splits, num_warps=tuning.chunk_warps, num_stages=tuning.chunk_stages,
    )  # fmt: skip
    _join(part, stats, out)
    return out


def _decode_rows(group: int) -> int:
    """Query rows of a decoding program: the query heads of a KV head, at least the 16 rows of a
    tensor-core instruction."""
    return max(16, int(triton.next_power_of_2(group)))


def _split_results(q: torch.Tensor, n_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the results of splits, float32: values [S, Hq, splits, hd]; peaks and sums
    [2, S, Hq, splits]. If `n_splits` is 1 the kernels write neither."""
    shape = (*q.shape[:2], n_splits)
    part = q.new_empty((*shape, q.shape[2]), dtype=torch.float32)
    return part, q.new_empty((2, *shape), dtype=torch.float32)


def _join(part: torch.Tensor, stats: torch.Tensor, out: torch.Tensor) -> None:
    """Write the joined results of splits to the first rows of `out`."""
    n_rows, n_q, n_splits, head_dim = part.shape
    if n_splits > 1:
        join_kernel[(n_rows * n_q,)](
            part, stats[0], stats[1], out, HEAD=head_dim, SPLITS=n_splits, num_warps=1
        )


@triton.jit
def decode_kernel(
    q, cache, scales, tables, rows, contexts, out, part, peaks, sums, scale, table_width,
    N_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, IS_SCALED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    attend_split(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, cache, scales, tables, rows,
        contexts, out, part, peaks, sums, scale, table_width, N_KV, GROUP, ROWS, HEAD, PAGE, KEYS,
        IS_SCALED, SPLITS,
    )  # fmt: skip


@triton.jit
def chunk_kernel(
    q, cache, scales, tables, tiles, out, scale, table_width,
    N_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    attend_tile(
        tl.program_id(0), tl.program_id(1), q, cache, scales, tables, tiles, out, scale,
        table_width, N_KV, GROUP, ROWS, HEAD, PAGE, KEYS, IS_SCALED,
    )  # fmt: skip


@triton.jit
def fused_kernel(
    q, q_tiles, cache, scales, tables, rows, contexts, tiles, out, out_tiles, part, peaks, sums,
    scale, table_width, n_rows,
    N_KV: tl.constexpr, GROUP: tl.constexpr, DECODE_ROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
    HEAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, IS_SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program % N_KV
    unit = program // N_KV
    n_decode = n_rows * SPLITS
    if unit < n_decode:
        attend_split(
            unit // SPLITS, head, unit % SPLITS, q, cache, scales, tables, rows, contexts, out,
            part, peaks, sums, scale, table_width, N_KV, GROUP, DECODE_ROWS, HEAD, PAGE, KEYS,
            IS_SCALED, SPLITS,
        )  # fmt: skip
    else:
        attend_tile(
            unit - n_decode, head, q_tiles, cache, scales, tables, tiles, out_tiles, scale,
            table_width, N_KV, GROUP, TILE_ROWS, HEAD, PAGE, KEYS, IS_SCALED,
        )  # fmt: skip


@triton.jit
def attend_split(
    sequence, head, split, q, cache, scales, tables, rows, contexts, out, part, peaks, sums, scale,
    table_width,
    N_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, IS_SCALED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of a sequence and a KV head over a split of the context. Writes to `out` if the
    context is not split, else to `part`, `peaks` and `sums` for `join_kernel`."""
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
        peak, total, mixed = attend_keys(
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
def attend_tile(
    number, head, q, cache, scales, tables, tiles, out, scale, table_width,
    N_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Causal attention of tile `number` and a KV head. The tiles count positions from the first row
    of `q` and `out`."""
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
        # Position 0 is visible to every row, padding rows included: a row that sees no key would
        # divide 0 by 0.
        is_visible = inside[None, :] & (at[None, :] <= (start + token)[:, None])
        peak, total, mixed = attend_keys(
            query, cache, scales, table, head, at, inside, is_visible, d, scale,
            peak, total, mixed, N_KV, HEAD, PAGE, IS_SCALED,
        )  # fmt: skip
    value = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_at, value, mask=is_row[:, None])


@triton.jit
def attend_keys(
    query, cache, scales, table, head, at, inside, is_visible, d, scale, peak, total, mixed,
    N_KV: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """A pass of the online softmax, over the keys at positions `at` [KEYS].

    `inside` [KEYS] is true for positions in the context, `is_visible` [ROWS or 1, KEYS] for keys
    that a row may attend to. Returns `peak` [ROWS], the largest score so far in units of log 2, and
    relative to it `total` [ROWS], the sum of the weights, and `mixed` [ROWS, HEAD], the weighted
    sum of the values.
    """
    page = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64)
    vector = (page * 2 * N_KV + head) * PAGE + at % PAGE
    k = tl.load(cache + vector[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0)
    score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee") * scale
    if IS_SCALED:
        # On the product, not on the keys: bfloat16 holds an 8-bit number exactly, its value not.
        score *= tl.load(scales + vector, mask=inside, other=0.0)[None, :]
    score = tl.where(is_visible, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weight, 1)
    vector += N_KV * PAGE  # the values of the same page lie behind its keys
    v = tl.load(cache + vector[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0)
    if IS_SCALED:
        weight *= tl.load(scales + vector, mask=inside, other=0.0)[None, :]
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(query.dtype), v.to(query.dtype), input_precision="ieee")
    return higher, total, mixed


@triton.jit
def join_kernel(part, peaks, sums, out, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    """Join the splits of a sequence and a query head."""
    head = tl.program_id(0).to(tl.int64)
    split = head * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD)
    peak = tl.load(peaks + split)  # -inf of a split beyond the context: its weight becomes 0
    weight = tl.exp2(peak - tl.max(peak, 0))
    mixed = tl.load(part + split[:, None] * HEAD + d[None, :])
    value = tl.sum(mixed * weight[:, None], 0) / tl.sum(tl.load(sums + split) * weight, 0)
    tl.store(out + head * HEAD + d, value.to(out.dtype.element_ty))
