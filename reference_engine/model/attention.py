"""Causal attention over a paged KV memory, and the step's index tensors that it needs.

Decoding rows of similar context length share one call; each piece of a prompt has its own. The
index tensors are made once per step and used by every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from reference_engine.model.decoding import MOST_SCORES, Decodes
from reference_engine.model.paging import Paging
from reference_engine.state.batch import Row


@dataclass(frozen=True, slots=True)
class Prompt:
    """Flat positions `[begin, end)` of a step, n of one sequence. `pages` [2·Hkv·P] names its
    blocks in each plane, `mask` [n, context] is None where plain causal does."""

    begin: int
    end: int
    n_context: int
    pages: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def of(cls, row: Row, begin: int, paging: Paging) -> Prompt:
        n_context = row.start + row.n_tokens
        n_blocks = -(-n_context // paging.block_tokens)
        pages = paging.pages(np.array(row.request.blocks[:n_blocks], np.int64))
        mask = None
        if row.start:
            mask = torch.full((row.n_tokens, n_context), float("-inf")).triu_(row.start + 1)
        return cls(begin, begin + row.n_tokens, n_context, pages, mask)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, desk: Desk) -> None:
        """As below, for these positions."""
        _, n_kv_heads, _, block_tokens, head_dim = kv.shape
        rows = q[self.begin : self.end]
        # Plane by plane, [2·Hkv·P, block·hd]: each head's context in one piece, which attention
        # reads up to twice as fast as K and V of all heads side by side.
        gathered = desk.gathered(kv.view(-1, block_tokens * head_dim), self.pages)
        planes = gathered.view(2, 1, n_kv_heads, -1, head_dim)
        k, v = planes[:, :, :, : self.n_context].unbind()  # [1, Hkv, C, hd]
        out = F.scaled_dot_product_attention(
            rows.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=True,
        )
        rows.copy_(out[0].transpose(0, 1))  # [n, Hq, hd]


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
    decodes: tuple[Decodes, ...]
    prompts: tuple[Prompt, ...]


def flatten(rows: Sequence[Row], paging: Paging, most_scores: int = MOST_SCORES) -> StepInput:
    """The index tensors of a step.

    Decoding rows are sorted by context length and cut into groups, each padded to its longest
    row; a group of more than one row has at most `most_scores` scores.
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
    flat = torch.from_numpy(index)
    n_decoding = sum(row.n_tokens == 1 for row in ordered)
    return StepInput(
        tuple(order),
        flat[0],
        flat[1],
        slots,
        torch.tensor(last, dtype=torch.int64),
        tuple(_decodes(ordered[:n_decoding], paging, most_scores)),
        tuple(_prompts(ordered[n_decoding:], n_decoding, paging)),
    )


class Desk:
    """Memory for a step's queries, and for gathered KV, one prompt after the other. Taken anew for
    every call it would go back to the system in between and come as zeroed pages: where the
    allocator happens to do so, steps take five times as long."""

    def __init__(self) -> None:
        self._memory, self._queries = torch.empty(0), torch.empty(0)

    def queries(self, n_tokens: int, n_heads: int, head_dim: int) -> torch.Tensor:
        """[T, Hq, hd] of anything, until the next step."""
        n = n_tokens * n_heads * head_dim
        if n > len(self._queries):
            self._queries = torch.empty(n)
        return self._queries[:n].view(n_tokens, n_heads, head_dim)

    def gathered(self, blocks: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Rows `pages` of `blocks` [·, width], until the next call."""
        n, width = len(pages), blocks.shape[1]
        if n * width > len(self._memory):
            self._memory = torch.empty(n * width, dtype=blocks.dtype)
        out = self._memory[: n * width].view(n, width)
        return torch.index_select(blocks, 0, pages, out=out)


def attend(q: torch.Tensor, kv: torch.Tensor, step: StepInput, desk: Desk) -> None:
    """Put softmax(q·kᵀ/√head_dim)·v in the place of `q`, for every flat position over the context
    of its own sequence.

    q [T, Hq, hd]; kv [2, Hkv, blocks, block, hd], this step's K and V already written.
    """
    for decodes in step.decodes:
        decodes.attend(q, kv)
    for prompt in step.prompts:
        prompt.attend(q, kv, desk)


def _length(row: Row) -> int:
    """Sort key: the context of decoding rows, above all of them for prompts."""
    return row.start if row.n_tokens == 1 else 1 << 62


def _decodes(rows: Sequence[Row], paging: Paging, most_scores: int) -> Iterator[Decodes]:
    """`rows` by ascending context."""
    block_tokens, first = paging.block_tokens, 0
    for end, row in enumerate(rows):
        n_context = (row.start // block_tokens + 1) * block_tokens
        if first < end and (end + 1 - first) * n_context * paging.n_q_heads > most_scores:
            yield Decodes.of(rows[first:end], first, paging)
            first = end
    if rows:
        yield Decodes.of(rows[first:], first, paging)


def _prompts(rows: Sequence[Row], begin: int, paging: Paging) -> Iterator[Prompt]:
    for row in rows:
        yield Prompt.of(row, begin, paging)
        begin += row.n_tokens
