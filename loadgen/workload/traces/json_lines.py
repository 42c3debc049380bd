"""Records of a JSON-lines file, checked against a type, with the line of every mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.errors import TraceFileError
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.text_columns import LONGEST_S, TextTable, require
from loadgen.workload.traces.trace import LIMIT_COLUMNS, Ticks

R = TypeVar("R", bound=msgspec.Struct)
_BATCH = 2048  # few enough objects alive at once that Python's garbage collector has little to do


class WithLimits(msgspec.Struct, gc=False, kw_only=True):
    """The keys of a record that say what the request was promised; None or 0 is nothing."""

    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    e2e_slo_ms: float | None = None


class LimitColumns:
    """Collects the promises of a file's records, batch by batch; costs nothing where the file has
    no such key."""

    def __init__(self, content: bytes, source: str) -> None:
        self._content, self._source = content, source
        self._names = [name for name in LIMIT_COLUMNS if f'"{name}"'.encode() in content]
        self._ms: list[NDArray[np.float64]] = []

    def add(self, records: Sequence[WithLimits]) -> None:
        """Take the promises of one batch of records."""
        if self._names:
            rows = [[getattr(record, name) for name in self._names] for record in records]
            self._ms.append(np.array(rows, np.float64))

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Those that the file has, by the schedule's column, in seconds. Raises TraceFileError for
        a limit that is none."""
        if not self._names:
            return {}
        values = np.nan_to_num(np.concatenate(self._ms), nan=0.0).T
        found = dict(zip(self._names, values, strict=True))
        for name, limits_ms in found.items():
            bad = np.flatnonzero((limits_ms < 0) | (limits_ms > LONGEST_S * 1e3))
            if bad.size:
                line = line_of_record(self._content, int(bad[0]))
                raise TraceFileError(
                    f"{self._source}:{line}: {name}: expected ms, from 0 to a day, or null, got "
                    f"{limits_ms[bad[0]]:.15g}"
                )
        return {LIMIT_COLUMNS[name]: limits_ms / 1e3 for name, limits_ms in found.items()}


def read_records(content: bytes, source: str, record: type[R]) -> Iterator[list[R]]:
    """The file's records in batches; blank lines are skipped.

    Raises TraceFileError with line and key where a line is no JSON, lacks a key, or has a value of
    another type.
    """
    decoder = msgspec.json.Decoder(record)
    lines = iter(content.splitlines())
    n_before = 0
    while batch := list(islice(lines, _BATCH)):
        filled = [line for line in batch if line and not line.isspace()]
        try:
            if records := decoder.decode_lines(b"\n".join(filled)):
                yield records
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _refuse_first(batch, n_before, source, decoder)
        n_before += len(batch)


def token_column(
    content: bytes, source: str, name: str, values: NDArray[np.float64]
) -> NDArray[np.int64]:
    """A key of all records as int64; refuses what is no possible token count."""
    outside = np.flatnonzero((values < 0) | (values > MAX_TOKENS))
    if outside.size:
        row = int(outside[0])
        raise TraceFileError(
            f"{source}:{line_of_record(content, row)}: {name}: expected a whole number from 0 to"
            f" {MAX_TOKENS}, got {values[row]:.15g}"
        )
    tokens: NDArray[np.int64] = values.astype(np.int64)
    return tokens


def tick_column(
    content: bytes, source: str, values: NDArray[np.float64], ns_per_unit: int
) -> Ticks:
    """The key `timestamp` of all records in nanoseconds: whole units exactly, fractions to the 15
    digits of a float."""
    outside = np.flatnonzero(np.abs(values) > 9e18 / ns_per_unit)
    if outside.size:
        row = int(outside[0])
        line = line_of_record(content, row)
        raise TraceFileError(f"{source}:{line}: timestamp: {values[row]} is out of range")
    whole = np.floor(values)
    parts_ns = np.rint((values - whole) * ns_per_unit)
    ticks: Ticks = whole.astype(np.int64) * ns_per_unit + parts_ns.astype(np.int64)
    return ticks


def line_of_record(content: bytes, row: int) -> int:
    """The line of a record, counted from 1."""
    filled = (k for k, line in enumerate(content.splitlines(), start=1) if line.strip())
    return next(islice(filled, row, None))


def read_json_table(content: bytes, source: str, wanted: Sequence[str]) -> TextTable:
    """The wanted keys of flat JSON lines as a table of text, for formats that are told by column
    names. Raises TraceFileError with the line where a key is missing."""
    import pyarrow as pa

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
            raise TraceFileError(f"{source}:{number}: {_in_words(error)}") from None
    columns: dict[str, list[Any]] = {
        name: [pa.array(values, pa.string())] for name, values in texts.items()
    }
    return TextTable(source, columns.__getitem__, partial(line_of_record, content))


def _refuse_first(
    lines: list[bytes], n_before: int, source: str, decoder: msgspec.json.Decoder[R]
) -> NoReturn:
    for number, line in enumerate(lines, start=n_before + 1):
        if not line.strip():
            continue
        try:
            decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}:{number}: {_in_words(error)}") from None
    raise AssertionError(f"{source}: a batch fails whose lines do not")


def _in_words(error: Exception) -> str:
    """msgspec's message with the key first and without its path syntax."""
    problem, at, where = str(error).partition(" - at `$.")
    text = problem[:1].lower() + problem[1:].replace("`", "'")
    text = text.replace("object missing required field", "missing key")
    return f"{where.rstrip('`')}: {text}" if at else text


def _text(raw: bytes) -> str:
    """A JSON scalar as the text a CSV cell would hold."""
    return str(json.loads(raw)) if raw[:1] == b'"' else "" if raw == b"null" else raw.decode()
