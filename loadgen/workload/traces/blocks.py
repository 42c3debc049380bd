"""Conversion of block hashes of prompts (`hash_ids`) to a shared prefix per row.

The hash lists of a trace form a tree: two prompts share text as far as their lists agree. A row of
a schedule has only a single prefix id and a length, so the tree is cut into chains: a node
continues the chain of its parent if it is the child that most prompts continue with; every other
node begins a new chain. A row gets the chain of the deepest node that it shares with another row.
Rows of the same chain share min(d₁, d₂) blocks in the trace, so sharing is never overstated. Blocks
that rows of different chains share (before they branch) are lost; `Sharing` states how many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.workload.traces.trace import Ids


@dataclass(frozen=True, slots=True)
class Sharing:
    """`prefix_ids` (0 = none) and shared `blocks` of each row, and the share of all prompt blocks
    that an unlimited prefix cache hits in the trace and with these prefixes."""

    prefix_ids: Ids
    blocks: NDArray[np.int64]
    share_in_trace: float
    share_kept: float


def share_blocks(
    ids: NDArray[np.int64], n_ids: NDArray[np.int64], order: NDArray[np.intp]
) -> Sharing:
    """Prefixes of n rows in file order. `ids` is the concatenation of all lists, `n_ids` [n] their
    lengths, `order` [n] the rows by time (a later row hits the blocks of earlier rows).

    Only nodes that two or more rows share are built, so the work is linear in the shared blocks.
    """
    n = n_ids.size
    first = (np.cumsum(n_ids) - n_ids)[order]
    left = n_ids[order]
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**36):  # hashes, not sequence numbers
        _, ids = np.unique(ids, return_inverse=True)
    n_distinct = int(ids.max(initial=0)) + 1
    depth, hits, chain = (np.zeros(n, np.int64) for _ in range(3))  # of rows in order of time
    rows = np.arange(n)  # rows that share every block so far
    place_above = np.zeros(n, np.int64)  # of each row: the number of its node in the level above
    chain_above = np.zeros(1, np.int64)  # of each node of the level above; at first, the root
    n_chains, level = 0, 0
    while rows.size:
        rows = rows[left[rows] > level]
        assert chain_above.size * n_distinct < 2**62, "a (parent, id) pair must fit in 64 bits"
        key = place_above[rows] * n_distinct + ids[first[rows] + level]
        nodes, first_row, place, count = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
        is_shared = count >= 2
        renumbered = np.cumsum(is_shared) - 1
        is_in = is_shared[place]
        is_later = np.ones(rows.size, np.bool_)
        is_later[first_row] = False
        level += 1
        hits[rows[is_in & is_later]] = level
        rows, place = rows[is_in], renumbered[place[is_in]]
        parent, count = nodes[is_shared] // n_distinct, count[is_shared]
        chain_here, n_chains = _continued(parent, count, chain_above, n_chains, level == 1)
        depth[rows], chain[rows] = level, chain_here[place]
        place_above[rows], chain_above = place, chain_here
    kept = _hits_within(chain, depth)
    total = max(int(n_ids.sum()), 1)
    by_row = np.empty(n, np.intp)
    by_row[order] = np.arange(n)
    return Sharing(
        chain[by_row].astype(np.uint32), depth[by_row], hits.sum() / total, kept.sum() / total
    )


def _continued(
    parent: NDArray[np.int64],
    count: NDArray[np.int64],
    chain_above: NDArray[np.int64],
    n_chains: int,
    is_first: bool,
) -> tuple[NDArray[np.int64], int]:
    """The chain of each node of a level: the parent's chain for its most used child (the first of
    equals), a new chain for every other child and for every child of the root."""
    chain = np.zeros(parent.size, np.int64)
    is_new = np.ones(parent.size, np.bool_)
    if not is_first:
        ranked = np.lexsort((np.arange(parent.size), -count, parent))
        is_heaviest = np.diff(parent[ranked], prepend=-1) != 0
        is_new[ranked[is_heaviest]] = False
        chain[~is_new] = chain_above[parent[~is_new]]
    n_new = int(is_new.sum())
    chain[is_new] = n_chains + 1 + np.arange(n_new)
    return chain, n_chains + n_new


def _hits_within(chain: NDArray[np.int64], depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """min(own depth, largest earlier depth in the same chain) of rows in order of time."""
    by_chain = np.argsort(chain, kind="stable")
    sorted_chain, sorted_depth = chain[by_chain], depth[by_chain]
    span = int(depth.max(initial=0)) + 1
    deepest = np.maximum.accumulate(sorted_chain * span + sorted_depth) - sorted_chain * span
    is_first = np.diff(sorted_chain, prepend=-1) != 0
    before = np.where(is_first, 0, np.roll(deepest, 1))
    hits = np.empty_like(depth)
    hits[by_chain] = np.where(sorted_chain > 0, np.minimum(before, sorted_depth), 0)
    return hits
