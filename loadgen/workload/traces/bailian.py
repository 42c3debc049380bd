"""Alibaba Bailian: Qwen service traces with block hashes and conversation links."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.workload.traces.hashed import BlockLists
from loadgen.workload.traces.json_lines import (
    LimitColumns,
    WithLimits,
    line_of_record,
    read_records,
    tick_column,
    token_column,
)
from loadgen.workload.traces.text_columns import NS_PER_UNIT
from loadgen.workload.traces.trace import Ids, Trace, TraceColumns, TraceFormat, build_trace


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
