"""Records of a JSON-lines file, checked against a type, with the line of every mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.errors import TraceFileError
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.trace import LIMIT_COLUMNS, LONGEST_SLO_S, NS_PER_UNIT, Ticks

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
            bad = np.flatnonzero((limits_ms < 0) | (limits_ms > LONGEST_SLO_S * 1e3))
            if bad.size:
                _reject_value(
                    *(self._content, self._source, name, limits_ms, int(bad[0])),
                    "ms, from 0 to a day, or null",
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
        expected = f"a whole number from 0 to {MAX_TOKENS}"
        _reject_value(content, source, name, values, int(outside[0]), expected)
    tokens: NDArray[np.int64] = values.astype(np.int64)
    return tokens


def tick_column(content: bytes, source: str, values: NDArray[np.float64], unit: str) -> Ticks:
    """The key `timestamp` of all records in nanoseconds: whole units exactly, fractions to the 15
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


def _reject_value(
    content: bytes, source: str, name: str, values: NDArray[np.float64], row: int, expected: str
) -> NoReturn:
    raise TraceFileError(
        f"{source}:{line_of_record(content, row)}: {name}: expected {expected}, got"
        f" {values[row]:.15g}"
    )


def line_of_record(content: bytes, row: int) -> int:
    """The line of a record, counted from 1."""
    filled = (k for k, line in enumerate(content.splitlines(), start=1) if line.strip())
    return next(islice(filled, row, None))


def _refuse_first(
    lines: list[bytes], n_before: int, source: str, decoder: msgspec.json.Decoder[R]
) -> NoReturn:
    for number, line in enumerate(lines, start=n_before + 1):
        if not line.strip():
            continue
        try:
            decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceFileError(f"{source}:{number}: {decode_problem(error)}") from None
    raise AssertionError(f"{source}: a batch fails whose lines do not")


def decode_problem(error: Exception) -> str:
    """msgspec's message with the key first and without its path syntax."""
    problem, at, where = str(error).partition(" - at `$.")
    text = problem[:1].lower() + problem[1:].replace("`", "'")
    text = text.replace("object missing required field", "missing key")
    return f"{where.rstrip('`')}: {text}" if at else text
