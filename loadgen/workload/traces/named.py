"""Any flat CSV or JSON-lines file, told by the names of its columns."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from loadgen.records import OWN_SLO
from loadgen.workload.traces.json_lines import read_json_table
from loadgen.workload.traces.text_columns import first_line, read_csv
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

ColumnName = Annotated[str, Field(min_length=1)]


class Named(TraceFormat):
    """A CSV file with a header, or flat JSON lines, whose columns are named here.

    `time` may hold numbers (of `unit`) or dates with times (ISO 8601); `session` and `class` name
    optional columns. `ttft_slo`, `tpot_slo` and `e2e_slo` name columns of what each request was
    promised, numbers of `slo_unit`; an empty cell or 0 is no promise of its own. Which of the two a
    file is shows in its first character.
    """

    kind = "columns"
    time: ColumnName
    input_tokens: ColumnName
    output_tokens: ColumnName
    session: ColumnName | None = None
    class_column: Annotated[ColumnName | None, Field(alias="class")] = None
    unit: Literal["s", "ms", "us", "ns"] = "s"
    ttft_slo: ColumnName | None = None
    tpot_slo: ColumnName | None = None
    e2e_slo: ColumnName | None = None
    slo_unit: Literal["s", "ms", "us"] = "ms"
    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","

    def parse(self, content: bytes, source: str) -> Trace:
        names = (self.time, self.input_tokens, self.output_tokens, self.session, self.class_column)
        limits = self._limits()
        wanted = list(dict.fromkeys(n for n in (*names, *limits.values()) if n is not None))
        table = (
            read_json_table(content, source, wanted)
            if first_line(content)[0][:1] == b"{"
            else read_csv(content, source, wanted, self.separator)
        )
        sessions = None
        if self.session is not None:
            codes, words = table.words(self.session)
            is_named = np.array([word != "" for word in words])
            sessions = np.where(is_named[codes], codes + 1, 0).astype(np.uint32)
        columns = TraceColumns(
            ticks=table.ticks(self.time, self.unit)
            if table.is_numeric(self.time)
            else table.instants(self.time),
            input_tokens=table.whole_numbers(self.input_tokens),
            output_tokens=table.whole_numbers(self.output_tokens),
            session_ids=sessions,
            classes=None if self.class_column is None else table.words(self.class_column),
            slo_s={OWN_SLO[m]: table.seconds(n, self.slo_unit) for m, n in limits.items()},
        )
        return build_trace(source, self.kind, columns)

    def promised(self) -> tuple[str, ...]:
        return tuple(self._limits())

    def _limits(self) -> dict[str, str]:
        """Metric → the column with each row's limit of it."""
        named = {"ttft_s": self.ttft_slo, "tpot_s": self.tpot_slo, "e2e_s": self.e2e_slo}
        return {metric: name for metric, name in named.items() if name is not None}
