"""Paged KV memory in the model's own dtype, or in 8 bits with a scale per token and head.

A scale per vector needs no calibration, and a token's KV depends on nothing that comes after it, so
that blocks can be shared, swapped and recomputed as without quantisation; a scale per block would
change while the block fills. The scales take 3 % of the memory (4 bytes per 128 numbers).

Source: per-token symmetric quantisation as in KVQuant (arXiv 2401.18079) §3 and KIVI (arXiv
2402.02750) §3; e4m3 of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from reference_engine.state.model_config import KvDtype

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The number that stands for the largest magnitude of a vector."""
SMALLEST = 1e-20
"""Lower limit of a vector's largest magnitude, so that no scale is 0."""
_DTYPES: dict[KvDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Kv(NamedTuple):
    """`numbers` [blocks, 2, Hkv, block, hd], in which the keys of a head in a block are
    contiguous; with `scales` [blocks, 2, Hkv, block] float32 a value is number · scale. Both may
    have a leading dimension of layers."""

    numbers: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], dtype: torch.dtype, kv_dtype: KvDtype, device: torch.device
    ) -> Kv:
        """Zeroed memory; `dtype` is the model's own, used for `auto`."""
        if kv_dtype == "auto":
            return cls(torch.zeros(shape, dtype=dtype, device=device))
        return cls(
            torch.zeros(shape, dtype=_DTYPES[kv_dtype], device=device),
            torch.zeros(shape[:-1], device=device),
        )

    def layers(self) -> Iterator[Kv]:
        if self.scales is None:
            yield from map(Kv, self.numbers)
        else:
            yield from map(Kv, self.numbers, self.scales)

    @property
    def largest(self) -> float:
        """The largest number of the dtype; 0.0 without scales."""
        return LARGEST[self.numbers.dtype] if self.scales is not None else 0.0

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two pointers that kernels take. Without scales the second is never read."""
        return self.numbers, self.numbers if self.scales is None else self.scales

    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors to copy when a block is copied."""
        numbers = indexable(self.numbers)
        return (numbers,) if self.scales is None else (numbers, self.scales)


def indexable(numbers: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index; it cannot index 8-bit floats."""
    return numbers.view(torch.int8) if numbers.dtype.itemsize == 1 else numbers
