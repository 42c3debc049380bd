"""Attention of decoding rows: one position of each of many sequences, its context read where it is.

To gather K and V first costs more than to attend to them. torch has two operations that read rows
of a matrix by their numbers, made for other ends: the product of two matrices at the places of a
sparse one, and the weighted sums of an embedding bag.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from reference_engine.model.paging import Paging
from reference_engine.state.batch import Row

# Scores of one call: 128 KiB, which an allocator gives again and again without asking the system.
MOST_SCORES = 1 << 15


@dataclass(frozen=True, slots=True)
class Decodes:
    """Flat positions `[begin, end)` of a step, one of each of G sequences with up to C positions
    of context.

    `pattern` is sparse, [G·Hq, Hkv·slots]: which K each query meets, C of them. Its values are 0
    where there is context and -inf where there is padding. `slots` [G·Hq·C] are its columns,
    `firsts` [G·Hq] where those of each row begin.
    """

    begin: int
    end: int
    n_context: int
    pattern: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], begin: int, paging: Paging) -> Decodes:
        """Those of rows that are decoding."""
        lengths = np.array([row.start + 1 for row in rows])
        n_blocks = int(-(-lengths.max() // paging.block_tokens))
        # Padding points to the row's own first block: always valid memory, and masked.
        table = np.empty((len(rows), n_blocks, 1), np.int32)
        for i, row in enumerate(rows):
            blocks = row.request.blocks[:n_blocks]
            table[i, : len(blocks), 0] = blocks
            table[i, len(blocks) :] = blocks[0]
        in_block = np.arange(paging.block_tokens, dtype=np.int32)
        n_context, n_heads = n_blocks * paging.block_tokens, paging.n_q_heads
        in_plane = (table * paging.block_tokens + in_block).reshape(len(rows), 1, n_context)
        slots = torch.from_numpy((in_plane + paging.first_read[:, None]).reshape(-1))
        n = len(rows) * n_heads
        firsts = torch.arange(0, n * n_context + 1, n_context, dtype=torch.int32)
        mask = np.zeros((len(rows), n_heads, n_context), np.float32)
        for i, length in enumerate(lengths):
            mask[i, :, length:] = -np.inf
        n_slots = paging.n_kv_heads * paging.n_blocks * paging.block_tokens
        pattern = _sparse(firsts, slots, torch.from_numpy(mask.reshape(-1)), (n, n_slots))
        return cls(begin, begin + len(rows), n_context, pattern, slots, firsts[:-1])

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> None:
        """As `attention.attend`, for these rows."""
        head_dim = q.shape[-1]
        queries = q[self.begin : self.end].view(-1, head_dim)
        k, v = kv.view(2, -1, head_dim).unbind()
        scores = torch.sparse.sampled_addmm(self.pattern, queries, k.t(), alpha=head_dim**-0.5)
        weights = scores.values().view(-1, self.n_context).softmax(-1).view(-1)
        queries.copy_(
            F.embedding_bag(self.slots, v, self.firsts, mode="sum", per_sample_weights=weights)
        )


def _sparse(
    firsts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    _hear_of_beta()
    return torch.sparse_csr_tensor(firsts, columns, values, shape, check_invariants=False)


@cache
def _hear_of_beta() -> None:
    """torch says once in a process that this layout is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.empty(0), torch.empty(0), (1, 1))
