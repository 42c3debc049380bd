"""Mooncake: the traces of the Kimi service, with block hashes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import numpy as np
from pydantic import Field

from loadgen.workload.traces.hashed import BlockLists, SessionNumbers
from loadgen.workload.traces.json_lines import (
    LimitColumns,
    WithLimits,
    read_records,
    tick_column,
    token_column,
)
from loadgen.workload.traces.text_columns import NS_PER_UNIT
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace


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
