"""Reading of a trace file in any registered format, compressed or not."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec

from loadgen.errors import TraceFileError, UnknownKind
from loadgen.system.whole_file import read_regular
from loadgen.workload.csv_rows import csv_rows
from loadgen.workload.traces.synonyms import recognized
from loadgen.workload.traces.trace import TRACES, Trace, TraceFormat

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 1 << 20
_MOST_BYTES = 2 << 30  # a request takes 30 to 300 bytes
_CONVERSATIONS = {"conversations", "conversation"}
_WITHOUT_LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")
_SEPARATORS = (";", "\t", "|")  # other than a comma
_NOT_A_TRACE = {
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1": "is a Parquet file; write it as CSV",
    b"\xff\xfe": "is UTF-16 text; write it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; write it as UTF-8",
    b"\x28\xb5\x2f\xfd": "is packed with zstd; unpack it first",
    b"version https://git-lfs": "is a Git LFS pointer, not the file; fetch the file itself",
    b"<!doctype": "is an HTML page; download the raw file",
    b"<html": "is an HTML page; download the raw file",
}


def load_trace(path: str | Path, format: str | TraceFormat = "auto") -> Trace:
    """The trace in a file, compressed with gzip or not; a relative path is relative to the current
    directory.

    Raises TraceFileError with file, line and reason if the file cannot be read as a trace.
    """
    try:
        reader = TRACES.build(format)
    except UnknownKind as error:
        raise TraceFileError(f"{path}: {error}") from None
    content = read_bytes(path)
    try:
        return reader.parse(_in_lines(content, str(path)), str(path))
    except TraceFileError:
        if Path(path).is_symlink():  # may lead to a file with secrets
            raise TraceFileError(
                f"{path}: cannot be read as a trace; it is a link to another file, whose content "
                "is not shown here: name that file itself to see the mistake"
            ) from None
        raise


def read_bytes(path: str | Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """A text file's bytes, decompressed and without byte order mark. Raises TraceFileError, also
    for anything but a regular file and for more than `most_bytes`, packed or not."""
    try:
        content = read_regular(Path(path), most_bytes)
    except FileNotFoundError:
        problem = f"no such file (looked for {Path(path).absolute()})"
        raise TraceFileError(f"{path}: {problem}") from None
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be read: {error.strerror}") from None
    except MemoryError:
        raise TraceFileError(f"{path}: does not fit into memory") from None
    if content.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(most_bytes + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceFileError(f"{path}: is a damaged gzip file: {error}") from None
        if len(content) > most_bytes:
            limit = f"{most_bytes >> 20} MiB"
            raise TraceFileError(f"{path}: unpacks to more than the limit of {limit}")
    start = content[:64].lstrip().lower()
    for mark, problem in _NOT_A_TRACE.items():
        if start.startswith(mark.lower()):
            raise TraceFileError(f"{path}: {problem}")
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content or content.isspace():
        raise TraceFileError(f"{path}: is empty")
    return content


class Auto(TraceFormat):
    """The registered format that matches the columns or keys of the file, or `columns` where a time
    and both lengths have usual names (`timestamp, prompt_tokens, completion_tokens`), separated by
    `,`, `;`, a tab or `|`."""

    kind = "auto"

    def parse(self, content: bytes, source: str) -> Trace:
        fields = first_fields(content, source)
        matching = [cls for cls in TRACES if cls.is_mine(fields)]
        others = _SEPARATORS if len(fields) == 1 else ()
        separator = next((mark for mark in others if mark in fields[0]), ",")
        if separator == ",":
            names = fields
        else:
            names = [name.strip() for name in fields[0].split(separator)]
        row = first_row(content, separator)
        if {"requests", "hash_id_scope"} <= {*fields}:
            raise TraceFileError(
                f"{source}: holds conversations of agents; replay it with agents: {{path: …}}"
            )
        if not matching and (keys := recognized(names, row, source)) is not None:
            columns = {"kind": "columns", **keys, "separator": separator}
            return TRACES.build(columns).parse(content, source)
        if not matching:
            known = ", ".join(kind for kind in TRACES.names() if kind != self.kind)
            raise TraceFileError(
                f"{source}:1: columns {', '.join(names)[:200]} match no known format ({known});"
                " name the columns: format: {kind: columns, time: …, input_tokens: …,"
                f" output_tokens: …{_separator_key(separator)}}}"
            )
        if len(matching) > 1:
            kinds = ", ".join(cls.kind for cls in matching)
            raise TraceFileError(f"{source}: could be any of {kinds}; choose one with format")
        return matching[0]().parse(content, source)


def _in_lines(content: bytes, source: str) -> bytes:
    """A JSON array of flat objects as JSON lines; other content, conversations too, as it is."""
    is_array = re.match(rb"\s*\[\s*\{", content) is not None
    if not is_array or _CONVERSATIONS & {*first_fields(content, source)}:
        return content
    try:
        rows = msgspec.json.decode(content, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{source}: is not a JSON array: {error}") from None
    # a line end is white space in JSON, and legal in no string
    return b"\n".join(bytes(row).translate(_WITHOUT_LINE_ENDS) for row in rows)


def _separator_key(separator: str) -> str:
    """The separator as a further key of a format in YAML; "" for a comma."""
    return "" if separator == "," else f", separator: {msgspec.json.encode(separator).decode()}"


def first_row(content: bytes, separator: str = ",") -> dict[str, str]:
    """The first record of a CSV file or of JSON lines as text; {} where it cannot be read."""
    head = content[:_HEAD_BYTES].decode("utf-8", "replace").strip()
    lines = re.split(r"[\r\n]+", head, maxsplit=2)[:2]
    try:
        if head.startswith("{"):
            record = msgspec.json.decode(lines[0].encode(), type=dict[str, Any])
            return {key: str(value) for key, value in record.items()}
        rows = list(csv_rows(lines, separator))
    except (msgspec.MsgspecError, csv.Error):
        return {}
    return {k.strip(): v.strip() for k, v in zip(rows[0], rows[-1], strict=False)}


def first_fields(content: bytes, source: str) -> list[str]:
    """The column names of a CSV file, or the keys of a file's first JSON object."""
    head = content[:_HEAD_BYTES].lstrip()
    line = re.split(rb"[\r\n]", head, maxsplit=1)[0]
    if head[:1] == b"{":
        try:
            return [*msgspec.json.decode(line, type=dict[str, msgspec.Raw])]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}:1: is not a JSON line: {error}") from None
    if head[:1] == b"[":  # an array of objects: the keys of the first object are near the start
        return [key.decode("utf-8", "replace") for key in re.findall(rb'"(\w+)"\s*:', head[:4096])]
    from loadgen.workload.traces.text_columns import read_header  # imports pyarrow: 0.1 s

    return read_header(head, source)[0]
