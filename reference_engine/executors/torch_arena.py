"""A step's small inputs: written into one piece of host memory, sent to the device in one copy."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
