"""A step's small inputs: written into one piece of host memory, sent to the device in one copy."""

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


class Held(NamedTuple):
    """Numbers that keep their place: written to `numbers`, on the device after `send`."""

    numbers: NDArray[np.int32]
    host: torch.Tensor
    on_device: torch.Tensor

    def send(self) -> None:
        self.on_device.copy_(self.host, non_blocking=True)


class Arena:
    """`size` int32 numbers at fixed addresses on both sides. Equal sequences of `put` give equal
    places, which is what a CUDA graph needs. What was sent must have arrived (a step's tokens were
    read) before the next step is written."""

    def __init__(self, size: int, device: torch.device, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned)
        self._array = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._used = 0

    @property
    def size(self) -> int:
        return len(self._array)

    def clear(self) -> None:
        self._used = 0

    def emptied(self, size: int) -> Arena:
        """It, or a larger one where `size` numbers do not fit."""
        if size > self.size:
            return Arena(2 * size, self._device.device, self._is_pinned)
        self.clear()
        return self

    def put(self, numbers: NDArray[np.int32]) -> torch.Tensor:
        """Where `numbers` will be on the device after `send`, in their shape."""
        begin = self._used
        end = begin + numbers.size
        assert end <= len(self._array), f"{end} numbers in an arena of {len(self._array)}"
        self._array[begin:end] = numbers.reshape(-1)
        self._used = -(-end // _ALIGNED) * _ALIGNED
        return self._device[begin:end].view(numbers.shape)

    def held(self, shape: tuple[int, ...]) -> Held:
        """The first of its numbers, for whoever puts nothing else into it."""
        n = prod(shape)
        array, host, device = self._array[:n], self._host[:n], self._device[:n]
        return Held(array.reshape(shape), host.view(shape), device.view(shape))

    def send(self) -> None:
        used = min(self._used, len(self._array))
        self._device[:used].copy_(self._host[:used], non_blocking=True)


def aligned(n: int) -> int:
    """Numbers of the arena that `n` take."""
    return -(-n // _ALIGNED) * _ALIGNED


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


@contextmanager
def asked_for(
    option: str, n_blocks: int, block_bytes: int, refusal: type[Exception] = MemoryError
) -> Iterator[None]:
    """Around taking memory for blocks. Raises UsageError, naming the option and what the refusal
    said, where there is too little; torch refuses with a RuntimeError."""
    try:
        yield
    except refusal as error:
        said = str(error).partition("\n")[0]
        raise UsageError(
            f"{option}: {n_blocks} blocks need {n_blocks * block_bytes / 1e9:.1f} GB of memory, "
            f"which is refused: {said}"
        ) from error


def blocks_that_fit(
    total_bytes: int, used_bytes: int, share: float, reserve_bytes: int, block_bytes: int
) -> int:
    """KV blocks that fit into `share` of a device's memory beside `used_bytes` (weights and the
    largest step) and a reserve. Raises UsageError when there is room for none."""
    room = int(total_bytes * share) - used_bytes - reserve_bytes
    if room < block_bytes:
        raise UsageError(
            f"memory_share: {share:g} of {total_bytes / 1e9:.1f} GB leaves no room for KV beside "
            f"{used_bytes / 1e9:.1f} GB of weights and step memory and {reserve_bytes / 1e9:.1f} "
            "GB of reserve; choose a smaller shape or a larger share"
        )
    return room // block_bytes
