"""Flat CSV or JSON-lines files of any origin, read by the names of their columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec
import pyarrow as pa
from pydantic import Field

from loadgen.records import OWN_SLO
from loadgen.workload.traces.json_lines import decode_line, line_of_record
from loadgen.workload.traces.text_columns import TextTable, first_line, read_csv, require
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

ColumnName = Annotated[str, Field(min_length=1)]


class Named(TraceFormat):
    """A CSV file with a header, or flat JSON lines; the keys name its columns.

    `time` holds numbers (of `unit`) or dates with times (ISO 8601). `session` and `class` are
    optional. `ttft_slo`, `tpot_slo` and `e2e_slo` hold the limits of each request in `slo_unit`; an
    empty cell or 0 is no limit. A file that begins with a brace is JSON lines.
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
        limits = self._limits()
        optional = (self.session, self.class_column, *limits.values())
        all_names = (self.time, self.input_tokens, self.output_tokens, *optional)
        names = list(dict.fromkeys(name for name in all_names if name is not None))
        table = (
            _read_json_table(content, source, names)
            if first_line(content)[0][:1] == b"{"
            else read_csv(content, source, names, self.separator)
        )
        columns = TraceColumns(
            ticks=table.ticks(self.time, self.unit)
            if table.is_numeric(self.time)
            else table.instants(self.time),
            input_tokens=table.whole_numbers(self.input_tokens),
            output_tokens=table.whole_numbers(self.output_tokens),
            session_ids=None if self.session is None else table.sessions(self.session),
            classes=None if self.class_column is None else table.words(self.class_column),
            slo_s={OWN_SLO[m]: table.seconds(n, self.slo_unit) for m, n in limits.items()},
        )
        return build_trace(source, self.kind, columns)

    def own_slo_metrics(self) -> tuple[str, ...]:
        return tuple(self._limits())

    def _limits(self) -> dict[str, str]:
        """Metric → name of the column with its limits."""
        columns = {"ttft_s": self.ttft_slo, "tpot_s": self.tpot_slo, "e2e_s": self.e2e_slo}
        return {metric: name for metric, name in columns.items() if name is not None}


def _read_json_table(content: bytes, source: str, names: Sequence[str]) -> TextTable:
    """The given keys of flat JSON lines as a table of text. Raises TraceFileError with the line for
    a missing key."""
    texts: dict[str, list[str]] = {name: [] for name in names}
    decoder: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(
        dict[str, msgspec.Raw]
    )
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        record = decode_line(decoder, line, source, number)
        try:
            for name in names:
                texts[name].append(_text(bytes(record[name])))
        except KeyError:
            require(source, record, names, number)
    columns = {name: [pa.array(values, pa.string())] for name, values in texts.items()}
    return TextTable(source, names, columns.__getitem__, partial(line_of_record, content))


def _text(raw: bytes) -> str:
    """A JSON scalar as the text of a CSV cell."""
    return str(json.loads(raw)) if raw[:1] == b'"' else "" if raw == b"null" else raw.decode()
