"""Sizes of decode steps that a CUDA graph is kept for, and how much memory is left for KV."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from loadgen.errors import UsageError


def buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 16 up to 256, then of 64; the last one is `max_rows`.

    A step is rounded up to the next one: rows for nobody that cost at most what the tile of a
    matrix multiplication would have cost anyway.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_rows + 64, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def bucket_of(n_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `n_rows`; None when none does."""
    at = bisect_left(sizes, n_rows)
    return sizes[at] if at < len(sizes) else None


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
