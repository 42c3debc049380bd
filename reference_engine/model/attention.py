"""Causal attention over a paged KV memory, and the step's index tensors that it needs.

Decoding rows of similar context length share one call as long as what they gather fits in the
caches of a core; each piece of a prompt has its own. The index tensors are made once per step and
used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from reference_engine.executors.base import Row

# KV that one call of decode attention gathers and then reads: about what a core keeps near.
_GATHER_BYTES = 4 << 20


@dataclass(frozen=True)
class Paging:
    """How a layer's KV memory [2, Hkv, blocks, block, hd] is laid out: a plane for K and one for V
    of each KV head, so that what a head reads of a block is in one piece."""

    n_kv_heads: int
    n_blocks: int
    block_tokens: int
    gather_tokens: int  # positions that a group of decoding rows gathers at most

    @classmethod
    def of(cls, cache: torch.Tensor) -> Paging:
        """That of one layer's memory."""
        _, n_kv_heads, n_blocks, block_tokens, head_dim = cache.shape
        token_bytes = 2 * n_kv_heads * head_dim * cache.element_size()
        return cls(n_kv_heads, n_blocks, block_tokens, _GATHER_BYTES // token_bytes)

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The number of each plane's first block, [2·Hkv]."""
        return np.arange(2 * self.n_kv_heads, dtype=np.int64) * self.n_blocks

    @cached_property
    def first_slots(self) -> NDArray[np.int64]:
        """The number of each plane's first slot, [2·Hkv]."""
        return self.firsts * self.block_tokens

    def pages(self, blocks: NDArray[np.int64]) -> torch.Tensor:
        """The same blocks in every plane, plane by plane."""
        return torch.from_numpy((self.firsts[:, None] + blocks).reshape(-1))

    def slots(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Where K and V of each position go, head by head: rows of `cache.view(-1, hd)`."""
        in_plane = blocks * self.block_tokens + positions % self.block_tokens
        return torch.from_numpy((in_plane[:, None] + self.first_slots).reshape(-1))


@dataclass(frozen=True, slots=True)
class Span:
    """Flat positions `[begin, end)` of the step that attend in one call.

    Decoding: one position of each of G sequences; `pages` [2·Hkv·G·P] names P blocks for each in
    each plane, `mask` [G, 1, 1, P·block] is 0 where there is context and -inf where there is
    padding. Prompt: n positions of one sequence; `pages` [2·Hkv·P], `mask` [n, context], or None
    where plain causal does.
    """

    begin: int
    end: int
    n_context: int
    is_decoding: bool
    pages: torch.Tensor
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
    slots: torch.Tensor  # [T·2·Hkv] int64, see Paging
    last: torch.Tensor  # [S] int64
    spans: tuple[Span, ...]


def flatten(rows: Sequence[Row], paging: Paging) -> StepInput:
    """The index tensors of a step.

    Decoding rows are sorted by context length and cut into groups, each padded to its longest
    row; a group of more than one row gathers at most `paging.gather_tokens` positions.
    """
    block_tokens = paging.block_tokens
    order = sorted(range(len(rows)), key=lambda i: _length(rows[i]))
    ordered = [rows[i] for i in order]
    tokens: list[int] = []
    positions: list[int] = []
    blocks_of: list[int] = []
    last: list[int] = []
    for request, start, n_tokens, samples in ordered:
        end, blocks = start + n_tokens, request.blocks
        tokens += request.tokens[start:end]
        positions += range(start, end)
        blocks_of += [blocks[p // block_tokens] for p in range(start, end)]
        if samples:
            last.append(len(tokens) - 1)
    index = np.array((tokens, positions, blocks_of), dtype=np.int64)
    slots = paging.slots(index[2], index[1])
    flat, spans = torch.from_numpy(index), tuple(_spans(ordered, paging))
    return StepInput(
        tuple(order), flat[0], flat[1], slots, torch.tensor(last, dtype=torch.int64), spans
    )


class Desk:
    """Memory that gathered KV is put into, one span after the other. Taken anew for every call it
    would go back to the system in between and come as zeroed pages: where the allocator happens to
    do so, steps take five times as long."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def gathered(self, blocks: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Rows `pages` of `blocks` [·, width], until the next call."""
        n, width = len(pages), blocks.shape[1]
        if n * width > len(self._memory):
            self._memory = torch.empty(n * width, dtype=blocks.dtype)
        out = self._memory[: n * width].view(n, width)
        return torch.index_select(blocks, 0, pages, out=out)


def paged_attention(
    q: torch.Tensor, cache: torch.Tensor, step: StepInput, desk: Desk
) -> torch.Tensor:
    """Softmax(q·kᵀ/√head_dim)·v for every flat position over the context of its own sequence.

    q [T, Hq, hd]; cache [2, Hkv, blocks, block, hd], this step's K and V already written; returns
    [T, Hq·hd].
    """
    n_q_heads, head_dim = q.shape[1], q.shape[2]
    outs = []
    for span in step.spans:
        rows = q[span.begin : span.end]
        attend = _decode if span.is_decoding else _prompt
        outs.append(attend(rows, cache, span, desk).reshape(-1, n_q_heads * head_dim))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _decode(q: torch.Tensor, cache: torch.Tensor, span: Span, desk: Desk) -> torch.Tensor:
    n_rows, n_q_heads, head_dim = q.shape
    n_kv_heads = cache.shape[1]
    kv = _gathered(cache, span, desk).view(2, n_kv_heads, n_rows, span.n_context, head_dim)
    k, v = kv.transpose(1, 2).unbind()  # [G, Hkv, C, hd]
    # The query heads that share a KV head stand in for query positions: all see the same context.
    grouped = q.view(n_rows, n_kv_heads, n_q_heads // n_kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=span.mask)


def _prompt(q: torch.Tensor, cache: torch.Tensor, span: Span, desk: Desk) -> torch.Tensor:
    kv = _gathered(cache, span, desk).view(2, 1, cache.shape[1], -1, cache.shape[4])
    k, v = kv[:, :, :, : span.n_context].unbind()  # [1, Hkv, C, hd]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=span.mask,
        is_causal=span.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)  # [n, Hq, hd]


def _gathered(cache: torch.Tensor, span: Span, desk: Desk) -> torch.Tensor:
    """The span's blocks plane by plane, [2·Hkv·…, block·hd]: each head's context in one piece,
    which attention reads up to twice as fast as K and V of all heads side by side."""
    return desk.gathered(cache.view(-1, cache.shape[3] * cache.shape[4]), span.pages)


def _length(row: Row) -> int:
    """Sort key: the context of decoding rows, above all of them for prompts."""
    return row.start if row.n_tokens == 1 else 1 << 62


def _spans(rows: Sequence[Row], paging: Paging) -> list[Span]:
    spans: list[Span] = []
    at = first = 0
    while first < len(rows):
        if rows[first].n_tokens > 1:
            spans.append(_prompt_span(rows[first], at, paging))
            at, first = at + rows[first].n_tokens, first + 1
            continue
        end = first + 1
        while end < len(rows) and rows[end].n_tokens == 1:
            n_context = (rows[end].start // paging.block_tokens + 1) * paging.block_tokens
            if (end + 1 - first) * n_context > paging.gather_tokens:
                break
            end += 1
        spans.append(_decode_span(rows[first:end], at, paging))
        at, first = at + end - first, end
    return spans


def _prompt_span(row: Row, at: int, paging: Paging) -> Span:
    n_context = row.start + row.n_tokens
    n_blocks = -(-n_context // paging.block_tokens)
    pages = paging.pages(np.array(row.request.blocks[:n_blocks], np.int64))
    mask = None
    if row.start:
        mask = torch.full((row.n_tokens, n_context), float("-inf")).triu_(row.start + 1)
    return Span(at, at + row.n_tokens, n_context, False, pages, mask)


def _decode_span(rows: Sequence[Row], at: int, paging: Paging) -> Span:
    block_tokens = paging.block_tokens
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
        paging.pages(table.reshape(-1)),
        torch.from_numpy(mask).view(len(rows), 1, 1, n_context),
    )
