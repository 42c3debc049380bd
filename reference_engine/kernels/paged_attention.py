"""Attention kernels over paged KV memory: for decoding rows, pieces of prompts, and both at once.

    decode_attention   a fixed number of programs per KV head, which share pieces of the contexts
    chunk_attention    a program per tile of a prompt and KV head
    fused_attention    the programs of both in a single launch

Each has a twin of the same name in `plain`. A program reads the keys and values of its KV head
once, for all query heads that share it.

Sources: online softmax of FlashAttention-2 (arXiv 2307.08691), Algorithm 1; block tables of
PagedAttention (SOSP'23); Flash-Decoding (Dao et al., 2023, pytorch.org/blog/flash-decoding);
FlashInfer (arXiv 2501.01005) for the work items;
POD-Attention (arXiv 2410.18038) for the single launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.launching import Launch, launch_by_triton
from reference_engine.kernels.tiles import DEFAULT_TUNING, DecodeWork, Tiles, Tuning

_JOINED = 16  # partial results per pass of a join
_LOG2_E = 1.4426950408889634  # scores are in units of log 2: a GPU has an instruction for exp2


def decode_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    work: DecodeWork,
    tuning: Tuning = DEFAULT_TUNING,
    launch: Launch = launch_by_triton,
) -> torch.Tensor:
    """The grid is fixed and the work is read from memory, so that a CUDA graph serves all context
    lengths. `contexts` are those that `work` divides."""
    n_q, head_dim = q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    group = n_q // n_kv
    out = torch.empty_like(q)
    part, stats = _partial_results(q, work)
    peaks, sums = stats.unbind(0)
    launch(
        decode_kernel,
        (work.n_programs, n_kv),
        (q, *cache.arguments(), tables, rows, work.bounds, work.items, out, part, peaks, sums),
        (head_dim**-0.5 * _LOG2_E, tables.stride(0)),
        N_KV=n_kv,
        GROUP=group,
        ROWS=_decode_rows(group),
        HEAD=head_dim,
        PAGE=block_tokens,
        KEYS=tuning.decode_keys,
        SCALING=_scaling(cache, tuning),
        warps=tuning.decode_warps,
        stages=tuning.decode_stages,
    )
    _join(part, peaks, sums, work, out, n_kv, launch)
    return out


def chunk_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    tiles: Tiles,
    tuning: Tuning = DEFAULT_TUNING,
    launch: Launch = launch_by_triton,
) -> torch.Tensor:
    n_q, head_dim = q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    out = torch.empty_like(q)
    launch(
        chunk_kernel,
        (len(tiles), n_kv),
        (q, *cache.arguments(), tables, tiles.table, out),
        (head_dim**-0.5 * _LOG2_E, tables.stride(0)),
        N_KV=n_kv,
        GROUP=n_q // n_kv,
        ROWS=tuning.chunk_rows,
        HEAD=head_dim,
        PAGE=block_tokens,
        KEYS=tuning.chunk_keys,
        SCALING=_scaling(cache, tuning),
        warps=tuning.chunk_warps,
        stages=tuning.chunk_stages,
    )
    return out


def fused_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    work: DecodeWork,
    tiles: Tiles,
    tuning: Tuning = DEFAULT_TUNING,
    launch: Launch = launch_by_triton,
) -> torch.Tensor:
    """Decoding is limited by memory and prompts by the tensor cores, so programs of both kinds on
    a multiprocessor fill each other's waits. The first program ids decode: the hardware starts
    programs in the order of their ids, and tiles fill the multiprocessors that decoding leaves
    free."""
    n_rows, (n_q, head_dim) = len(rows), q.shape[1:]
    n_kv, block_tokens = cache.numbers.shape[2:4]
    group = n_q // n_kv
    out = torch.empty_like(q)
    part, stats = _partial_results(q[:n_rows], work)
    peaks, sums = stats.unbind(0)
    launch(
        fused_kernel,
        ((work.n_programs + len(tiles)) * n_kv,),
        (
            q,
            q[n_rows:],
            *cache.arguments(),
            tables,
            rows,
            work.bounds,
            work.items,
            tiles.table,
            out,
            out[n_rows:],
            part,
            peaks,
            sums,
        ),
        (head_dim**-0.5 * _LOG2_E, tables.stride(0), work.n_programs),
        N_KV=n_kv,
        GROUP=group,
        DECODE_ROWS=_decode_rows(group),
        TILE_ROWS=tuning.chunk_rows,
        HEAD=head_dim,
        PAGE=block_tokens,
        KEYS=tuning.chunk_keys,
        SCALING=_scaling(cache, tuning),
        warps=tuning.chunk_warps,
        stages=tuning.chunk_stages,
    )
    _join(part, peaks, sums, work, out, n_kv, launch)
    return out


def _scaling(cache: Kv, tuning: Tuning) -> int:
    """Of 8-bit KV: 1 multiplies the products by the scales, 2 the keys and values; else 0."""
    if cache.scales is None:
        return 0
    return 2 if tuning.dequantise else 1


def _decode_rows(group: int) -> int:
    """Query rows of a decoding program: the query heads of a KV head, at least the 16 rows of a
    tensor-core instruction."""
    return max(16, int(triton.next_power_of_2(group)))


def _partial_results(q: torch.Tensor, work: DecodeWork) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the results of pieces, float32: values [N, Hq, hd]; peaks and sums [2, N, Hq]. N
    is a multiple of 4, so that the sums begin at a multiple of 16 bytes: for other addresses Triton
    would compile the kernels again."""
    shape = (-(-len(work.items) // 4) * 4, q.shape[1])
    part = q.new_empty((*shape, q.shape[2]), dtype=torch.float32)
    return part, q.new_empty((2, *shape), dtype=torch.float32)


def _join(
    part: torch.Tensor,
    peaks: torch.Tensor,
    sums: torch.Tensor,
    work: DecodeWork,
    out: torch.Tensor,
    n_kv: int,
    launch: Launch,
) -> None:
    """Write the joined results of contexts in several pieces to the first rows of `out`."""
    n_q, head_dim = part.shape[1:]
    launch(
        join_kernel,
        (len(work.joins), n_kv),
        (part, peaks, sums, work.joins, out),
        N_Q=n_q,
        GROUP=n_q // n_kv,
        HEAD=head_dim,
        PARTS=_JOINED,
        warps=1,
    )


@triton.jit
def decode_kernel(
    q,
    cache,
    scales,
    tables,
    rows,
    bounds,
    items,
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
    SCALING: tl.constexpr,
):
    attend_items(
        tl.program_id(0),
        tl.program_id(1),
        q,
        cache,
        scales,
        tables,
        rows,
        bounds,
        items,
        out,
        part,
        peaks,
        sums,
        scale,
        table_width,
        N_KV,
        GROUP,
        ROWS,
        HEAD,
        PAGE,
        KEYS,
        SCALING,
    )


@triton.jit
def chunk_kernel(
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
    SCALING: tl.constexpr,
):
    attend_tile(
        tl.program_id(0),
        tl.program_id(1),
        q,
        cache,
        scales,
        tables,
        tiles,
        out,
        scale,
        table_width,
        N_KV,
        GROUP,
        ROWS,
        HEAD,
        PAGE,
        KEYS,
        SCALING,
    )


@triton.jit(do_not_specialize=["n_programs"])
def fused_kernel(
    q,
    q_tiles,
    cache,
    scales,
    tables,
    rows,
    bounds,
    items,
    tiles,
    out,
    out_tiles,
    part,
    peaks,
    sums,
    scale,
    table_width,
    n_programs,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SCALING: tl.constexpr,
):
    head = tl.program_id(0) % N_KV
    unit = tl.program_id(0) // N_KV
    if unit < n_programs:
        attend_items(
            unit,
            head,
            q,
            cache,
            scales,
            tables,
            rows,
            bounds,
            items,
            out,
            part,
            peaks,
            sums,
            scale,
            table_width,
            N_KV,
            GROUP,
            DECODE_ROWS,
            HEAD,
            PAGE,
            KEYS,
            SCALING,
        )
    else:
        attend_tile(
            unit - n_programs,
            head,
            q_tiles,
            cache,
            scales,
            tables,
            tiles,
            out_tiles,
            scale,
            table_width,
            N_KV,
            GROUP,
            TILE_ROWS,
            HEAD,
            PAGE,
            KEYS,
            SCALING,
        )


@triton.jit
def attend_items(
    program,
    head,
    q,
    cache,
    scales,
    tables,
    rows,
    bounds,
    items,
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
    SCALING: tl.constexpr,
):
    """Attention of a KV head over the items of a program. Writes to `out` if a context is a single
    piece, else to `part`, `peaks` and `sums` for `join_kernel`."""
    row = tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    d = tl.arange(0, HEAD)
    is_row = row < GROUP
    for number in range(tl.load(bounds + program), tl.load(bounds + program + 1)):
        item = items + number * 4
        sequence = tl.load(item)
        begin = tl.load(item + 1)
        end = tl.load(item + 2)
        place = tl.load(item + 3)
        table = tables + tl.load(rows + sequence).to(tl.int64) * table_width
        q_head = (sequence * N_KV + head) * GROUP + row
        query = tl.load(q + q_head[:, None] * HEAD + d[None, :], mask=is_row[:, None], other=0.0)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, HEAD), tl.float32)
        for start in range(begin, end, KEYS):
            at = start + key
            inside = at < end
            peak, total, mixed = attend_keys(
                query,
                cache,
                scales,
                table,
                head,
                at,
                inside,
                inside[None, :],
                d,
                scale,
                peak,
                total,
                mixed,
                N_KV,
                HEAD,
                PAGE,
                SCALING,
            )
        if place < 0:
            value = (mixed / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + q_head[:, None] * HEAD + d[None, :], value, mask=is_row[:, None])
        else:
            to = (place * N_KV + head).to(tl.int64) * GROUP + row
            tl.store(part + to[:, None] * HEAD + d[None, :], mixed, mask=is_row[:, None])
            tl.store(peaks + to, peak, mask=is_row)
            tl.store(sums + to, total, mask=is_row)


@triton.jit
def attend_tile(
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
    SCALING: tl.constexpr,
):
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
            query,
            cache,
            scales,
            table,
            head,
            at,
            inside,
            is_visible,
            d,
            scale,
            peak,
            total,
            mixed,
            N_KV,
            HEAD,
            PAGE,
            SCALING,
        )
    value = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + q_at, value, mask=is_row[:, None])


@triton.jit
def attend_keys(
    query,
    cache,
    scales,
    table,
    head,
    at,
    inside,
    is_visible,
    d,
    scale,
    peak,
    total,
    mixed,
    N_KV: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    SCALING: tl.constexpr,
):
    """A pass of the online softmax, over the keys at positions `at` [KEYS].

    `inside` [KEYS] is true for positions in the context, `is_visible` [ROWS or 1, KEYS] for keys
    that a row may attend to. Returns `peak` [ROWS], the largest score so far in units of log 2, and
    relative to it `total` [ROWS], the sum of the weights, and `mixed` [ROWS, HEAD], the weighted
    sum of the values.
    """
    page = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64)
    vector = (page * 2 * N_KV + head) * PAGE + at % PAGE
    k = tl.load(cache + vector[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0)
    if SCALING == 2:
        k = k.to(tl.float32) * tl.load(scales + vector, mask=inside, other=0.0)[:, None]
    score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee") * scale
    if SCALING == 1:
        # On the product, not on the keys: bfloat16 holds an 8-bit number exactly, its value not.
        score *= tl.load(scales + vector, mask=inside, other=0.0)[None, :]
    score = tl.where(is_visible, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weight, 1)
    vector += N_KV * PAGE  # the values of the same page lie behind its keys
    v = tl.load(cache + vector[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0)
    if SCALING == 1:
        weight *= tl.load(scales + vector, mask=inside, other=0.0)[None, :]
    if SCALING == 2:
        v = v.to(tl.float32) * tl.load(scales + vector, mask=inside, other=0.0)[:, None]
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(query.dtype), v.to(query.dtype), input_precision="ieee")
    return higher, total, mixed


@triton.jit
def join_kernel(
    part,
    peaks,
    sums,
    joins,
    out,
    N_Q: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the pieces of a sequence, for the query heads of a KV head; nothing is to be done if
    there is a single piece."""
    sequence = tl.program_id(0)
    first = tl.load(joins + sequence * 2)
    n_pieces = tl.load(joins + sequence * 2 + 1)
    d = tl.arange(0, HEAD)
    if n_pieces > 1:
        for offset in range(GROUP):
            q_head = tl.program_id(1) * GROUP + offset
            peak = tl.full((1,), float("-inf"), tl.float32)
            total = tl.zeros((1,), tl.float32)
            mixed = tl.zeros((HEAD,), tl.float32)
            for begin in range(0, n_pieces, PARTS):
                at = begin + tl.arange(0, PARTS)
                inside = at < n_pieces
                place = (first + at).to(tl.int64) * N_Q + q_head
                peak_of = tl.load(peaks + place, mask=inside, other=float("-inf"))
                higher = tl.maximum(peak, tl.max(peak_of, 0))
                weight = tl.exp2(peak_of - higher)
                shrink = tl.exp2(peak - higher)
                sum_of = tl.load(sums + place, mask=inside, other=0.0)
                values = tl.load(
                    part + place[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0
                )
                total = total * shrink + tl.sum(sum_of * weight, 0)
                mixed = mixed * shrink + tl.sum(values * weight[:, None], 0)
                peak = higher
            value = (mixed / total).to(out.dtype.element_ty)
            tl.store(out + (sequence * N_Q + q_head).to(tl.int64) * HEAD + d, value)
