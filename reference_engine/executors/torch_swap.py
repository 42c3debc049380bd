"""KV blocks in host memory: copied block by block, all layers of one in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from reference_engine.executors.base import Copy
from reference_engine.kernels.kv_memory import Kv


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

    def work_off(self, copies: Sequence[Copy], cache: Kv) -> None:
        """In their order, which matters: a block may leave and be written to by another's return.
        Does not wait for the device."""
        for is_out, group in groupby(copies, key=lambda copy: copy.is_out):
            same = list(group)
            blocks = torch.tensor([copy.block for copy in same]).to(cache.numbers.device)
            for host, part in zip(self._hosts, cache.parts(), strict=True):
                _move(same, blocks, host, part, is_out)


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
