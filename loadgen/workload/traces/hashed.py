"""Trace formats whose rows carry block hashes: Mooncake and Alibaba Bailian."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.records import FIRST_PIECE, PIECES, Pieces
from loadgen.workload.traces.blocks import Sharing, share_blocks
from loadgen.workload.traces.json_lines import (
    LimitColumns,
    WithLimits,
    line_of_record,
    read_records,
    tick_column,
    token_column,
)
from loadgen.workload.traces.trace import Ids, Trace, TraceColumns, TraceFormat, build_trace

_64_BITS = 2**64 - 1
BlockTokens = Annotated[int, Field(ge=1, le=1_000_000)]


class _HashedRecord(WithLimits, gc=False):
    timestamp: float | int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeRecord(_HashedRecord, gc=False):
    session_id: str | int | None = None


class _BailianRecord(_HashedRecord, gc=False, kw_only=True):
    chat_id: int | str
    parent_chat_id: int | str | None = None
    type: str = "default"


class Mooncake(TraceFormat):
    """Mooncake traces: JSON lines with timestamp (milliseconds from the start), input_length,
    output_length, hash_ids (an id per block of 512 tokens, the last block partial).

    Prompts that begin with the same hash_ids share that many blocks, and their texts are equal as
    far. `session_id` is optional; texts and tools are ignored.

    Source: R. Qin et al., Mooncake (FAST 2025), and the trace's own README.
    """

    kind = "mooncake"
    block_tokens: BlockTokens = 512

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        is_bailian = "chat_id" in fields
        return {"timestamp", "input_length", "output_length"} <= set(fields) and not is_bailian

    def parse(self, content: bytes, source: str) -> Trace:
        rows = _HashedRows(content, source)
        numbers: dict[str | int | None, int] = {None: 0}
        session_ids = [np.empty(0, np.uint32)]
        for batch in read_records(content, source, _MooncakeRecord):
            rows.add(batch)
            ids = [numbers.setdefault(record.session_id, len(numbers)) for record in batch]
            session_ids.append(np.array(ids, np.uint32))
        columns = rows.columns("ms", self.block_tokens)
        return build_trace(
            source, self.kind, replace(columns, session_ids=np.concatenate(session_ids))
        )


class Bailian(TraceFormat):
    """Alibaba Bailian (Qwen) traces: JSON lines with chat_id, parent_chat_id, timestamp (seconds),
    input_length, output_length, type, turn, hash_ids (an id per block of 16 tokens).

    `type` is the class; parent_chat_id (−1: none) links the turns of a conversation, which share a
    session. hash_ids are used as for `mooncake`.
    """

    kind = "bailian"
    block_tokens: BlockTokens = 16

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return {"chat_id", "parent_chat_id", "timestamp", "input_length"} <= set(fields)

    def parse(self, content: bytes, source: str) -> Trace:
        rows, records = _HashedRows(content, source), list[_BailianRecord]()
        for batch in read_records(content, source, _BailianRecord):
            rows.add(batch)
            for record in batch:
                record.hash_ids = ()  # copied by `add`; the lists are most of the memory
            records += batch
        columns = rows.columns("s", self.block_tokens)
        parents, n_lost = _parents(content, source, records)
        notes = list(columns.notes)
        if n_lost:
            notes.append(f"{n_lost} rows answer a chat_id that is not in the file; taken as first")
        types: dict[str, int] = {}
        type_ids = [types.setdefault(record.type, len(types)) for record in records]
        columns = replace(
            columns,
            session_ids=_sessions(parents),
            classes=(np.array(type_ids, np.int64), tuple(types)),
            notes=notes,
        )
        return build_trace(source, self.kind, columns)


class _HashedRows:
    """Collects the columns of a file's records as flat arrays, batch by batch."""

    def __init__(self, content: bytes, source: str) -> None:
        self._content, self._source = content, source
        self._limits = LimitColumns(content, source)
        self._numbers = [np.empty((0, 3))]
        self._ids: list[NDArray[np.int64]] = []
        self._n_ids = [np.empty(0, np.int64)]

    def add(self, batch: Sequence[_HashedRecord]) -> None:
        rows = [(r.timestamp, r.input_length, r.output_length) for r in batch]
        self._numbers.append(np.array(rows, np.float64))
        self._limits.add(batch)
        counts = np.fromiter((len(record.hash_ids) for record in batch), np.int64, len(batch))
        n, ids = int(counts.sum()), [record.hash_ids for record in batch]
        try:
            flat_ids = np.fromiter(chain.from_iterable(ids), np.int64, n)
        except OverflowError:  # unsigned hashes of 64 bits: reinterpret the bits as signed
            bits = (i & _64_BITS for i in chain.from_iterable(ids))
            flat_ids = np.fromiter(bits, np.uint64, n).view(np.int64)
        self._n_ids.append(counts)
        self._ids.append(flat_ids)

    def columns(self, time_unit: str, block_tokens: int) -> TraceColumns:
        times, inputs, outputs = np.concatenate(self._numbers).T
        where = self._content, self._source
        ticks = tick_column(*where, times, time_unit)
        input_tokens = token_column(*where, "input_length", inputs)
        n_ids = np.concatenate(self._n_ids)
        prefix, note = None, "no hash_ids: no shared prefixes"
        if n_ids.any():
            by_time = np.argsort(ticks, kind="stable")
            sharing = share_blocks(np.concatenate(self._ids), n_ids, by_time)
            prefix = shared_prefixes(sharing, input_tokens, block_tokens)
            share = sharing.hits.sum() / n_ids.sum()
            note = f"shared prefixes: an unlimited cache hits {share:.1%} of the trace's blocks"
        return TraceColumns(
            ticks=ticks,
            input_tokens=input_tokens,
            output_tokens=token_column(*where, "output_length", outputs),
            prefix=prefix,
            slo_s=self._limits.columns(),
            notes=[note],
        )


