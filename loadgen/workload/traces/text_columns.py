"""Columns of a CSV or JSON-lines file as text, and their conversion to whole numbers and instants.

Arrow does the work on whole columns. What it cannot convert is looked for again row by row, so that
the message names the line.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
from numpy.typing import NDArray

from loadgen.errors import TraceFileError, nearest
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.trace import LIMIT_COLUMNS, LONGEST_SLO_S, NS_PER_UNIT, Ids, Ticks

_FARTHEST_S = 8_800_000_000  # from 1970; beyond, nanoseconds would overflow 64 bits
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_DECIMAL = r"^\+?(?P<whole>-?\d+)(?:\.(?P<part>\d{0,9})\d*)?$"
_INSTANT = (
    r"^(?P<second>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"\s*(?P<zone>Z|UTC|[+-]\d\d(?::?\d\d)?)?$"
)
_TOKEN_COUNT = f"a whole number from 0 to {MAX_TOKENS}"
_INSTANT_EXAMPLE = "2024-05-12 00:00:20.1234567+00:00"


@dataclass(frozen=True)
class TextTable:
    """Columns of text by name. `read` gives a column as Arrow arrays, one after the other and never
    all at once: text takes ten times the memory of the numbers in it. `line_of` finds the line of a
    row."""

    source: str
    read: Callable[[str], Iterable[Any]]  # of pa.StringArray
    line_of: Callable[[int], int]

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """A column of token counts: int64 in 0 … 10 000 000. `374.0` is whole, `374.5` is not."""
        return np.concatenate([self._whole(name, *part) for part in self._parts(name)])

    def ticks(self, name: str, unit: str = "s") -> Ticks:
        """Numeric times of a unit (s, ms, us, ns) in whole nanoseconds, without passing through a
        float: 1700012345.1234567 keeps all its digits. Digits beyond nanoseconds are cut."""
        parts = [self._ticks(name, unit, *part) for part in self._parts(name)]
        return np.concatenate(parts)

    def instants(self, name: str) -> Ticks:
        """Dates with times, as in ISO 8601, in nanoseconds since 1970 in UTC; up to nine digits of
        a second are kept. Without a zone a column is taken as UTC; a column with both is refused.
        """
        first: dict[bool, int] = {}  # row of the first value with a zone, and of the first without
        return np.concatenate([self._instants(name, first, *part) for part in self._parts(name)])

    def seconds(self, name: str, unit: str) -> NDArray[np.float64]:
        """A column of durations of a unit (s, ms, us) in seconds, 0 to a day; 0 for an empty
        cell."""
        return np.concatenate([self._seconds(name, unit, *part) for part in self._parts(name)])

    def words(self, name: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """A column of names as (index of each row's, names in order of first use)."""
        numbers: dict[str, int] = {}
        codes = []
        for text, _ in self._parts(name):
            found = pc.dictionary_encode(text)
            known = [numbers.setdefault(w, len(numbers)) for w in found.dictionary.to_pylist()]
            codes.append(np.array(known, np.int64)[_numpy(found.indices)])
        return np.concatenate(codes), tuple(numbers)

    def sessions(self, name: str) -> Ids:
        """A column of session names as numbers from 1 in order of first use; 0 for an empty
        cell."""
        codes, names = self.words(name)
        is_named = np.array([word != "" for word in names])
        return np.where(is_named[codes], codes + 1, 0).astype(np.uint32)

    def is_numeric(self, name: str) -> bool:
        """Whether the first value of a column is a plain number."""
        text, _ = next(iter(self._parts(name)))
        return _NUMBER.fullmatch(text[0].as_py()) is not None

    def _parts(self, name: str) -> Iterator[tuple[Any, int]]:
        """(trimmed text, number of its first row) of each array of a column."""
        row = 0
        for text in self.read(name):
            if len(text):
                yield pc.utf8_trim_whitespace(text), row
            row += len(text)

    def _whole(self, name: str, text: Any, row: int) -> NDArray[np.int64]:
        try:
            values: NDArray[np.int64] = _numpy(pc.cast(text, pa.int64()))
        except pa.ArrowInvalid:
            numbers = self._floats(name, text, row, _TOKEN_COUNT)
            bad = np.flatnonzero((np.abs(numbers) > MAX_TOKENS) | (numbers != np.rint(numbers)))
            if bad.size:
                self._refuse(name, text, int(bad[0]), row, _TOKEN_COUNT)
            values = numbers.astype(np.int64)
        bad = np.flatnonzero((values < 0) | (values > MAX_TOKENS))
        if bad.size:
            self._refuse(name, text, int(bad[0]), row, _TOKEN_COUNT)
        return values

    def _seconds(self, name: str, unit: str, text: Any, row: int) -> NDArray[np.float64]:
        expected = f"{unit}, from 0 to a day, or nothing"
        filled = pc.if_else(pc.equal(text, ""), "0", text)
        seconds_s = self._floats(name, filled, row, expected) / (10**9 // NS_PER_UNIT[unit])
        bad = np.flatnonzero((seconds_s < 0) | (seconds_s > LONGEST_SLO_S))
        if bad.size:
            self._refuse(name, text, int(bad[0]), row, expected)
        return seconds_s

    def _floats(self, name: str, text: Any, row: int, expected: str) -> NDArray[np.float64]:
        try:
            numbers: NDArray[np.float64] = _numpy(pc.cast(text, pa.float64()))
        except pa.ArrowInvalid:
            numbers = np.full(len(text), np.nan)
        if not np.all(np.isfinite(numbers)):
            for k, value in enumerate(text.to_pylist()):
                if not _NUMBER.fullmatch(value):
                    self._refuse(name, text, k, row, expected)
            numbers = np.array([float(value) for value in text.to_pylist()])
        return numbers

    def _ticks(self, name: str, unit: str, text: Any, row: int) -> Ticks:
        ns = NS_PER_UNIT[unit]
        found = pc.extract_regex(text, _DECIMAL)
        limit = 9 * 10**18 // ns
        if found.null_count == 0:
            try:
                whole: Ticks = _numpy(pc.cast(found.field("whole"), pa.int64()))
            except pa.ArrowInvalid:
                whole = np.array([limit + 1])
            if np.all(np.abs(whole) <= limit):
                part = _billionths(found.field("part"))
                is_negative = _numpy(pc.starts_with(found.field("whole"), "-"))
                sign = np.where(is_negative, np.int64(-1), np.int64(1))
                return np.add(whole * ns, sign * (part // (10**9 // ns)), dtype=np.int64)
        numbers = self._floats(name, text, row, "a number") * ns  # an exponent, or far too large
        bad = np.flatnonzero(np.abs(numbers) > 9e18)
        if bad.size:
            self._refuse(name, text, int(bad[0]), row, f"a time in {unit}")
        return np.rint(numbers).astype(np.int64)

    def _instants(self, name: str, first: dict[bool, int], text: Any, row: int) -> Ticks:
        plain_ns = _plain_instants(text)
        if plain_ns is not None and True not in first:
            first.setdefault(False, row)
            return plain_ns
        found = pc.extract_regex(text, _INSTANT)
        try:
            if found.null_count:
                raise pa.ArrowInvalid("no match")
            instants = pc.cast(found.field("second"), pa.timestamp("s"))
            seconds: Ticks = _numpy(pc.cast(instants, pa.int64()))
        except pa.ArrowInvalid:
            self._refuse_first_instant(name, text, row)
        zones = pc.dictionary_encode(found.field("zone"))
        of_row = _numpy(zones.indices)
        names = zones.dictionary.to_pylist()
        for code, zone in enumerate(names):
            first.setdefault(zone != "", row + int(np.argmax(of_row == code)))
        if len(first) == 2:
            odd = max(first.values()) - row
            self._refuse(name, text, odd, row, "a zone in every row or in none")
        offsets_s = np.array([_offset_s(zone) for zone in names], np.int64)
        utc_s: Ticks = seconds - offsets_s[of_row]
        far = np.flatnonzero(np.abs(utc_s) > _FARTHEST_S)
        if far.size:
            self._refuse(name, text, int(far[0]), row, "a date between 1700 and 2250")
        return utc_s * 10**9 + _billionths(found.field("part"))

    def _refuse_first_instant(self, name: str, text: Any, row: int) -> NoReturn:
        pattern = re.compile(_INSTANT)
        for k, value in enumerate(text.to_pylist()):
            match = pattern.fullmatch(value)
            try:
                datetime.fromisoformat(match["second"] if match else "")
            except ValueError:
                self._refuse(name, text, k, row, f"a date and time like {_INSTANT_EXAMPLE}")
        raise AssertionError(f"{self.source}: {name}: Arrow refuses what Python can read")

    def _refuse(self, name: str, text: Any, k: int, row: int, expected: str) -> NoReturn:
        """Raise for value k of a part that begins at a row."""
        value = text[k].as_py()
        got = f"{value!r:.80}" if value else "nothing"
        raise TraceFileError(
            f"{self.source}:{self.line_of(row + k)}: {name}: expected {expected}, got {got}"
        )


def _plain_instants(text: Any) -> Ticks | None:
    """Nanoseconds since 1970 where every value is a date and time of day without a zone, as Arrow
    itself reads them in a tenth of the time (schedule_speed.py); None where one is anything else,
    for the pattern to read or refuse."""
    if not len(text) or pc.min(pc.binary_length(text)).as_py() < len("2024-05-12 00:00:20"):
        return None
    try:
        instants = pc.cast(pc.cast(text, pa.timestamp("ns")), pa.int64())
    except pa.ArrowInvalid:
        return None
    found: Ticks = _numpy(instants)
    return found if np.all(np.abs(found // 10**9) <= _FARTHEST_S) else None


def read_limits(table: TextTable, fields: Collection[str]) -> dict[str, NDArray[np.float64]]:
    """The schedule's SLO columns, for those `LIMIT_COLUMNS` that are among a table's fields."""
    return {
        column: table.seconds(name, "ms")
        for name, column in LIMIT_COLUMNS.items()
        if name in fields
    }


def read_csv(
    content: bytes, source: str, wanted: Collection[str], separator: str = ","
) -> TextTable:
    """The wanted columns of a CSV file with a header line; others are ignored.

    Quotes, CRLF and blank lines are understood. Raises TraceFileError for a wanted column that is
    not there, and, once a column is read, with the line of a row that has too few or too many.
    """
    header, begin = read_header(content, source, separator)
    require(source, header, wanted)
    if not re.compile(rb"\S").search(content, begin):
        raise TraceFileError(f"{source}: has a header and no rows")
    has_quotes = b'"' in content

    def refuse_but_blank(row: Any) -> str:
        return "error" if row.text.strip() else "skip"

    def read(name: str) -> Iterator[Any]:
        try:
            batches = pv.open_csv(
                pa.BufferReader(pa.py_buffer(content).slice(begin)),
                read_options=pv.ReadOptions(column_names=header, block_size=1 << 22),
                parse_options=pv.ParseOptions(
                    delimiter=separator,
                    invalid_row_handler=refuse_but_blank,
                    newlines_in_values=has_quotes,
                ),
                convert_options=pv.ConvertOptions(
                    column_types={name: pa.string()}, include_columns=[name]
                ),
            )
            for batch in batches:
                yield batch.column(0)
        except pa.ArrowInvalid as error:
            raise _located(error, content, source, separator, len(header)) from None
        finally:
            pa.default_memory_pool().release_unused()  # 60 MB of 10⁶ rows' text, else kept

    def line_of(row: int) -> int:
        lines = (line for line, cells in _csv_rows(content, separator) if cells)
        return next(line for k, line in enumerate(lines) if k == row + 1)  # 0 is the header

    return TextTable(source, read, line_of)


def require(source: str, found: Sequence[str], wanted: Collection[str], line: int = 1) -> None:
    """Raises TraceFileError for a column that is missing, or there twice."""
    for name in wanted:
        if name not in found:
            raise TraceFileError(f"{source}:{line}: no column '{name}'; {nearest(name, found)}")
        if list(found).count(name) > 1:
            raise TraceFileError(f"{source}:{line}: the column '{name}' is there twice")


def first_line(content: bytes) -> tuple[bytes, int]:
    """(the first line that is not blank, where the next one begins), without copying the rest."""
    start = re.compile(rb"\s*").match(content)
    end = re.compile(rb"\r\n?|\n|$").search(content, start.end() if start else 0)
    assert end is not None, "the end of a text always matches"
    return content[start.end() if start else 0 : end.start()], end.end()


def read_header(content: bytes, source: str, separator: str = ",") -> tuple[list[str], int]:
    line, begin = first_line(content)
    try:
        cells = next(csv.reader([line.decode()], delimiter=separator), [])
        return [cell.strip() for cell in cells], begin
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{source}:1: is not UTF-8 text ({error.reason})") from None


def _csv_rows(content: bytes, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row, blank ones as []; the slow way, to name a line in a message."""
    reader = csv.reader(
        io.StringIO(content.decode("utf-8", "replace"), newline=""), delimiter=separator
    )
    for cells in reader:
        yield reader.line_num, [] if len(cells) == 1 and not cells[0].strip() else cells


def _located(
    error: Exception, content: bytes, source: str, separator: str, n_columns: int
) -> TraceFileError:
    for line, cells in _csv_rows(content, separator):
        if cells and len(cells) != n_columns:
            got = separator.join(cells)[:80]
            return TraceFileError(
                f"{source}:{line}: expected {n_columns} columns, got {len(cells)}: {got!r}"
            )
    try:
        content.decode()
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        return TraceFileError(f"{source}:{line}: is not UTF-8 text ({wrong.reason})")
    return TraceFileError(f"{source}: {error}")


def _billionths(part: pa.StringArray) -> Ticks:
    """The digits after a decimal point in units of 1e-9: "5" → 500 000 000, "" → 0."""
    digits: Ticks = _numpy(pc.cast(pc.utf8_rpad(part, 9, "0"), pa.int64()))
    return digits


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _offset_s(zone: str) -> int:
    if zone in ("", "Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds
