"""BurstGPT: ChatGPT and GPT-4 traffic of a campus, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Collection

from loadgen.workload.traces.text_columns import read_csv
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

_TIME, _MODEL, _IN, _OUT = "Timestamp", "Model", "Request tokens", "Response tokens"
_SESSION = "Session ID"


class BurstGPT(TraceFormat):
    """BurstGPT: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens,
    Log Type; version 2 adds Session ID and Elapsed time.

    Each Model is a class. Failed requests have no response tokens; they are left out and counted.

    Source: Y. Wang et al., BurstGPT (arXiv 2401.17644).
    """

    kind = "burstgpt"

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return {_TIME, _MODEL, _IN, _OUT} <= set(fields)

    def parse(self, content: bytes, source: str) -> Trace:
        table = read_csv(content, source, (_TIME, _MODEL, _IN, _OUT))
        columns = TraceColumns(
            ticks=table.ticks(_TIME),
            input_tokens=table.whole_numbers(_IN),
            output_tokens=table.whole_numbers(_OUT),
            session_ids=table.sessions(_SESSION) if table.has(_SESSION) else None,
            classes=table.words(_MODEL),
            slo_s=table.limits(),
        )
        return build_trace(source, self.kind, columns)
