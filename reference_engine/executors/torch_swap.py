"""KV blocks in host memory: copied block by block, all layers of one in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from reference_engine.executors.torch_arena import Arena, aligned
from reference_engine.kernels.kv_memory import Kv
from reference_engine.state.batch import Copy


class HostKv:
    """`n_blocks` blocks of the size of `cache`, which has the layers in front, pinned where the
    device copies beside its computation."""

    def __init__(self, cache: Kv, n_blocks: int, is_pinned: bool) -> None:
        self._hosts = [
            torch.zeros(
                (n_blocks, part.shape[0], *part.shape[2:]), dtype=part.dtype, pin_memory=is_pinned
            )
            for part in cache.parts()
        ]
        self._arena = Arena(1 << 12, cache.numbers.device, is_pinned)

    def work_off(self, copies: Sequence[Copy], cache: Kv) -> None:
        """In their order, which matters: a block may leave and be written to by another's return.
        Does not wait for the device, which must be done with the copies of the call before."""
        groups = [list(group) for _, group in groupby(copies, key=lambda copy: copy.is_out)]
        self._arena = self._arena.emptied(sum(aligned(len(group)) for group in groups))
        numbers = [
            self._arena.put(np.array([copy.block for copy in group], np.int32)) for group in groups
        ]
        self._arena.send()
        for group, blocks in zip(groups, numbers, strict=True):
            for host, part in zip(self._hosts, cache.parts(), strict=True):
                _move(group, blocks.long(), host, part, group[0].is_out)


def _move(
    copies: Sequence[Copy],
    blocks: torch.Tensor,
    host: torch.Tensor,
    part: torch.Tensor,
    is_out: bool,
) -> None:
    # Gathered on the device: a layer's part of a block is too small a copy to be fast.
    staged = part.index_select(1, blocks).transpose(0, 1).contiguous()
    for i, copy in enumerate(copies):
        kept = host[copy.host_block]
        if is_out:
            kept.copy_(staged[i], non_blocking=True)
        else:
            staged[i].copy_(kept, non_blocking=True)
    if not is_out:
        part.index_copy_(1, blocks, staged.transpose(0, 1))
