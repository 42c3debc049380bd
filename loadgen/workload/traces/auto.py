"""Which format a file is of, by the names of its columns or keys."""

from __future__ import annotations

import re

import msgspec

from loadgen.errors import TraceFileError
from loadgen.workload.traces.text_columns import csv_header
from loadgen.workload.traces.trace import TRACES, Trace, TraceFormat

_HEAD_BYTES = 1 << 20


class Auto(TraceFormat):
    """The registered format whose columns or keys the file has."""

    kind = "auto"

    def parse(self, content: bytes, source: str) -> Trace:
        fields = first_fields(content, source)
        matching = [cls for cls in TRACES if cls.is_mine(fields)]
        if not matching:
            known = ", ".join(kind for kind in TRACES.names() if kind != self.kind)
            raise TraceFileError(
                f"{source}:1: columns {', '.join(fields)[:200]} are of no known format ({known});"
                " say which is which: format: {kind: columns, time: …, input_tokens: …,"
                " output_tokens: …}"
            )
        if len(matching) > 1:
            names = ", ".join(cls.kind for cls in matching)
            raise TraceFileError(f"{source}: could be any of {names}; choose one with format")
        return matching[0]().parse(content, source)


def first_fields(content: bytes, source: str) -> list[str]:
    """The column names of a CSV file, or the keys of a file's first JSON object."""
    head = content[:_HEAD_BYTES].lstrip()
    line = re.split(rb"[\r\n]", head, maxsplit=1)[0]
    if head[:1] == b"{":
        try:
            return [*msgspec.json.decode(line, type=dict[str, msgspec.Raw])]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}:1: is no JSON line: {error}") from None
    if head[:1] == b"[":  # one array of objects: the keys of the first one are near the start
        return [key.decode("utf-8", "replace") for key in re.findall(rb'"(\w+)"\s*:', head[:4096])]
    try:
        return csv_header(line.decode())
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{source}:1: is not UTF-8 text ({error.reason})") from None
