"""The inputs of a step for the paged model: index arrays made with numpy and sent as a single copy.

A step of decodes alone, in a bucket of b rows:
    [8, b] = token, position, slot, table row, context, temperature (bits), key low, key high
    then the work of the contexts, `tiles.work_size` numbers
Any other step, through an arena:
    [3, T] = token, position, slot of each token: decodes first, then pieces of prompts
    [2, D] = table row, context of each decode; tiles of the prompts; [S, …] of each sampled token
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
from reference_engine.executors.torch_memory import Arena, FixedNumbers, aligned
from reference_engine.executors.torch_sampling import Draws, SamplingTable
from reference_engine.kernels.tiles import (
    TILE_ROWS,
    DecodeWork,
    KeptWork,
    PromptPiece,
    Tiles,
    cut_tiles,
    work_size,
    write_work,
)
from reference_engine.model.filler import filler_pieces, filler_start
from reference_engine.model.paged import PagedStep
from reference_engine.state.batch import Row, StepBatch
from reference_engine.state.sequence import Request

Ints = NDArray[np.int32]
DECODE_FIELDS = 8
_STRIDE = 16


@dataclass(frozen=True, slots=True)
class RequestRows:
    """State of running requests that is kept from step to step, in a row for each request."""

    tables: BlockTables
    sampling: SamplingTable
    block_tokens: int

    @classmethod
    def of(cls, n_rows: int, max_model_len: int, block_tokens: int, scratch: int) -> RequestRows:
        """Empty rows; `scratch` is the block that padding writes to."""
        sampling = SamplingTable(n_rows)
        # Triton compiles a kernel again for strides that are no multiples of 16.
        width = -(-max_model_len // (block_tokens * _STRIDE)) * _STRIDE
        return cls(BlockTables(n_rows, width, scratch, sampling.assign), sampling, block_tokens)

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """The slot of each position [n] of the request in each row."""
        size = self.block_tokens
        slots: Ints = self.tables.blocks(rows, positions // size) * size + positions % size
        return slots


class DecodeInputs(NamedTuple):
    """The inputs of a step of up to `bucket` decodes, at fixed addresses."""

    fixed: FixedNumbers
    fields: Ints  # [8, bucket], of `fixed`
    work: Ints  # of the contexts, behind them
    n_programs: int

    @classmethod
    def size(cls, bucket: int, n_programs: int) -> int:
        """Numbers of an arena that they occupy."""
        return aligned(DECODE_FIELDS * bucket) + aligned(work_size(bucket, n_programs))

    @classmethod
    def in_arena(cls, arena: Arena, bucket: int, n_programs: int, side: int) -> DecodeInputs:
        n_fields = DECODE_FIELDS * bucket
        fixed = arena.fixed((cls.size(bucket, n_programs),), side)
        fields = fixed.numbers[:n_fields].reshape(DECODE_FIELDS, bucket)
        return cls(fixed, fields, fixed.numbers[aligned(n_fields) :], n_programs)

    def write(
        self,
        requests: Sequence[Request],
        n_fillers: int,
        start: int,
        state: RequestRows,
        kept: KeptWork,
    ) -> list[int]:
        """Write a step as `write_decodes` does, and its work. Returns the indices of the special
        requests."""
        special = write_decodes(self.fields, requests, n_fillers, start, state)
        kept.write(self.fields[4], self.n_programs, self.work)
        return special

    @property
    def on_device(self) -> torch.Tensor:
        """[8, bucket]."""
        return self.fixed.on_device[: self.fields.size].view(self.fields.shape)

    def step(self, tables: torch.Tensor) -> tuple[PagedStep, Draws]:
        """The step and the draws on the device."""
        tokens, positions, slots, rows, contexts, temperatures, low, high = self.on_device.unbind(0)
        bucket, begin = len(tokens), aligned(self.fields.size)
        end = begin + work_size(bucket, self.n_programs)
        work = DecodeWork.of(self.fixed.on_device[begin:end], bucket, self.n_programs)
        step = PagedStep(tokens, positions, slots, tables, bucket, rows, contexts, work=work)
        return step, Draws.of(temperatures, low, high)


def write_decodes(
    numbers: Ints, requests: Sequence[Request], n_fillers: int, start: int, state: RequestRows
) -> list[int]:
    """Write the inputs of a step of decodes to `numbers` [8, bucket].

    There is a token of each request, then `n_fillers` rows of padding at position `start`, which
    read as much KV as a request there. The rest of the bucket reads and writes the scratch block.
    Returns the indices of the special requests.
    """
    rows = state.tables.rows(requests)
    _write_positions(numbers, requests, rows, n_fillers, start, state)
    n, sampling = len(requests), state.sampling
    n_outputs = sampling.n_outputs(rows, numbers[1, :n])
    sampling.write_draws(rows, n_outputs, numbers[5:, :n])
    numbers[5:, n:] = 0
    return sampling.special(rows, n_outputs)


def _write_positions(
    numbers: Ints,
    requests: Sequence[Request],
    rows: Ints,
    n_fillers: int,
    start: int,
    state: RequestRows,
) -> None:
    """Write the first five rows of `numbers`; `rows` are those of `requests`."""
    n, tables = len(requests), state.tables
    end = n + n_fillers
    tokens, positions, slots, table_rows, contexts = numbers[:5]
    computed = [request.n_computed for request in requests]
    last_tokens = [request.tokens[at] for request, at in zip(requests, computed, strict=True)]
    tokens[:n], tokens[n:] = np.fromiter(last_tokens, np.int32, n), 0
    positions[:n], positions[n:end], positions[end:] = np.fromiter(computed, np.int32, n), start, 0
    table_rows[:n], table_rows[end:] = rows, tables.scratch_row
    if n_fillers:
        table_rows[n:end] = tables.filler_rows(n_fillers)
    slots[:] = state.slots(table_rows, positions)
    np.add(positions, 1, out=contexts)


class MixedInputs(NamedTuple):
    """The inputs of a step of any rows. `places[i]` is the row of the logits for sampled request i
    of the batch, `requests[i]` that request; `special` are the indices of special requests."""

    flat: Ints  # [3, T]: token, position, slot
    reads: Ints  # [2, D]: table row, context
    work: Ints  # of the D contexts
    tiles: Ints  # [N, 4]
    last: Ints  # [S]: positions whose logits are computed
    draws: Ints  # [3, S]
    sampled_rows: Ints  # [S]: table rows
    places: list[int]
    requests: list[Request]
    special: list[int]

    @property
    def size(self) -> int:
        """Numbers of an arena that they occupy at most."""
        parts = (self.flat, self.reads, self.work, self.tiles, self.last, self.draws)
        return sum(part.size for part in (*parts, self.sampled_rows)) + 12 * aligned(1)

    @property
    def has_unknown(self) -> bool:
        """Whether a token is UNKNOWN, which only those of decoding positions may be."""
        is_unknown = self.flat[0] < 0
        assert not is_unknown[self.reads.shape[1] :].any(), "an unknown token in a prompt"
        return bool(is_unknown.any())

    def put(
        self, arena: Arena, tables: torch.Tensor, n_programs: int
    ) -> tuple[PagedStep, Draws, torch.Tensor]:
        """Send them to the device. Returns the step, its draws and the table rows of its sampled
        tokens, int32 [S]."""
        # Row by row, so that each begins at an aligned address whatever the sizes: for other
        # addresses Triton would compile the kernels again.
        tokens, positions, slots = (arena.put(row) for row in self.flat)
        rows, contexts = (arena.put(row) for row in self.reads)
        work = DecodeWork.of(arena.put(self.work), len(rows), n_programs)
        tiles, last = arena.put(self.tiles), arena.put(self.last)
        temperatures, low, high = (arena.put(row) for row in self.draws)
        sampled_rows = arena.put(self.sampled_rows)
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
            work,
        )
        return step, Draws.of(temperatures, low, high), sampled_rows


class _Part(NamedTuple):
    """A row of the step other than the batch's decodes; `answer` is its index among the batch's
    sampled rows, -1 if it is not sampled."""

    table_row: int
    start: int
    tokens: list[int]
    answer: int = -1


def mixed_inputs(
    batch: StepBatch,
    state: RequestRows,
    group: int,
    max_model_len: int,
    n_programs: int,
    tile_rows: int = TILE_ROWS,
) -> MixedInputs:
    """The inputs of `batch`, in this order: decodes, decodes of padding, rows of a single token,
    pieces of prompts; prompts of padding are among the last two. `group` is the number of query
    heads per KV head, `n_programs` the number of decoding programs per KV head, `tile_rows` the
    query rows of a tile."""
    decodes, n, padding = batch.decodes, len(batch.decodes), batch.padding
    table_rows = state.tables.rows([*decodes, *(row.request for row in batch.rows)])
    decoding = np.empty((5, n + padding.decode_rows), np.int32)
    start = filler_start(padding, max_model_len)
    _write_positions(decoding, decodes, table_rows[:n], padding.decode_rows, start, state)
    parts = _parts(batch.rows, table_rows[n:].tolist())
    sizes = filler_pieces(padding, max_model_len)
    for row, size in zip(state.tables.filler_rows(len(sizes)).tolist(), sizes, strict=True):
        parts.append(_Part(row, 0, [0] * size))
    parts.sort(key=lambda part: len(part.tokens) > 1)
    # Rows of a single token are computed as decodes.
    n_decoding = decoding.shape[1] + sum(len(part.tokens) == 1 for part in parts)
    numbers = np.concatenate((decoding, _columns(parts, state)), axis=1)  # [5, T]
    ends = (decoding.shape[1] + np.cumsum([len(part.tokens) for part in parts], dtype=int)).tolist()
    pieces = [
        PromptPiece(
            part.table_row, end - len(part.tokens) - n_decoding, len(part.tokens), part.start
        )
        for part, end in zip(parts, ends, strict=True)
        if len(part.tokens) > 1
    ]
    answering = [(part.answer, end - 1) for part, end in zip(parts, ends, strict=True)]
    answering = [(answer, at) for answer, at in answering if answer >= 0]
    last = np.array([*range(n), *(at for _, at in answering)], np.int32)
    # The batch answers its rows first, then its decodes; the logits have the decodes first.
    places = [*range(n, len(last)), *range(n)]
    for place, (answer, _) in enumerate(answering, n):
        places[answer] = place
    sampling, sampled_rows = state.sampling, numbers[3, last]
    n_outputs = sampling.n_outputs(sampled_rows, numbers[1, last])
    draws = np.empty((3, len(last)), np.int32)
    sampling.write_draws(sampled_rows, n_outputs, draws)
    requests = [*(row.request for row in batch.rows if row.samples), *decodes]
    special = sampling.special(sampled_rows[places], n_outputs[places])
    reads, tiles = numbers[3:, :n_decoding], cut_tiles(pieces, group, tile_rows)
    work = np.zeros(work_size(n_decoding, n_programs), np.int32)
    write_work(reads[1], n_programs, work)
    return MixedInputs(
        numbers[:3], reads, work, tiles, last, draws, sampled_rows, places, requests, special
    )


def _parts(rows: Sequence[Row], table_rows: Sequence[int]) -> list[_Part]:
    answers = count()
    return [
        _Part(table_row, start, request.tokens[start : start + n], next(answers) if samples else -1)
        for table_row, (request, start, n, samples) in zip(table_rows, rows, strict=True)
    ]


def _columns(parts: Sequence[_Part], state: RequestRows) -> Ints:
    """[5, T]: token, position, slot, table row, context of each token of `parts`."""
    lengths = np.array([len(part.tokens) for part in parts], int)
    numbers = np.empty((5, lengths.sum()), np.int32)
    tokens, positions, slots, table_rows, contexts = numbers
    tokens[:] = np.fromiter(chain.from_iterable(part.tokens for part in parts), np.int32)
    firsts = np.cumsum(lengths) - lengths
    starts = np.array([part.start for part in parts], int)
    positions[:] = np.arange(len(tokens)) + np.repeat(starts - firsts, lengths)
    table_rows[:] = np.repeat(np.array([part.table_row for part in parts], int), lengths)
    slots[:] = state.slots(table_rows, positions)
    np.add(positions, 1, out=contexts)
    return numbers
