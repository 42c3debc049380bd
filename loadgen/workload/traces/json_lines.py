"""Records of a JSON-lines file, validated against a type; every error names its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.errors import TraceFileError
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.trace import LIMIT_COLUMNS, LONGEST_SLO_S, NS_PER_UNIT, Ticks

R = TypeVar("R", bound=msgspec.Struct)
_BATCH = 2048  # keeps few objects alive at once, which saves work of Python's garbage collector


class WithLimits(msgspec.Struct, gc=False, kw_only=True):
    """The keys of a record with the limits of its request; None or 0 is no limit."""

    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    e2e_slo_ms: float | None = None


class LimitColumns:
    """Collects the limits in a file's records, batch by batch, if the file has such a key."""

    def __init__(self, content: bytes, source: str) -> None:
        self._content, self._source = content, source
        self._names = [name for name in LIMIT_COLUMNS if f'"{name}"'.encode() in content]
        self._ms: list[NDArray[np.float64]] = []

    def add(self, records: Sequence[WithLimits]) -> None:
        """Append the limits of a batch of records."""
        if self._names:
            rows = [[getattr(record, name) for name in self._names] for record in records]
            self._ms.append(np.array(rows, np.float64))

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """The limits in the file in seconds, by column of the schedule. Raises TraceFileError for a
        limit below 0 or above a day."""
        if not self._names:
            return {}
        columns = {}
        values = np.nan_to_num(np.concatenate(self._ms), nan=0.0).T
        for name, limits_ms in zip(self._names, values, strict=True):
            _check_range(
                *(self._content, self._source, name, limits_ms, LONGEST_SLO_S * 1e3),
                "ms, from 0 to a day, or null",
            )
            columns[LIMIT_COLUMNS[name]] = limits_ms / 1e3
        return columns


def read_records(content: bytes, source: str, record: type[R]) -> Iterator[list[R]]:
    """The file's records in batches; blank lines are skipped.

    Raises TraceFileError with line and key for a line that is not JSON, lacks a key or has a value
    of another type.
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
            for number, line in enumerate(batch, start=n_before + 1):
                if line.strip():
                    decode_line(decoder, line, source, number)
            raise AssertionError(f"{source}: a batch fails, but none of its lines") from None
        n_before += len(batch)


D = TypeVar("D")


def decode_line(decoder: msgspec.json.Decoder[D], line: bytes, source: str, number: int) -> D:
    """A record. Raises TraceFileError with its line number and msgspec's message in plain words:
    the key first, and no path syntax."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem, at, key = str(error).partition(" - at `$.")
        text = problem[:1].lower() + problem[1:].replace("`", "'")
        text = text.replace("object missing required field", "missing key")
        text = f"{key.rstrip('`')}: {text}" if at else text
        raise TraceFileError(f"{source}:{number}: {text}") from None


def token_column(
    content: bytes, source: str, name: str, values: NDArray[np.float64]
) -> NDArray[np.int64]:
    """A key of all records as int64. Raises TraceFileError for an impossible token count."""
    expected = f"a whole number from 0 to {MAX_TOKENS}"
    _check_range(content, source, name, values, MAX_TOKENS, expected)
    tokens: NDArray[np.int64] = values.astype(np.int64)
    return tokens


def tick_column(content: bytes, source: str, values: NDArray[np.float64], unit: str) -> Ticks:
    """The key `timestamp` of all records in nanoseconds: whole units exactly, fractions with the 15
    digits of a float."""
    ns_per_unit = NS_PER_UNIT[unit]
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
    """The line number of a record, from 1."""
    filled = (k for k, line in enumerate(content.splitlines(), start=1) if line.strip())
    return next(islice(filled, row, None))


def _check_range(
    content: bytes, source: str, name: str, values: NDArray[np.float64], most: float, expected: str
) -> None:
    outside = np.flatnonzero((values < 0) | (values > most))
    if outside.size:
        row = int(outside[0])
        raise TraceFileError(
            f"{source}:{line_of_record(content, row)}: {name}: expected {expected}, got"
            f" {values[row]:.15g}"
        )
