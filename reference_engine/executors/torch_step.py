"""A batch as the paged model takes it: index tensors made with numpy, in one host array.

decodes in a bucket of b rows:  [8, b] = token, position, slot, table row, context,
                                temperature (bits), key low, key high
anything else:                  [3, T] + [2, D] + [S, …] by the same arena, rows in the order
                                decodes first, then pieces of prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reference_engine.executors.block_tables import BlockTables
from reference_engine.executors.torch_memory import Arena
from reference_engine.executors.torch_sampling import Draws, SamplingTable
from reference_engine.kernels.tiles import PromptPiece, Tiles, cut_tiles
from reference_engine.model.filler import filler_pieces, filler_start
from reference_engine.model.paged import PagedStep
from reference_engine.state.batch import Row, StepBatch
from reference_engine.state.sequence import Request

Ints = NDArray[np.int32]
DECODE_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Seats:
    """What is kept of running requests from step to step, each in a row of its own."""

    tables: BlockTables
    sampling: SamplingTable
    block_tokens: int

    @classmethod
    def of(cls, n_rows: int, max_model_len: int, block_tokens: int, scratch: int) -> Seats:
        """`scratch` is the block where padding is written."""
        sampling = SamplingTable(n_rows)
        width = -(-max_model_len // block_tokens)
        return cls(BlockTables(n_rows, width, scratch, sampling.seat), sampling, block_tokens)


def decode_numbers(
    numbers: Ints, requests: Sequence[Request], n_fillers: int, start: int, seats: Seats
) -> list[int]:
    """Write to `numbers` [8, bucket]: one token of each request, then of `n_fillers` for nobody at
    position `start`, which read as much as any; the rest of the bucket reads and writes the scratch
    block. Returns which requests ask for more than a temperature."""
    rows = seats.tables.rows(requests)
    _reads(numbers, requests, rows, n_fillers, start, seats)
    n, sampling = len(requests), seats.sampling
    n_outputs = sampling.n_outputs(rows, numbers[1, :n])
    sampling.draws(rows, n_outputs, numbers[5:, :n])
    numbers[5:, n:] = 0
    return sampling.asking(rows, n_outputs)


def _reads(
    numbers: Ints, requests: Sequence[Request], rows: Ints, n_fillers: int, start: int, seats: Seats
) -> None:
    """The first five of their numbers; `rows` of `requests` are known."""
    n, tables = len(requests), seats.tables
    end = n + n_fillers
    tokens, positions, slots, at_table, contexts = numbers[:5]
    computed = [request.n_computed for request in requests]
    known = [request.tokens[at] for request, at in zip(requests, computed, strict=True)]
    tokens[:n], tokens[n:] = np.fromiter(known, np.int32, n), 0
    positions[:n], positions[n:end], positions[end:] = np.fromiter(computed, np.int32, n), start, 0
    at_table[:n], at_table[end:] = rows, tables.scratch_row
    if n_fillers:
        at_table[n:end] = tables.filler_rows(n_fillers)
    slots[:] = _slots(seats, at_table, positions)
    np.add(positions, 1, out=contexts)


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
    """A step of any rows: what is to be put into an arena; for each token to be answered in which
    row of the logits it is and who wants it; and which of those ask for more than a temperature.
    """

    flat: Ints  # [3, T]: token, position, slot
    reads: Ints  # [2, D]: table row, context
    tiles: Ints  # [N, 4]
    last: Ints  # [S]
    draws: Ints  # [3, S]
    places: list[int]
    requests: list[Request]
    asking: list[int]

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


class _Part(NamedTuple):
    """A row beside the decodes; `answer` is which of the rows' answers it brings, -1 for none."""

    at_table: int
    start: int
    tokens: list[int]
    answer: int = -1


def mixed(batch: StepBatch, seats: Seats, group: int, max_model_len: int) -> Mixed:
    """In the order: decodes, those for nobody, rows of one token, pieces of prompts, and with
    these two what is computed for nobody."""
    decodes, n, padding = batch.decodes, len(batch.decodes), batch.padding
    at_table = seats.tables.rows([*decodes, *(row.request for row in batch.rows)])
    alone = np.empty((5, n + padding.decode_rows), np.int32)
    start = filler_start(padding, max_model_len)
    _reads(alone, decodes, at_table[:n], padding.decode_rows, start, seats)
    parts = _parts(batch.rows, at_table[n:].tolist())
    sizes = filler_pieces(padding, max_model_len)
    for row, size in zip(seats.tables.filler_rows(len(sizes)).tolist(), sizes, strict=True):
        parts.append(_Part(row, 0, [0] * size))
    parts.sort(key=lambda part: len(part.tokens) > 1)
    n_alone = alone.shape[1] + sum(len(part.tokens) == 1 for part in parts)
    numbers = np.concatenate((alone, _columns(parts, seats)), axis=1)
    ends = (alone.shape[1] + np.cumsum([len(part.tokens) for part in parts], dtype=int)).tolist()
    pieces = [
        PromptPiece(part.at_table, end - len(part.tokens) - n_alone, len(part.tokens), part.start)
        for part, end in zip(parts, ends, strict=True)
        if len(part.tokens) > 1
    ]
    answering = [(part.answer, end - 1) for part, end in zip(parts, ends, strict=True)]
    answering = [(answer, at) for answer, at in answering if answer >= 0]
    last = np.array([*range(n), *(at for _, at in answering)], np.int32)
    # Answered are rows in their order, then decodes.
    places = [*range(n, len(last)), *range(n)]
    for place, (answer, _) in enumerate(answering, n):
        places[answer] = place
    sampling, seated = seats.sampling, numbers[3, last]
    n_outputs = sampling.n_outputs(seated, numbers[1, last])
    draws = np.empty((3, len(last)), np.int32)
    sampling.draws(seated, n_outputs, draws)
    requests = [*(row.request for row in batch.rows if row.samples), *decodes]
    asking = sampling.asking(seated[places], n_outputs[places])
    reads = numbers[3:, :n_alone]
    return Mixed(
        numbers[:3], reads, cut_tiles(pieces, group), last, draws, places, requests, asking
    )


def _parts(rows: Sequence[Row], at_table: Sequence[int]) -> list[_Part]:
    answers = count()
    return [
        _Part(at, start, request.tokens[start : start + n], next(answers) if samples else -1)
        for at, (request, start, n, samples) in zip(at_table, rows, strict=True)
    ]


def _columns(parts: Sequence[_Part], seats: Seats) -> Ints:
    """[5, T]: token, position, slot, table row, context of each token of `parts`."""
    lengths = np.array([len(part.tokens) for part in parts], int)
    numbers = np.empty((5, lengths.sum()), np.int32)
    tokens, positions, slots, at_table, contexts = numbers
    tokens[:] = np.fromiter(chain.from_iterable(part.tokens for part in parts), np.int32)
    firsts = np.cumsum(lengths) - lengths
    starts = np.array([part.start for part in parts], int)
    positions[:] = np.arange(len(tokens)) + np.repeat(starts - firsts, lengths)
    at_table[:] = np.repeat(np.array([part.at_table for part in parts], int), lengths)
    slots[:] = _slots(seats, at_table, positions)
    np.add(positions, 1, out=contexts)
    return numbers


def _slots(seats: Seats, rows: Ints, positions: Ints) -> Ints:
    size = seats.block_tokens
    slots: Ints = seats.tables.blocks(rows, positions // size) * size + positions % size
    return slots
