"""Trace formats with block hashes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.workload.traces.blocks import share_blocks
from loadgen.workload.traces.json_lines import (
    LimitColumns,
    WithLimits,
    line_of_record,
    read_records,
    tick_column,
    token_column,
)
from loadgen.workload.traces.text_columns import NS_PER_UNIT
from loadgen.workload.traces.trace import Ids, Ticks, Trace, TraceColumns, TraceFormat, build_trace

_64_BITS = 2**64 - 1


class BlockLists:
    """Collects the hash lists of a file, batch by batch, as one flat array."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int64]] = []
        self._n_ids: list[NDArray[np.int64]] = []

    def add(self, lists: Sequence[Sequence[int]]) -> None:
        """Take the lists of one batch of records."""
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        n = int(counts.sum())
        try:
            ids = np.fromiter(chain.from_iterable(lists), np.int64, n)
        except OverflowError:  # hashes of 64 bits without a sign: the same bits with one
            bits = (i & _64_BITS for i in chain.from_iterable(lists))
            ids = np.fromiter(bits, np.uint64, n).view(np.int64)
        self._n_ids.append(counts)
        self._ids.append(ids)

    def prefixes(
        self, block_tokens: int, ticks: Ticks, input_tokens: NDArray[np.int64]
    ) -> tuple[tuple[Ids, NDArray[np.uint32]] | None, list[str]]:
        """((prefix ids, prefix tokens) or None, notes) of all rows collected.

        A prefix never takes a prompt's last token: something of its own must be left to compute.
        """
        n_ids = np.concatenate([np.empty(0, np.int64), *self._n_ids])
        if not n_ids.any():
            return None, ["no hash_ids: no shared prefixes"]
        ids = np.concatenate(self._ids)
        sharing = share_blocks(ids, n_ids, np.argsort(ticks, kind="stable"))
        tokens = np.clip(sharing.blocks * block_tokens, 0, np.maximum(input_tokens - 1, 0))
        note = (
            f"shared prefixes: an unlimited cache would hit {sharing.share_in_trace:.1%} of the"
            f" trace's blocks, and hits {sharing.share_kept:.1%} of them as replayed (one prefix"
            " per request)"
        )
        return (sharing.prefix_ids, tokens.astype(np.uint32)), [note]


class SessionNumbers:
    """Session names to 1, 2, … in order of first use; 0 for no name."""

    def __init__(self) -> None:
        self._numbers: dict[str | int | None, int] = {None: 0}
        self._ids: list[Ids] = [np.empty(0, np.uint32)]

    def add(self, names: Sequence[str | int | None]) -> None:
        """Take the names of one batch of records."""
        known = self._numbers
        ids = [known.setdefault(name, len(known)) for name in names]
        self._ids.append(np.array(ids, np.uint32))

    def ids(self) -> Ids:
        """The numbers of all rows collected."""
        return np.concatenate(self._ids)


class _MooncakeRecord(WithLimits, gc=False):
    timestamp: float | int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session_id: str | int | None = None


class Mooncake(TraceFormat):
    """Mooncake traces: JSON lines with timestamp (milliseconds from the start), input_length,
    output_length, hash_ids (one per block of 512 tokens, the last one partial).

    Prompts that begin with the same hash_ids share that many blocks: they become shared prefixes
    (the notes say how much of the sharing one prefix per request keeps). `session_id` is read where
    it is given; texts and tools are not.

    Source: R. Qin et al., Mooncake (FAST 2025), and the trace's own README.
    """

    kind = "mooncake"
    block_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 512

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        is_bailian = "chat_id" in fields
        return {"timestamp", "input_length", "output_length"} <= set(fields) and not is_bailian

    def parse(self, content: bytes, source: str) -> Trace:
        blocks, numbers, sessions = BlockLists(), [np.empty((0, 3))], SessionNumbers()
        promises = LimitColumns(content, source)
        for batch in read_records(content, source, _MooncakeRecord):
            blocks.add([r.hash_ids for r in batch])
            sessions.add([r.session_id for r in batch])
            promises.add(batch)
            rows = [(r.timestamp, r.input_length, r.output_length) for r in batch]
            numbers.append(np.array(rows, np.float64))
        times, inputs, outputs = np.concatenate(numbers).T
        ticks = tick_column(content, source, times, NS_PER_UNIT["ms"])
        input_tokens = token_column(content, source, "input_length", inputs)
        prefix, notes = blocks.prefixes(self.block_tokens, ticks, input_tokens)
        columns = TraceColumns(
            ticks=ticks,
            input_tokens=input_tokens,
            output_tokens=token_column(content, source, "output_length", outputs),
            prefix=prefix,
            session_ids=sessions.ids(),
            slo_s=promises.columns(),
            notes=notes,
        )
        return build_trace(source, self.kind, columns)


