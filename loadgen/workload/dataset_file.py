"""Records of a file of prompts: JSON lines, a JSON array or object, CSV, Parquet or plain lines,
compressed with gzip or not.

JSON lines end in LF or CRLF only. U+2028, U+2029, U+0085 and form feeds are legal inside a JSON
string (RFC 8259 section 7), so they separate nothing.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from loadgen.errors import ScenarioError, TraceFileError
from loadgen.system.whole_file import opened_regular
from loadgen.workload.traces.file import read_bytes

Record = tuple[int, Any]
"""(line number from 1, decoded value)."""
_BLANK = " \t\r\n"
_ROOT = ("data", "rows", "examples", "instances", "prompts", "requests", "conversations")
"""The keys under which a JSON object holds the list of its records."""
_PARQUET = b"PAR1"
_SEPARATORS = (",", "\t", ";", "|")
_DECODER = json.JSONDecoder()


def read_records(path: str, label: str, *, is_plain: bool = False) -> Iterator[Record]:
    """The records of a file, in order; each line of a plain file is a text. A record of a CSV or
    Parquet file is a mapping from column to cell, numbered by its line or row.

    Raises ScenarioError with `label` and the line for a file that cannot be read.
    """
    if not is_plain and _is_parquet(path):
        yield from _parquet(path, label)
        return
    try:
        content = read_bytes(path)
    except TraceFileError as error:
        raise ScenarioError(f"{label}{str(error).removeprefix(path)}") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as invalid:
        line = content.count(b"\n", 0, invalid.start) + 1
        raise ScenarioError(f"{label}:{line}: is not UTF-8 text ({invalid.reason})") from None
    if is_plain:
        yield from ((number, line) for number, line in _lines(text) if line.strip())
        return
    start = text.lstrip(_BLANK)[:1]
    if start == "[":
        yield from _array(text, label)
    elif start == "{" or (start == '"' and _is_json(next(_lines(text))[1])):
        yield from _json_lines(text, label)
    else:
        yield from _csv(text, label)


def _is_parquet(path: str) -> bool:
    try:
        with opened_regular(Path(path)) as file:
            return file.read(len(_PARQUET)) == _PARQUET
    except OSError:
        return False  # `read_bytes` names the reason


def _lines(text: str) -> Iterator[tuple[int, str]]:
    start, number = 0, 1
    while start <= len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield number, text[start:end].removesuffix("\r")
        start, number = end + 1, number + 1


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _json_lines(text: str, label: str) -> Iterator[Record]:
    """A value per line. A text whose first line is no value, or its only one, is a single JSON
    value."""
    filled = [(number, line) for number, line in _lines(text) if line.strip(_BLANK)]
    if len(filled) == 1 or not _is_json(filled[0][1]):
        whole = _whole(text)
        if whole is not None:
            yield from ((filled[0][0], value) for value in whole)
            return
    for number, line in filled:
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"{label}:{number}: is not JSON: {error}") from None


def _whole(text: str) -> list[Any] | None:
    """The records of a text that is a single JSON object; None for another text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _rows_of(value) or [value]


def _rows_of(value: Any) -> list[Any] | None:
    """The list of records that an object holds; None for a record."""
    if not isinstance(value, dict):
        return None
    rows = [value[key] for key in _ROOT if isinstance(value.get(key), list)]
    is_table = len(rows) == 1 and rows[0] and all(isinstance(row, dict) for row in rows[0])
    is_turns = is_table and {"role", "from"} & {*rows[0][0]}
    return rows[0] if is_table and not is_turns else None


def _array(text: str, label: str) -> Iterator[Record]:
    """The elements of a JSON array. Values after the array are further lines of JSON."""
    at = len(text) - len(text.lstrip(_BLANK)) + 1
    number, counted, is_first = 1, 0, True
    while True:
        at = _after_blanks(text, at)
        if text[at : at + 1] == "]":
            break
        if not is_first:
            if text[at : at + 1] != ",":
                line = text.count("\n", 0, at) + 1
                raise ScenarioError(f"{label}:{line}: is not JSON: expected ',' or ']'")
            at = _after_blanks(text, at + 1)
        number, counted = number + text.count("\n", counted, at), at
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                number = error.lineno
            raise ScenarioError(f"{label}:{number}: is not JSON: {error}") from None
        is_first = False
        yield number, value
    if text[at + 1 :].strip(_BLANK):
        line = text.count("\n", 0, _after_blanks(text, at + 1)) + 1
        raise ScenarioError(f"{label}:{line}: is not JSON: text after the end of the array")


def _after_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in tuple(_BLANK):
        at += 1
    return at


def _csv(text: str, label: str) -> Iterator[Record]:
    """The rows of a CSV file with a header; an empty cell is left out of its row."""
    csv.field_size_limit(sys.maxsize)
    header = next((line for _, line in _lines(text) if line.strip()), "")
    separator = max(_SEPARATORS, key=header.count)
    rows = csv.reader(_physical(text), delimiter=separator, strict=True)
    names: list[str] = []
    try:
        while True:
            line = rows.line_num + 1
            row = next(rows, None)
            if row is None:
                return
            if not names:
                names = [name.strip() for name in row]
            elif row:
                cells = zip(names, row, strict=False)
                yield line, {name: cell for name, cell in cells if name and cell}
    except csv.Error as error:
        raise ScenarioError(f"{label}:{rows.line_num}: is not CSV: {error}") from None


def _physical(text: str) -> Iterable[str]:
    return io.StringIO(text, newline="")


def _parquet(path: str, label: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 1
        for batch in pq.ParquetFile(path).iter_batches(1024):
            for row in batch.to_pylist():
                yield number, row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise ScenarioError(f"{label}: is a damaged Parquet file: {error}") from None
