"""Where the CPU's paged KV memory keeps what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Paging:
    """How a layer's KV memory [2, Hkv, blocks, block, hd] is laid out: a plane for K and one for V
    of each KV head, so that what a head reads of a block is in one piece."""

    n_q_heads: int
    n_kv_heads: int
    n_blocks: int
    block_tokens: int

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The number of each plane's first block, [2·Hkv]."""
        return np.arange(2 * self.n_kv_heads, dtype=np.int64) * self.n_blocks

    @cached_property
    def first_slots(self) -> NDArray[np.int64]:
        """The number of each plane's first slot, [2·Hkv]."""
        return self.firsts * self.block_tokens

    @cached_property
    def first_read(self) -> NDArray[np.int32]:
        """The first slot that each query head reads, counted among those of K or of V, [Hq]."""
        group = self.n_q_heads // self.n_kv_heads
        return self.first_slots[: self.n_kv_heads].repeat(group).astype(np.int32)

    def pages(self, blocks: NDArray[np.int64]) -> torch.Tensor:
        """The same blocks in every plane, plane by plane."""
        return torch.from_numpy((self.firsts[:, None] + blocks).reshape(-1))

    def slots(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Where K and V of each position go, head by head: rows of `cache.view(-1, hd)`."""
        in_plane = blocks * self.block_tokens + positions % self.block_tokens
        return torch.from_numpy((in_plane[:, None] + self.first_slots).reshape(-1))
