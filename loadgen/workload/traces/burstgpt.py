"""BurstGPT: ChatGPT and GPT-4 traffic of a campus, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from loadgen.workload.traces.text_columns import csv_header, first_line, read_csv, read_limits
from loadgen.workload.traces.trace import (
    LIMIT_COLUMNS,
    Ids,
    Trace,
    TraceColumns,
    TraceFormat,
    build_trace,
)

_TIME, _MODEL, _IN, _OUT = "Timestamp", "Model", "Request tokens", "Response tokens"
_SESSION = "Session ID"


class BurstGPT(TraceFormat):
    """BurstGPT: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens,
    Log Type; version 2 adds Session ID and Elapsed time.

    Each Model is a class. Failed requests have no response tokens and are left out, counted.

    Source: Y. Wang et al., BurstGPT (arXiv 2401.17644).
    """

    kind = "burstgpt"

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return {_TIME, _MODEL, _IN, _OUT} <= set(fields)

    def parse(self, content: bytes, source: str) -> Trace:
        line = first_line(content)[0].decode("utf-8", "replace")
        header = csv_header(line)
        optional = [name for name in (_SESSION, *LIMIT_COLUMNS) if name in header]
        wanted = (_TIME, _MODEL, _IN, _OUT, *optional)
        table = read_csv(content, source, wanted)
        sessions: Ids | None = None
        if _SESSION in header:
            codes, names = table.words(_SESSION)
            is_named = np.array([name != "" for name in names])
            sessions = np.where(is_named[codes], codes + 1, 0).astype(np.uint32)
        columns = TraceColumns(
            ticks=table.ticks(_TIME),
            input_tokens=table.whole_numbers(_IN),
            output_tokens=table.whole_numbers(_OUT),
            session_ids=sessions,
            classes=table.words(_MODEL),
            slo_s=read_limits(table, header),
        )
        return build_trace(source, self.kind, columns)
