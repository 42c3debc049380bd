"""A batch as the paged model takes it: index tensors made with numpy, in one host array.

decodes in a bucket of b rows:  [8, b] = token, position, slot, table row, context,
                                temperature (bits), key low, key high
anything else:                  [3, T] + [2, D] + [S, …] by the same arena, rows in the order
                                decodes first, then pieces of prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.executors.base import Row
from reference_engine.executors.block_tables import BlockTables
from reference_engine.executors.torch_arena import Arena
from reference_engine.kernels.tiles import Piece, Tiles, cut
from reference_engine.model.paged import PagedStep
from reference_engine.model.sampling import key
from reference_engine.sequence import Request

Ints = NDArray[np.int32]
DECODE_FIELDS = 8


class Draws(NamedTuple):
    """How each wanted token is chosen, on the device."""

    temperatures: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S, 2] int32

    @classmethod
    def of(cls, temperatures: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Draws:
        """From the three numbers of each row as the arena has them, int32 [S]."""
        return cls(temperatures.view(torch.float32), torch.stack((low, high), 1))


def decode_numbers(
    requests: Sequence[Request],
    bucket: int,
    tables: BlockTables,
    block_tokens: int,
    n_fillers: int = 0,
    start: int = 0,
) -> Ints:
    """[8, bucket] for one token of each request, then of `n_fillers` for nobody at position
    `start`, which read as much as any; the rest of the bucket reads and writes the scratch
    block."""
    n = len(requests)
    end = n + n_fillers
    numbers = np.zeros((DECODE_FIELDS, bucket), np.int32)
    numbers[3, :n] = tables.rows(requests)
    numbers[3, n:end] = tables.filler_rows(n_fillers)
    numbers[3, end:] = tables.scratch_row
    numbers[1, :n] = [request.n_computed for request in requests]
    numbers[1, n:end] = start
    numbers[0, :n] = [request.tokens[request.n_computed] for request in requests]
    numbers[2] = _slots(tables, numbers[3], numbers[1], block_tokens)
    numbers[4] = numbers[1] + 1
    _draws_into(numbers[5:], requests)
    return numbers


def decode_step(
    numbers: torch.Tensor, tables: torch.Tensor, n_splits: int
) -> tuple[PagedStep, Draws]:
    """The same on the device."""
    tokens, positions, slots, rows, contexts, temperatures, low, high = numbers.unbind(0)
    step = PagedStep(
        tokens, positions, slots, tables, len(tokens), rows, contexts, n_splits=n_splits
    )
    return step, Draws.of(temperatures, low, high)


class Mixed(NamedTuple):
    """A step of any rows: what is to be put into an arena, and the rows whose tokens are wanted in
    the order of their logits."""

    flat: Ints  # [3, T]: token, position, slot
    reads: Ints  # [2, D]: table row, context
    tiles: Ints  # [N, 4]
    last: Ints  # [S]
    draws: Ints  # [3, S]
    wanted: list[int]

    def size(self, aligned: int) -> int:
        """Numbers of the arena that it takes at most."""
        parts = (self.flat, self.reads, self.tiles, self.last, self.draws)
        return sum(part.size for part in parts) + 10 * aligned

    def put(self, arena: Arena, tables: torch.Tensor, n_splits: int) -> tuple[PagedStep, Draws]:
        # Row by row, so that each begins at an aligned address whatever the sizes: a kernel is
        # compiled anew for addresses that are not.
        tokens, positions, slots = (arena.put(row) for row in self.flat)
        rows, contexts = (arena.put(row) for row in self.reads)
        tiles, last = arena.put(self.tiles), arena.put(self.last)
        temperatures, low, high = (arena.put(row) for row in self.draws)
        arena.send()
        step = PagedStep(
            tokens,
            positions,
            slots,
            tables,
            len(rows),
            rows,
            contexts,
            Tiles(tiles),
            last.long(),
            n_splits,
        )
        return step, Draws.of(temperatures, low, high)


def mixed(
    rows: Sequence[Row], n_fillers: int, tables: BlockTables, block_tokens: int, group: int
) -> Mixed:
    """`rows`, of which the last `n_fillers` are padding: it writes to the scratch block and reads
    any others."""
    at_table = tables.rows([row.request for row in rows[: len(rows) - n_fillers]])
    at_table += tables.filler_rows(n_fillers).tolist()
    order = sorted(range(len(rows)), key=lambda i: rows[i].n_tokens > 1)
    tokens: list[int] = []
    positions: list[Ints] = []
    table_rows: list[Ints] = []
    reads: list[tuple[int, int]] = []
    pieces: list[Piece] = []
    last: list[int] = []
    wanted: list[int] = []
    for i in order:
        request, start, n, samples = rows[i]
        if n == 1:
            reads.append((at_table[i], start + 1))
        else:
            pieces.append(Piece(at_table[i], len(tokens) - len(reads), n, start))
        tokens += request.tokens[start : start + n]
        positions.append(np.arange(start, start + n, dtype=np.int32))
        table_rows.append(np.full(n, at_table[i], np.int32))
        if samples:
            last.append(len(tokens) - 1)
            wanted.append(i)
    flat = np.empty((3, len(tokens)), np.int32)
    flat[0], flat[1] = tokens, np.concatenate(positions)
    flat[2] = _slots(tables, np.concatenate(table_rows), flat[1], block_tokens)
    draws = np.zeros((3, len(wanted)), np.int32)
    _draws_into(draws, [rows[i].request for i in wanted])
    return Mixed(
        flat,
        np.ascontiguousarray(np.array(reads, np.int32).reshape(-1, 2).T),
        cut(pieces, group),
        np.array(last, np.int32),
        draws,
        wanted,
    )


def _slots(tables: BlockTables, rows: Ints, positions: Ints, block_tokens: int) -> Ints:
    blocks = tables.array[rows, positions // block_tokens]
    blocks[rows >= tables.scratch_row] = tables.scratch  # for nobody, whatever is read
    slots: Ints = blocks * block_tokens + positions % block_tokens
    return slots


def _draws_into(draws: Ints, requests: Sequence[Request]) -> None:
    """Temperature bits and keys, [3, ≥ n]; zeros are greedy."""
    for i, request in enumerate(requests):
        if request.sampling.temperature > 0:
            bits = key(request.sampling.seed, request.n_output)
            draws[0, i] = np.float32(request.sampling.temperature).view(np.int32)
            draws[1:, i] = np.array([bits], np.uint64).view(np.int32)
