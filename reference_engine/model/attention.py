"""Causal attention over a paged KV memory, and the step's index tensors that it needs.

Decoding rows of similar context length share one call; each piece of a prompt has its own. The
index tensors are made once per step and used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from reference_engine.executors.base import Row


@dataclass(frozen=True, slots=True)
class Span:
    """Flat positions `[begin, end)` of the step that attend in one call.

    Decoding: one position of each of G sequences; `table` [G·P] names P blocks for each, `mask`
    [G, 1, 1, P·block] is 0 where there is context and -inf where there is padding. Prompt: n
    positions of one sequence; `table` [P], `mask` [n, context], or None where plain causal does.
    """

    begin: int
    end: int
    n_context: int
    is_decoding: bool
    table: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step flattened to T token positions, decoding rows first.

    `order[i]` is the row of the batch that is i-th here; `last` the flat positions whose logits
    are wanted.
    """

    order: tuple[int, ...]
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, block · block_tokens + offset
    last: torch.Tensor  # [S] int64
    spans: tuple[Span, ...]


def flatten(rows: Sequence[Row], block_tokens: int) -> StepInput:
    """The index tensors of a step.

    Decoding rows are grouped by context length rounded up to a power of two blocks, so that
    padding at most doubles what is gathered.
    """
    order = sorted(range(len(rows)), key=lambda i: _bucket(rows[i], block_tokens))
    ordered = [rows[i] for i in order]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    for request, start, n_tokens, samples in ordered:
        end, blocks = start + n_tokens, request.blocks
        tokens += request.tokens[start:end]
        positions += range(start, end)
        slots += [
            blocks[p // block_tokens] * block_tokens + p % block_tokens for p in range(start, end)
        ]
        if samples:
            last.append(len(tokens) - 1)
    index = torch.from_numpy(np.array((tokens, positions, slots), dtype=np.int64))
    spans = tuple(_spans(ordered, block_tokens))
    return StepInput(
        tuple(order), index[0], index[1], index[2], torch.tensor(last, dtype=torch.int64), spans
    )


def paged_attention(q: torch.Tensor, cache: torch.Tensor, step: StepInput) -> torch.Tensor:
    """Softmax(q·kᵀ/√head_dim)·v for every flat position over the context of its own sequence.

    q [T, Hq, hd]; cache [blocks, block, 2, Hkv, hd], this step's K and V already written; returns
    [T, Hq·hd].
    """
    n_q_heads, head_dim = q.shape[1], q.shape[2]
    outs = []
    for span in step.spans:
        rows = q[span.begin : span.end]
        attend = _decode if span.is_decoding else _prompt
        outs.append(attend(rows, cache, span).reshape(-1, n_q_heads * head_dim))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _decode(q: torch.Tensor, cache: torch.Tensor, span: Span) -> torch.Tensor:
    n_rows, n_q_heads, head_dim = q.shape
    n_kv_heads = cache.shape[3]
    pages = cache.index_select(0, span.table)
    kv = pages.view(n_rows, span.n_context, 2, n_kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    # The query heads that share a KV head stand in for query positions: all see the same context.
    grouped = q.view(n_rows, n_kv_heads, n_q_heads // n_kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=span.mask)


def _prompt(q: torch.Tensor, cache: torch.Tensor, span: Span) -> torch.Tensor:
    pages = cache.index_select(0, span.table).flatten(0, 1)[: span.n_context]
    kv = pages.permute(1, 2, 0, 3).unsqueeze(1)  # [2, 1, Hkv, C, hd]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        kv[0],
        kv[1],
        attn_mask=span.mask,
        is_causal=span.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)  # [n, Hq, hd]


def _bucket(row: Row, block_tokens: int) -> int:
    """Sort key: blocks of context as a power of two for decoding rows, above all of them for
    prompts."""
    if row.n_tokens > 1:
        return 1 << 62
    return 1 << (row.start // block_tokens).bit_length()


def _spans(rows: Sequence[Row], block_tokens: int) -> list[Span]:
    spans: list[Span] = []
    at = first = 0
    while first < len(rows):
        if rows[first].n_tokens > 1:
            spans.append(_prompt_span(rows[first], at, block_tokens))
            at, first = at + rows[first].n_tokens, first + 1
            continue
        bucket, end = _bucket(rows[first], block_tokens), first
        while end < len(rows) and _bucket(rows[end], block_tokens) == bucket:
            end += 1
        spans.append(_decode_span(rows[first:end], at, block_tokens))
        at, first = at + end - first, end
    return spans


def _prompt_span(row: Row, at: int, block_tokens: int) -> Span:
    n_context = row.start + row.n_tokens
    table = torch.tensor(row.request.blocks[: -(-n_context // block_tokens)])
    mask = None
    if row.start:
        mask = torch.full((row.n_tokens, n_context), float("-inf")).triu_(row.start + 1)
    return Span(at, at + row.n_tokens, n_context, False, table, mask)


def _decode_span(rows: Sequence[Row], at: int, block_tokens: int) -> Span:
    lengths = np.array([row.start + 1 for row in rows])
    n_blocks = int(-(-lengths.max() // block_tokens))
    # Padding points to the row's own first block: always valid memory, and masked.
    table = np.empty((len(rows), n_blocks), np.int64)
    for i, row in enumerate(rows):
        blocks = row.request.blocks[:n_blocks]
        table[i, : len(blocks)] = blocks
        table[i, len(blocks) :] = blocks[0]
    n_context = n_blocks * block_tokens
    padded = np.arange(n_context) >= lengths[:, None]
    mask = np.where(padded, np.float32("-inf"), np.float32(0))
    return Span(
        at,
        at + len(rows),
        n_context,
        True,
        torch.from_numpy(table.reshape(-1)),
        torch.from_numpy(mask).view(len(rows), 1, 1, n_context),
    )
