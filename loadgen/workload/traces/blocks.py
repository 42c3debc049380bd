"""Exact sharing of prompts that are recorded as lists of block hashes (`hash_ids`).

Two prompts share text as far as their lists agree, so the lists form a tree. `share_blocks` cuts it
into pieces at every place where prompts diverge or a shared part ends: a radix tree of at most
2n − 1 pieces for n prompts, however many blocks they have.

The tree is the lcp-interval tree of the sorted lists (M. I. Abouelhoda, S. Kurtz and E. Ohlebusch,
Replacing suffix trees with enhanced suffix arrays, J. Discrete Algorithms 2004, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_STEP = 64  # blocks compared at first


@dataclass(frozen=True, slots=True)
class Sharing:
    """The shared text of n prompts, in blocks.

    `piece` [n] is the last piece of each prompt's shared part (−1: none) and `blocks` [n] the
    length of that part. Piece k has `piece_blocks[k]` blocks and follows piece `after[k]` (−1: it
    begins the prompt); pieces stand behind those that they follow. `hits` [n] are the leading
    blocks of each prompt that an earlier prompt has, too: those in an unlimited prefix cache.
    """

    piece: Ints
    blocks: Ints
    after: Ints
    piece_blocks: Ints
    hits: Ints


def share_blocks(ids: Ints, n_ids: Ints, order: NDArray[np.intp]) -> Sharing:
    """The sharing of n prompts in file order. `ids` is the concatenation of all lists, `n_ids` [n]
    their lengths, `order` [n] the prompts by time."""
    n = n_ids.size
    ends = np.cumsum(n_ids)
    bounds = [*pairwise(np.r_[0, ends].tolist())]
    lists = [ids[start:end] for start, end in bounds]
    # big-endian bytes in order: lists with equal beginnings are neighbours
    keys = [part.astype(">i8").tobytes() for part in lists]
    by_key = sorted(range(n), key=keys.__getitem__)
    del keys
    common = [0] * (n + 1)  # blocks that neighbours of the sorted order share; 0 at both ends
    for k in range(1, n):
        common[k] = n_common(lists[by_key[k - 1]], lists[by_key[k]])
    time_of = np.empty(n, np.int64)
    time_of[order] = np.arange(n)
    node, depth, parent = _intervals(common)
    first = _first_times(node, parent, time_of[by_key])
    numbered = np.lexsort((depth, first))[1:] if n else np.empty(0, np.intp)  # without the root
    number = np.full(len(depth), -1, np.int64)
    number[numbered] = np.arange(len(numbered))
    by_row = np.empty(n, np.int64)
    by_row[by_key] = node
    hits = np.empty(n, np.int64)
    hits[by_key] = _hits(common, time_of[by_key])
    return Sharing(
        piece=number[by_row],
        blocks=depth[by_row],
        after=number[parent[numbered]],
        piece_blocks=(depth - depth[parent])[numbered],
        hits=hits,
    )


def n_common(one: Ints, other: Ints) -> int:
    """The number of leading entries in which two lists agree."""
    n, start, step = min(len(one), len(other)), 0, _STEP
    while start < n:
        differs = one[start : min(start + step, n)] != other[start : min(start + step, n)]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
        start, step = start + step, 4 * step
    return n


def _intervals(common: list[int]) -> tuple[Ints, Ints, Ints]:
    """(deepest interval of each sorted prompt, depth of each interval, parent of each interval).
    Interval 0 is the root, of depth 0 and its own parent."""
    n = len(common) - 1
    node, depth, parent = np.zeros(n, np.int64), [0], [0]
    open_nodes = [0]
    for k in range(1, n + 1):
        deepest, last = open_nodes[-1], -1
        while depth[open_nodes[-1]] > common[k]:
            last = open_nodes.pop()
        if depth[open_nodes[-1]] < common[k]:
            if last >= 0:  # the new interval lies between it and its parent
                parent[last] = len(depth)
            parent.append(open_nodes[-1])
            open_nodes.append(len(depth))
            depth.append(common[k])
        node[k - 1] = open_nodes[-1] if common[k] >= common[k - 1] else deepest
    return node, np.array(depth, np.int64), np.array(parent, np.int64)


def _first_times(node: Ints, parent: Ints, times: Ints) -> Ints:
    """The place in time of the first prompt below each interval; −1 for the root."""
    first = np.full(len(parent), len(node), np.int64)
    np.minimum.at(first, node, times)
    waiting, above = np.bincount(parent, minlength=len(parent)).tolist(), parent.tolist()
    waiting[0] -= 1  # the root is its own parent
    earliest, done = first.tolist(), [k for k, count in enumerate(waiting) if not count]
    for k in done:  # grows: an interval is done after all below it
        if k:
            earliest[above[k]] = min(earliest[above[k]], earliest[k])
            waiting[above[k]] -= 1
            if not waiting[above[k]]:
                done.append(above[k])
    earliest[0] = -1
    return np.array(earliest, np.int64)


def _hits(common: list[int], times: Ints) -> Ints:
    """The longest agreement of each sorted prompt with an earlier one. From the last prompt in time
    to the first, each is taken out of a linked list; its neighbours are then the nearest earlier
    prompts, and the agreement across a gap is the least of those within it."""
    n = len(times)
    hits = np.zeros(n, np.int64)
    before, behind = [*range(-1, n - 1)], [*range(1, n + 1)]
    left = list(common)  # left[k]: agreement of prompt k with the prompt before it in the list
    for k in np.argsort(-times, kind="stable").tolist():
        low, high = before[k], behind[k]
        to_low, to_high = left[k], left[high]
        hits[k] = max(to_low, to_high)
        left[high] = min(to_low, to_high)
        if low >= 0:
            behind[low] = high
        if high < n:
            before[high] = low
    return hits