class _BailianRecord(WithLimits, gc=False):
    chat_id: int | str
    timestamp: float | int
    input_length: int
    output_length: int
    parent_chat_id: int | str | None = None
    type: str = "default"
    hash_ids: tuple[int, ...] = ()


class Bailian(TraceFormat):
    """Alibaba Bailian (Qwen) traces: JSON lines with chat_id, parent_chat_id, timestamp (seconds),
    input_length, output_length, type, turn, hash_ids (one per block of 16 tokens).

    `type` is the class; parent_chat_id (−1: none) links the turns of a conversation, which share a
    session. hash_ids become shared prefixes as for `mooncake`.
    """

    kind = "bailian"
    block_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 16

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return {"chat_id", "parent_chat_id", "timestamp", "input_length"} <= set(fields)

    def parse(self, content: bytes, source: str) -> Trace:
        records, blocks = list[_BailianRecord](), BlockLists()
        promises = LimitColumns(content, source)
        for batch in read_records(content, source, _BailianRecord):
            blocks.add([record.hash_ids for record in batch])
            for record in batch:
                record.hash_ids = ()  # the flat array has them; the lists are most of the memory
            promises.add(batch)
            records += batch
        rows = [(r.timestamp, r.input_length, r.output_length) for r in records]
        times, asked, answered = np.array(rows, np.float64).reshape(-1, 3).T
        ticks = tick_column(content, source, times, NS_PER_UNIT["s"])
        inputs = token_column(content, source, "input_length", asked)
        prefix, notes = blocks.prefixes(self.block_tokens, ticks, inputs)
        parents, n_lost = _parents(content, source, records)
        if n_lost:
            notes.append(f"{n_lost} rows answer a chat_id that is not in the file; taken as first")
        types: dict[str, int] = {}
        type_ids = [types.setdefault(record.type, len(types)) for record in records]
        columns = TraceColumns(
            ticks=ticks,
            input_tokens=inputs,
            output_tokens=token_column(content, source, "output_length", answered),
            prefix=prefix,
            session_ids=_sessions(parents),
            parents=parents,
            classes=(np.array(type_ids, np.int64), tuple(types)),
            slo_s=promises.columns(),
            notes=notes,
        )
        return build_trace(source, self.kind, columns)


def _parents(
    content: bytes, source: str, records: Sequence[_BailianRecord]
) -> tuple[NDArray[np.int64], int]:
    """(the row each row answers or −1, how many answer a row that is not there)."""
    row_of: dict[int | str, int] = {}
    for row, record in enumerate(records):
        if record.chat_id in row_of:
            raise TraceFileError(
                f"{source}:{line_of_record(content, row)}: chat_id: {record.chat_id!r} is there"
                f" twice, first on line {line_of_record(content, row_of[record.chat_id])}"
            )
        row_of[record.chat_id] = row
    asked = [r.parent_chat_id for r in records]
    is_none = [parent in (None, -1, "-1", "") for parent in asked]
    parents = np.array(
        [-1 if parent is None else row_of.get(parent, -1) for parent in asked], np.int64
    )
    parents[is_none] = -1
    return parents, int(np.count_nonzero((parents < 0) & ~np.array(is_none, np.bool_)))


def _sessions(parents: NDArray[np.int64]) -> Ids:
    """Conversations numbered from 1 by their first row: pointers are followed to the root, twice as
    far in each round. Rows of a loop (a broken file) end up wherever the rounds stop."""
    root = np.where(parents < 0, np.arange(parents.size), parents)
    for _ in range(int(parents.size).bit_length() + 1):
        root = root[root]
    _, number = np.unique(root, return_inverse=True)
    return (number + 1).astype(np.uint32)
