"""Any flat CSV or JSON-lines file, told by the names of its columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from pydantic import Field

from loadgen.errors import TraceFileError
from loadgen.records import OWN_SLO
from loadgen.workload.traces.json_lines import decode_problem, line_of_record
from loadgen.workload.traces.text_columns import TextTable, first_line, read_csv, require
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
            _read_json_table(content, source, wanted)
            if first_line(content)[0][:1] == b"{"
            else read_csv(content, source, wanted, self.separator)
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
        """Metric → the column with each row's limit of it."""
        named = {"ttft_s": self.ttft_slo, "tpot_s": self.tpot_slo, "e2e_s": self.e2e_slo}
        return {metric: name for metric, name in named.items() if name is not None}


def _read_json_table(content: bytes, source: str, wanted: Sequence[str]) -> TextTable:
    """The wanted keys of flat JSON lines as a table of text, for formats that are told by column
    names. Raises TraceFileError with the line where a key is missing."""
    texts: dict[str, list[str]] = {name: [] for name in wanted}
    decoder: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(
        dict[str, msgspec.Raw]
    )
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
            for name in wanted:
                texts[name].append(_text(bytes(record[name])))
        except KeyError:
            require(source, [*record], wanted, number)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}:{number}: {decode_problem(error)}") from None
    columns: dict[str, list[Any]] = {
        name: [pa.array(values, pa.string())] for name, values in texts.items()
    }
    return TextTable(source, columns.__getitem__, partial(line_of_record, content))


def _text(raw: bytes) -> str:
    """A JSON scalar as the text a CSV cell would hold."""
    return str(json.loads(raw)) if raw[:1] == b'"' else "" if raw == b"null" else raw.decode()
