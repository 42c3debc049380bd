"""Any flat CSV or JSON-lines file, told by the names of its columns."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from loadgen.workload.traces.json_lines import read_json_table
from loadgen.workload.traces.table import first_line, read_csv
from loadgen.workload.traces.trace import Columns, Trace, TraceFormat, build_trace

ColumnName = Annotated[str, Field(min_length=1)]


class Named(TraceFormat):
    """A CSV file with a header, or flat JSON lines, whose columns are named here.

    `time` may hold numbers (of `unit`) or dates with times (ISO 8601); `session` and `class` name
    optional columns. Which of the two a file is shows in its first character.
    """

    kind = "columns"
    time: ColumnName
    input_tokens: ColumnName
    output_tokens: ColumnName
    session: ColumnName | None = None
    class_column: Annotated[ColumnName | None, Field(alias="class")] = None
    unit: Literal["s", "ms", "us", "ns"] = "s"
    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","

    def parse(self, content: bytes, source: str) -> Trace:
        names = (self.time, self.input_tokens, self.output_tokens, self.session, self.class_column)
        wanted = list(dict.fromkeys(name for name in names if name is not None))
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
        columns = Columns(
            ticks=table.ticks(self.time, self.unit)
            if table.is_numeric(self.time)
            else table.instants(self.time),
            input_tokens=table.whole_numbers(self.input_tokens),
            output_tokens=table.whole_numbers(self.output_tokens),
            session_ids=sessions,
            classes=None if self.class_column is None else table.words(self.class_column),
        )
        return build_trace(source, self.kind, columns)
