"""The pace of this machine: how long it takes for a fixed calculation while nothing is sent."""

from __future__ import annotations

import time

import numpy as np

_CHUNKS = 20
_STEPS, _PRODUCTS, _SIDE = 100_000, 1000, 48


def pace_s() -> float:
    """Seconds for one of 20 equal chunks of work, a plain loop and small matrix products on one
    core: about 12 ms, a quarter of a second in all. The median, so that a moment in which somebody
    else had the core does not count; a neighbour who stays does."""
    matrix = np.full((_SIDE, _SIDE), 0.5, dtype=np.float32)
    return float(np.median([_chunk_s(matrix) for _ in range(_CHUNKS)]))


def _chunk_s(matrix: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> float:
    begin_s = time.perf_counter()
    total = 0
    for k in range(_STEPS):
        total += k & 3
    for _ in range(_PRODUCTS):
        matrix @ matrix
    assert total == 3 * _STEPS // 2
    return time.perf_counter() - begin_s