def shared_prefixes(
    sharing: Sharing, input_tokens: NDArray[np.int64], block_tokens: int
) -> tuple[Ids, NDArray[np.uint32], Pieces]:
    """(prefix_id, prefix_tokens) of each prompt, and the pieces. A prompt's last token is never
    part of a prefix, so that something is left to compute."""
    most = np.maximum(input_tokens - 1, 0)
    tokens = np.clip(sharing.blocks * block_tokens, 0, most).astype(np.uint32)
    ids = np.where(tokens > 0, _piece_ids(sharing.piece), 0).astype(np.uint32)
    pieces = np.empty(len(sharing.after), PIECES)
    pieces["after"] = _piece_ids(sharing.after)
    pieces["tokens"] = sharing.piece_blocks * block_tokens
    return ids, tokens, pieces


def _piece_ids(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(numbers < 0, 0, FIRST_PIECE + numbers)


def _parents(
    content: bytes, source: str, records: Sequence[_BailianRecord]
) -> tuple[NDArray[np.int64], int]:
    """(parent row of each row or −1, number of rows whose parent is not in the file)."""
    row_of: dict[int | str | None, int] = {}
    for row, record in enumerate(records):
        if record.chat_id in row_of:
            raise TraceFileError(
                f"{source}:{line_of_record(content, row)}: chat_id: {record.chat_id!r} occurs"
                f" twice, first on line {line_of_record(content, row_of[record.chat_id])}"
            )
        row_of[record.chat_id] = row
    has_parent = np.array([r.parent_chat_id not in (None, -1, "-1", "") for r in records], np.bool_)
    parents = np.array([row_of.get(r.parent_chat_id, -1) for r in records], np.int64)
    parents[~has_parent] = -1
    return parents, int(np.count_nonzero((parents < 0) & has_parent))


def _sessions(parents: NDArray[np.int64]) -> Ids:
    """Conversations numbered from 1 by their first row. Each round doubles the distance to which
    parents are followed; rows in a loop (a broken file) end anywhere in it."""
    root = np.where(parents < 0, np.arange(parents.size), parents)
    for _ in range(int(parents.size).bit_length() + 1):
        root = root[root]
    _, number = np.unique(root, return_inverse=True)
    return (number + 1).astype(np.uint32)
