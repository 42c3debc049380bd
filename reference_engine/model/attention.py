"""Causal attention of the CPU engine over its paged KV memory, and the index tensors of a step.

Decoding rows of similar context length share a call and read their context in place; each piece of
a prompt has a call of its own and gathers its context first. The index tensors are made once per
step and used by every layer.

Gathering K and V for a decoding row would cost more than attending to them. torch has two
operations, made for other purposes, that read rows of a matrix by number: `sampled_addmm`, the
product of two matrices at the places of a sparse matrix (q·kᵀ), and `embedding_bag`, weighted sums
of rows (p·v).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from reference_engine.state.batch import Row

# Scores of a call: 128 KiB, a size that the allocator reuses without a system call.
MAX_SCORES = 1 << 15


@dataclass(frozen=True)
class KvLayout:
    """Layout of a layer's KV memory [2, Hkv, blocks, block, hd]: a plane for K and a plane for V of
    each KV head, so that a head's part of a block is contiguous."""

    n_q_heads: int
    n_kv_heads: int
    n_blocks: int
    block_tokens: int

    @cached_property
    def first_blocks(self) -> NDArray[np.int64]:
        """The number of each plane's first block, [2·Hkv]."""
        return np.arange(2 * self.n_kv_heads, dtype=np.int64) * self.n_blocks

    @cached_property
    def first_slots(self) -> NDArray[np.int64]:
        """The number of each plane's first slot, [2·Hkv]."""
        return self.first_blocks * self.block_tokens

    @cached_property
    def first_read(self) -> NDArray[np.int32]:
        """The first slot that each query head reads, counted among the slots of K or of V, [Hq]."""
        group = self.n_q_heads // self.n_kv_heads
        return self.first_slots[: self.n_kv_heads].repeat(group).astype(np.int32)

    def pages(self, blocks: NDArray[np.int64]) -> torch.Tensor:
        """The numbers of `blocks` [P] in every plane, plane by plane, [2·Hkv·P]."""
        return torch.from_numpy((self.first_blocks[:, None] + blocks).reshape(-1))

    def slots(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """The slots for K and V of each position, head by head, [T·2·Hkv]: rows of
        `cache.view(-1, hd)`."""
        in_plane = blocks * self.block_tokens + positions % self.block_tokens
        return torch.from_numpy((in_plane[:, None] + self.first_slots).reshape(-1))


class ScratchMemory:
    """Reused memory for a step's queries, and for the gathered KV of a prompt at a time.

    Memory allocated for every call may go back to the system in between and return as zeroed pages:
    where the allocator does that, steps take five times as long.
    """

    def __init__(self) -> None:
        self._memory, self._queries = torch.empty(0), torch.empty(0)

    def queries(self, n_tokens: int, n_heads: int, head_dim: int) -> torch.Tensor:
        """Uninitialised memory [T, Hq, hd], valid until the next step."""
        n = n_tokens * n_heads * head_dim
        if n > len(self._queries):
            self._queries = torch.empty(n)
        return self._queries[:n].view(n_tokens, n_heads, head_dim)

    def gathered(self, blocks: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Rows `pages` of `blocks` [·, width], valid until the next call."""
        n, width = len(pages), blocks.shape[1]
        if n * width > len(self._memory):
            self._memory = torch.empty(n * width, dtype=blocks.dtype)
        out = self._memory[: n * width].view(n, width)
        return torch.index_select(blocks, 0, pages, out=out)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Flat positions `[begin, end)` of a step, n positions of a sequence. `pages` [2·Hkv·P] are
    its blocks in every plane. `mask` [n, context] is None where the piece begins its sequence, and
    plain causal attention is right."""

    begin: int
    end: int
    n_context: int
    pages: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def of(cls, row: Row, begin: int, layout: KvLayout) -> PromptPart:
        n_context = row.start + row.n_tokens
        n_blocks = -(-n_context // layout.block_tokens)
        pages = layout.pages(np.array(row.request.blocks[:n_blocks], np.int64))
        mask = None
        if row.start:
            mask = torch.full((row.n_tokens, n_context), float("-inf")).triu_(row.start + 1)
        return cls(begin, begin + row.n_tokens, n_context, pages, mask)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, scratch: ScratchMemory) -> None:
        """The function `attend`, for these positions."""
        _, n_kv_heads, _, block_tokens, head_dim = kv.shape
        rows = q[self.begin : self.end]
        # Plane by plane, [2·Hkv·P, block·hd]: the context of each head is contiguous, and attention
        # reads it up to twice as fast as K and V of all heads side by side.
        gathered = scratch.gathered(kv.view(-1, block_tokens * head_dim), self.pages)
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
class DecodeGroup:
    """Flat positions `[begin, end)` of a step, a single position of each of G sequences with up to
    C positions of context.

    `pattern` is sparse, [G·Hq, Hkv·slots]: the C keys that each query meets. Its values are 0 for
    context and -inf for padding. `slots` [G·Hq·C] are its columns, `row_starts` [G·Hq] the index of
    the first column of each row.
    """

    begin: int
    end: int
    n_context: int
    pattern: torch.Tensor
    slots: torch.Tensor
    row_starts: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], begin: int, layout: KvLayout) -> DecodeGroup:
        lengths = np.array([row.start + 1 for row in rows])
        n_blocks = int(-(-lengths.max() // layout.block_tokens))
        # Padding points to the row's own first block: always valid memory, and masked.
        table = np.empty((len(rows), n_blocks, 1), np.int32)
        for i, row in enumerate(rows):
            blocks = row.request.blocks[:n_blocks]
            table[i, : len(blocks), 0] = blocks
            table[i, len(blocks) :] = blocks[0]
        in_block = np.arange(layout.block_tokens, dtype=np.int32)
        n_context, n_heads = n_blocks * layout.block_tokens, layout.n_q_heads
        in_plane = (table * layout.block_tokens + in_block).reshape(len(rows), 1, n_context)
        slots = torch.from_numpy((in_plane + layout.first_read[:, None]).reshape(-1))
        n = len(rows) * n_heads
        starts = torch.arange(0, n * n_context + 1, n_context, dtype=torch.int32)
        mask = np.zeros((len(rows), n_heads, n_context), np.float32)
        for i, length in enumerate(lengths):
            mask[i, :, length:] = -np.inf
        shape = (n, layout.n_kv_heads * layout.n_blocks * layout.block_tokens)
        _emit_beta_warning()
        pattern = torch.sparse_csr_tensor(
            starts, slots, torch.from_numpy(mask.reshape(-1)), shape, check_invariants=False
        )
        return cls(begin, begin + len(rows), n_context, pattern, slots, starts[:-1])

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> None:
        """The function `attend`, for these positions."""
        head_dim = q.shape[-1]
        queries = q[self.begin : self.end].view(-1, head_dim)
        k, v = kv.view(2, -1, head_dim).unbind()
        # Scores at the places of `pattern`, which are its slots; its values, 0 or -inf, are added.
        scores = torch.sparse.sampled_addmm(self.pattern, queries, k.t(), alpha=head_dim**-0.5)
        weights = scores.values().view(-1, self.n_context).softmax(-1).view(-1)
        queries.copy_(
            F.embedding_bag(self.slots, v, self.row_starts, mode="sum", per_sample_weights=weights)
        )


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step flattened to T token positions, decoding rows first.

    `order[i]` is the row of the batch that is i-th here; `last` are the flat positions whose logits
    are computed.
    """

    order: tuple[int, ...]
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T·2·Hkv] int64, see KvLayout
    last: torch.Tensor  # [S] int64
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptPart, ...]


def flatten(rows: Sequence[Row], layout: KvLayout, max_scores: int = MAX_SCORES) -> StepInput:
    """The index tensors of a step.

    Decoding rows are sorted by context length and cut into groups, each padded to its longest row;
    a group of more than one row has at most `max_scores` scores.
    """
    block_tokens = layout.block_tokens
    order = sorted(range(len(rows)), key=lambda i: _sort_key(rows[i]))
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
    index = np.array((tokens, positions, blocks_of), dtype=np.int64)  # [3, T]
    slots = layout.slots(index[2], index[1])
    flat = torch.from_numpy(index)
    n_decoding = sum(row.n_tokens == 1 for row in ordered)
    return StepInput(
        tuple(order),
        flat[0],
        flat[1],
        slots,
        torch.tensor(last, dtype=torch.int64),
        tuple(_decode_groups(ordered[:n_decoding], layout, max_scores)),
        tuple(_prompt_parts(ordered[n_decoding:], n_decoding, layout)),
    )


def attend(q: torch.Tensor, kv: torch.Tensor, step: StepInput, scratch: ScratchMemory) -> None:
    """Replace `q` by softmax(q·kᵀ/√head_dim)·v, for every flat position over the context of its own
    sequence.

    q [T, Hq, hd]; kv [2, Hkv, blocks, block, hd], this step's K and V already written.
    """
    for decodes in step.decodes:
        decodes.attend(q, kv)
    for prompt in step.prompts:
        prompt.attend(q, kv, scratch)


def _sort_key(row: Row) -> int:
    """The context of a decoding row; prompts come after all of them."""
    return row.start if row.n_tokens == 1 else 1 << 62


def _decode_groups(rows: Sequence[Row], layout: KvLayout, max_scores: int) -> Iterator[DecodeGroup]:
    """Groups of `rows`, which come by ascending context."""
    block_tokens, first = layout.block_tokens, 0
    for end, row in enumerate(rows):
        n_context = (row.start // block_tokens + 1) * block_tokens
        if first < end and (end + 1 - first) * n_context * layout.n_q_heads > max_scores:
            yield DecodeGroup.of(rows[first:end], first, layout)
            first = end
    if rows:
        yield DecodeGroup.of(rows[first:], first, layout)


def _prompt_parts(rows: Sequence[Row], begin: int, layout: KvLayout) -> Iterator[PromptPart]:
    for row in rows:
        yield PromptPart.of(row, begin, layout)
        begin += row.n_tokens


@cache
def _emit_beta_warning() -> None:
    """Let torch emit, unseen, its warning that sparse CSR tensors are in beta: it comes once per
    process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.empty(0), torch.empty(0), (1, 1))
