"""Memory of the torch executors: the inputs of a step on their way to the device, KV blocks in host
memory, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loadgen.errors import UsageError
from reference_engine.kernels.kv_memory import Kv
from reference_engine.state.batch import Copy

_ALIGNED = 64  # numbers; kernels are compiled for addresses that are multiples of 16 bytes


class FixedNumbers(NamedTuple):
    """Numbers at a fixed address: written to `numbers`, on the device after `send`."""

    numbers: NDArray[np.int32]
    host: torch.Tensor
    on_device: torch.Tensor

    def send(self) -> None:
        self.on_device.copy_(self.host, non_blocking=True)


SIDES = 2
"""Copies in host memory of what steps send and receive: as many steps may be under way."""


class Arena:
    """Up to `size` int32 numbers of a step, written to host memory and sent to the device
    as a single copy.

    Equal sequences of `put` return equal addresses on the device, which a CUDA graph needs. The
    host has a memory for each side, and `reset` changes sides: a step writes while the numbers of
    the step before may still be on their way. A side must have arrived before it is written again.
    """

    def __init__(self, size: int, device: torch.device, is_pinned: bool) -> None:
        self._device, self._is_pinned = device, is_pinned
        self._side = self._used = 0
        self._allocate(size)

    def reset(self, size: int) -> None:
        """Begin again on the other side, with room for at least `size` numbers."""
        if size > len(self._on_device):
            self._allocate(2 * size)
        self._side = (self._side + 1) % SIDES
        self._used = 0

    def put(self, numbers: NDArray[np.int32]) -> torch.Tensor:
        """The place of `numbers` on the device after `send`, in their shape."""
        begin = self._used
        end = begin + numbers.size
        assert end <= len(self._on_device), f"{end} numbers in an arena of {len(self._on_device)}"
        self._arrays[self._side, begin:end] = numbers.reshape(-1)
        self._used = begin + aligned(numbers.size)
        return self._on_device[begin:end].view(numbers.shape)

    def fixed(self, shape: tuple[int, ...], side: int = 0) -> FixedNumbers:
        """The first numbers of a side, in an arena that is used for nothing else."""
        n = prod(shape)
        array, host = self._arrays[side, :n], self._hosts[side, :n]
        return FixedNumbers(array.reshape(shape), host.view(shape), self._on_device[:n].view(shape))

    def send(self) -> None:
        used = min(self._used, len(self._on_device))
        self._on_device[:used].copy_(self._hosts[self._side, :used], non_blocking=True)

    def _allocate(self, size: int) -> None:
        self._hosts = torch.zeros(SIDES, size, dtype=torch.int32, pin_memory=self._is_pinned)
        self._arrays = self._hosts.numpy()
        self._on_device = torch.zeros(size, dtype=torch.int32, device=self._device)


def aligned(n: int) -> int:
    """Numbers of an arena that `n` numbers occupy."""
    return -(-n // _ALIGNED) * _ALIGNED


class HostKv:
    """`n_blocks` blocks of KV in host memory, in the format of `cache`, which has a leading
    dimension of layers; pinned where copies overlap with computation. All layers of a block are
    contiguous."""

    def __init__(self, cache: Kv, n_blocks: int, is_pinned: bool) -> None:
        self._hosts = [
            torch.zeros(
                (n_blocks, part.shape[0], *part.shape[2:]), dtype=part.dtype, pin_memory=is_pinned
            )
            for part in cache.parts()
        ]
        self._arena = Arena(1 << 12, cache.numbers.device, is_pinned)

    def copy_blocks(self, copies: Sequence[Copy], cache: Kv) -> None:
        """Copy in order: a block that was copied out may be overwritten by a later copy. Does not
        wait for the device, which must have finished the copies of the last call but one."""
        groups = [list(group) for _, group in groupby(copies, key=lambda copy: copy.is_out)]
        self._arena.reset(sum(aligned(len(group)) for group in groups))
        numbers = [
            self._arena.put(np.array([copy.block for copy in group], np.int32)) for group in groups
        ]
        self._arena.send()
        for group, blocks in zip(groups, numbers, strict=True):
            for host, part in zip(self._hosts, cache.parts(), strict=True):
                _copy(group, blocks.long(), host, part, group[0].is_out)


def _copy(
    copies: Sequence[Copy],
    blocks: torch.Tensor,
    host: torch.Tensor,
    part: torch.Tensor,
    is_out: bool,
) -> None:
    """Copies in the same direction; `blocks` are their block numbers on the device."""
    # Staged on the device: a layer's part of a block alone is too small for a fast copy.
    staged = part.index_select(1, blocks).transpose(0, 1).contiguous()  # [copies, layers, …]
    for i, copy in enumerate(copies):
        host_block = host[copy.host_block]
        if is_out:
            host_block.copy_(staged[i], non_blocking=True)
        else:
            staged[i].copy_(host_block, non_blocking=True)
    if not is_out:
        part.index_copy_(1, blocks, staged.transpose(0, 1))


@contextmanager
def allocating(
    option: str, n_blocks: int, block_bytes: int, refusal: type[Exception] = MemoryError
) -> Iterator[None]:
    """Around an allocation of `n_blocks` blocks. Turns `refusal`, which is RuntimeError where torch
    allocates, into a UsageError with the option, the size and the allocator's message."""
    try:
        yield
    except refusal as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{option}: {n_blocks} blocks need {n_blocks * block_bytes / 1e9:.1f} GB of memory, "
            f"which cannot be allocated: {reason}"
        ) from error


def blocks_that_fit(
    total_bytes: int, used_bytes: int, share: float, reserve_bytes: int, block_bytes: int
) -> int:
    """KV blocks that fit into `share` of a device's memory after `used_bytes` (weights and the
    largest step) and a reserve. Raises UsageError if none fits."""
    free_bytes = int(total_bytes * share) - used_bytes - reserve_bytes
    if free_bytes < block_bytes:
        raise UsageError(
            f"memory_share: {share:g} of {total_bytes / 1e9:.1f} GB leaves no memory for KV after "
            f"{used_bytes / 1e9:.1f} GB of weights and step memory and {reserve_bytes / 1e9:.1f} "
            "GB of reserve; choose a smaller shape or a larger share"
        )
    return free_bytes // block_bytes
