"""KV blocks in host memory: copied block by block, all layers of one in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from reference_engine.executors.base import Copy


class HostKv:
    """`n_blocks` blocks of the size of `cache` [layers, blocks, 2, Hkv, block, hd], pinned where
    the device copies beside its computation."""

    def __init__(self, cache: torch.Tensor, n_blocks: int, is_pinned: bool) -> None:
        shape = (n_blocks, cache.shape[0], *cache.shape[2:])
        self._host = torch.zeros(shape, dtype=cache.dtype, pin_memory=is_pinned)

    def work_off(self, copies: Sequence[Copy], cache: torch.Tensor) -> None:
        """In their order, which matters: a block may leave and be written to by another's return.
        Does not wait for the device."""
        for is_out, group in groupby(copies, key=lambda copy: copy.is_out):
            same = list(group)
            blocks = torch.tensor([copy.block for copy in same]).to(cache.device)
            # Gathered on the device: a layer's part of a block is too small a copy to be fast.
            staged = cache.index_select(1, blocks).transpose(0, 1).contiguous()
            for i, copy in enumerate(same):
                host = self._host[copy.host_block]
                if is_out:
                    host.copy_(staged[i], non_blocking=True)
                else:
                    staged[i].copy_(host, non_blocking=True)
            if not is_out:
                cache.index_copy_(1, blocks, staged.transpose(0, 1))
