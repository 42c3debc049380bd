"""Sums over groups of neighbours, some megabytes at a time: at 10⁸ chunks a column of what is added
up would be most of a gigabyte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20  # values at a time: they stay in the processor's cache


def group_sums(
    starts: NDArray[np.intp], n: int, values: Callable[[slice], NDArray[Any]]
) -> NDArray[np.int64]:
    """Σ of `values` over each group; group g is [starts[g], starts[g + 1]), the last one ends at n.

    `starts` ascends strictly from 0. `values` gives the whole numbers (or truths) of a stretch.
    """
    edges = np.append(starts, n)
    totals, first = np.empty(len(starts), np.int64), 0
    while first < len(starts):
        begin = int(edges[first])
        last = max(first + 1, int(np.searchsorted(edges, begin + BLOCK, side="right")) - 1)
        stretch = values(slice(begin, int(edges[last])))
        totals[first:last] = np.add.reduceat(stretch, starts[first:last] - begin, dtype=np.int64)
        first = last
    return totals
