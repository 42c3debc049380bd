"""Matrices of the CPU engine, each in the memory order in which its product is fastest."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

# Below this size a call into oneDNN costs more than it saves (20 against 5 µs for 128 × 128).
_PACKED_FROM = 100_000  # elements
_PACKED_FOR = 16  # tokens a step, for which oneDNN chooses its block sizes
_NARROW = 1024  # outputs
_CPU_INFO = Path("/proc/cpuinfo")


class Linear:
    """x @ weightᵀ for a checkpoint's [out, in] float32 `weight`.

    Large matrices are packed once by oneDNN and read in order; small ones are stored [in, out] for
    MKL. A decode step reads every matrix once from memory: for the 9 M weights of `10m`, oneDNN
    takes 4.5 ms for 16 tokens where MKL takes 7.2, and 2.7 for 4 tokens instead of 4.9 (one core of
    an AMD EPYC with AVX-512, least of 25 interleaved rounds). On Intel processors MKL is faster for
    matrices with few outputs: 550 µs instead of 690 for the q, k, v, o and down matrices of a block
    of `10m`, 16 tokens (lower quartile of 25 interleaved rounds, weights not in a cache).
    `on_intel` None stands for the processor of this machine.
    """

    def __init__(self, weight: torch.Tensor, on_intel: bool | None = None) -> None:
        self._packed = self._transposed = None
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
        is_narrow = weight.shape[0] <= _NARROW
        # By the kind of processor, not by a timing at start: two starts would round differently.
        is_for_mkl = is_narrow and (_is_intel() if on_intel is None else on_intel)
        if weight.numel() >= _PACKED_FROM and has_onednn and not is_for_mkl:
            # Not public API of torch, which is pinned: `torch.compile` calls both operators.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
            return
        transposed = weight.t()
        # MKL multiplies batches of 4-64 rows 1.3-2.5 times as fast in this order, but wider
        # matrices no faster, or slower (one core, AVX-512).
        self._transposed = transposed.contiguous() if is_narrow else transposed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        if self._transposed is not None:
            return x @ self._transposed
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, None, "none", [], ""
        )
        return product

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """`total` [T, out] += x [T, in] @ weightᵀ."""
        if self._transposed is not None:
            total.addmm_(x, self._transposed)
        else:
            total.add_(self(x))


@cache
def _is_intel() -> bool:
    """Whether MKL takes its fast paths here, which it does on Intel processors only; False where
    /proc/cpuinfo cannot be read."""
    try:
        return "GenuineIntel" in _CPU_INFO.read_text()
    except OSError:
        return False
