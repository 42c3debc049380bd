"""Division of attention into programs: prompts into tiles, contexts into splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

TILE_ROWS = 64
"""Query rows of a tile, a power of two. Query heads that share a KV head are separate rows."""


class Tuning(NamedTuple):
    """Loop sizes of the attention kernels: keys per pass, passes whose loads are in flight, and
    warps per program. The defaults were chosen by the compiled code, without a GPU; the GPU suite's
    part `sweep` times others."""

    decode_keys: int = 64
    decode_stages: int = 3
    decode_warps: int = 4
    chunk_keys: int = 64
    chunk_stages: int = 2
    chunk_warps: int = 4


DEFAULT_TUNING = Tuning()


class PromptPiece(NamedTuple):
    """`n` positions of a prompt, from position `start` on. `first` is the index of the first in the
    flat step, `row` the row of the block tables that lists the blocks."""

    row: int
    first: int
    n: int
    start: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """`table` [N, 4] int32: row, first, n, start of each tile, as in `PromptPiece`."""

    table: torch.Tensor

    def __len__(self) -> int:
        return len(self.table)


def tile_tokens(group: int) -> int:
    """Positions per tile with `group` query heads per KV head."""
    assert 1 <= group <= TILE_ROWS, f"{group} query heads per KV head, at most {TILE_ROWS}"
    return TILE_ROWS // group


def cut_tiles(pieces: Sequence[PromptPiece], group: int) -> NDArray[np.int32]:
    """The tiles of all pieces, [N, 4] int32. Tiles with the longest context come first: started
    last, they would run alone at the end."""
    size = tile_tokens(group)
    parts = []
    for row, first, n, start in pieces:
        offsets = np.arange(0, n, size, dtype=np.int32)
        sizes = np.minimum(n - offsets, size)
        parts.append(
            np.stack((np.full_like(offsets, row), first + offsets, sizes, start + offsets), 1)
        )
    if not parts:
        return np.empty((0, 4), np.int32)
    tiles = np.concatenate(parts).astype(np.int32)
    ends = tiles[:, 2] + tiles[:, 3]
    return np.ascontiguousarray(tiles[np.argsort(-ends, kind="stable")])


def splits_for(n_rows: int, n_kv_heads: int, n_processors: int) -> int:
    """Number of splits of a context with which every multiprocessor has two programs to run; a
    power of two, at most 32."""
    n_splits = 1
    while n_splits < 32 and n_rows * n_kv_heads * n_splits < 2 * n_processors:
        n_splits *= 2
    return n_splits
