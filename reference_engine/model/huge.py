"""Memory in large pages, taken from the system as it is touched: attention reads KV here and there,
4 KiB at a time, and looks up every page anew."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress

import torch


def zeros(*shape: int) -> torch.Tensor:
    """float32; in pages of 2 MiB where the system gives them to who asks (Linux). Raises
    MemoryError, saying what there is, where it promises nobody so much."""
    n_bytes = 4 * math.prod(shape)
    if not hasattr(mmap, "MADV_HUGEPAGE") or n_bytes == 0:
        try:
            return torch.zeros(shape)
        except RuntimeError as error:
            raise MemoryError(_there_is()) from error
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(_there_is()) from error
    with suppress(OSError):  # a system without large pages refuses: small ones do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def physical_bytes() -> int:
    """The memory of this machine, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _there_is() -> str:
    return f"this machine has {physical_bytes() / 1e9:.1f} GB"
