"""KV memory in huge pages.

Attention reads KV in scattered pieces; with pages of 4 KiB nearly each piece costs a page-table
lookup. The system allocates a page when it is first written. A pool of usual size is written at
once: blocks are used in turn, so the memory of a server would otherwise grow until each was used
(350 to 411 MB in 10 minutes at 15 requests/s), and first uses would cost steps page faults.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress

import torch

_WRITTEN_BYTES = 1 << 30  # 0.2 s; of a larger pool, pages are allocated as they are used


def zeros(*shape: int) -> torch.Tensor:
    """A float32 tensor of zeros, in pages of 2 MiB where the system grants them on request (Linux).
    Raises MemoryError with the machine's memory where the system refuses so much."""
    n_bytes = 4 * math.prod(shape)
    if not hasattr(mmap, "MADV_HUGEPAGE") or n_bytes == 0:
        try:
            return torch.zeros(shape)
        except RuntimeError as error:
            raise MemoryError(_machine_memory()) from error
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(_machine_memory()) from error
    with suppress(OSError):  # a kernel built without huge pages refuses; small pages do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(shape)
    return pool.zero_() if n_bytes <= _WRITTEN_BYTES else pool


def physical_bytes() -> int:
    """The memory of this machine, used or free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_memory() -> str:
    return f"this machine has {physical_bytes() / 1e9:.1f} GB"
