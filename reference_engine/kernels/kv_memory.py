"""Paged KV memory, in the model's own numbers or in 8 bits with a scale per token and head.

A scale of its own for each vector needs no calibration, and a token's KV depends on nothing that
comes after it: blocks can be shared, swapped and computed again as before.

Source: per-token symmetric quantisation as in KVQuant (arXiv 2401.18079) §3 and KIVI (arXiv
2402.02750) §3; e4m3 of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from reference_engine.state.model_config import KvDtype

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest number of a vector becomes."""
SMALLEST = 1e-20
"""Of a vector's largest number; less counts as this, so that nothing is divided by 0."""
_DTYPES: dict[KvDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Kv(NamedTuple):
    """`numbers` [blocks, 2, Hkv, block, hd], so that the keys of one head in one block lie in one
    piece; with `scales` [blocks, 2, Hkv, block] float32 a value is number · scale. Both may have
    the layers in front."""

    numbers: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], dtype: torch.dtype, kv_dtype: KvDtype, device: torch.device
    ) -> Kv:
        """`dtype` is the model's own."""
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
        """0.0 where nothing is scaled."""
        return LARGEST[self.numbers.dtype] if self.scales is not None else 0.0

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As kernels take them; where there are no scales nothing is read from the second."""
        return self.numbers, self.numbers if self.scales is None else self.scales

    def parts(self) -> tuple[torch.Tensor, ...]:
        """What is to be copied with a block."""
        numbers = indexable(self.numbers)
        return (numbers,) if self.scales is None else (numbers, self.scales)


def indexable(numbers: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can index; it cannot index 8-bit floats."""
    return numbers.view(torch.int8) if numbers.dtype.itemsize == 1 else numbers
