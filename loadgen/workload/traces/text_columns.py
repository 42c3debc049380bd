"""Text columns of a CSV or JSON-lines file, and their conversion to whole numbers and instants.

Arrow converts whole columns. If it fails, the values are searched row by row for the first invalid
value, so that the message names the line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
from numpy.typing import NDArray

from loadgen.errors import TraceFileError, nearest
from loadgen.workload.csv_rows import csv_rows
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.trace import LIMIT_COLUMNS, LONGEST_SLO_S, NS_PER_UNIT, Ids, Ticks

_SEPARATORS = (",", ";", "\t", "|")
_SHOWN = {"\t": "\\t"}  # as written in YAML
_FARTHEST_S = 8_800_000_000  # from 1970; nanoseconds of later instants overflow 64 bits
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
    """Columns of text by name. `read` yields a column as successive Arrow arrays, because
    text takes ten times the memory of its numbers. `line_of` returns the line number of a row."""

    source: str
    names: Collection[str]
    read: Callable[[str], Iterable[Any]]  # of pa.StringArray
    line_of: Callable[[int], int]

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """A column of token counts: int64 in 0 … 10 000 000. `374.0` is valid, `374.5` is not."""
        return np.concatenate([self._whole(name, *part) for part in self._parts(name)])

    def ticks(self, name: str, unit: str = "s") -> Ticks:
        """Numeric times of a unit (s, ms, us, ns) in whole nanoseconds, converted without a float:
        1700012345.1234567 keeps all its digits. Digits beyond nanoseconds are dropped."""
        parts = [self._ticks(name, unit, *part) for part in self._parts(name)]
        return np.concatenate(parts)

    def instants(self, name: str) -> Ticks:
        """Dates with times, as in ISO 8601, in nanoseconds since 1970 in UTC, with up to nine
        digits of a second. A column without time zones is taken as UTC; a column with and without
        zones is rejected.
        """
        first: dict[bool, int] = {}  # first row with a zone, and first row without a zone
        return np.concatenate([self._instants(name, first, *part) for part in self._parts(name)])

    def seconds(self, name: str, unit: str) -> NDArray[np.float64]:
        """A column of durations of a unit (s, ms, us) in seconds, 0 to a day; 0 for an empty
        cell."""
        return np.concatenate([self._seconds(name, unit, *part) for part in self._parts(name)])

    def words(self, name: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """A column of names as (index of the name of each row, names in order of first use)."""
        numbers: dict[str, int] = {}
        codes = []
        for text, _ in self._parts(name):
            encoded = pc.dictionary_encode(text)
            names = encoded.dictionary.to_pylist()
            code_of = np.array([numbers.setdefault(w, len(numbers)) for w in names], np.int64)
            codes.append(code_of[_numpy(encoded.indices)])
        return np.concatenate(codes), tuple(numbers)

    def sessions(self, name: str) -> Ids:
        """A column of session names as numbers from 1 in order of first use; 0 for an empty
        cell."""
        codes, names = self.words(name)
        is_named = np.array([word != "" for word in names])
        return np.where(is_named[codes], codes + 1, 0).astype(np.uint32)

    def limits(self) -> dict[str, NDArray[np.float64]]:
        """The schedule's SLO columns, as far as the table has `LIMIT_COLUMNS`."""
        own = {column: name for name, column in LIMIT_COLUMNS.items() if self.has(name)}
        return {column: self.seconds(name, "ms") for column, name in own.items()}

    def has(self, name: str) -> bool:
        """Whether a column exists. Raises TraceFileError if it occurs twice."""
        require(self.source, self.names, {name} & {*self.names})
        return name in self.names

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
            self._reject_where(
                (np.abs(numbers) > MAX_TOKENS) | (numbers != np.rint(numbers)),
                name,
                text,
                row,
                _TOKEN_COUNT,
            )
            values = numbers.astype(np.int64)
        self._reject_where((values < 0) | (values > MAX_TOKENS), name, text, row, _TOKEN_COUNT)
        return values

    def _seconds(self, name: str, unit: str, text: Any, row: int) -> NDArray[np.float64]:
        expected = f"{unit}, from 0 to a day, or nothing"
        filled = pc.if_else(pc.equal(text, ""), "0", text)
        seconds_s = self._floats(name, filled, row, expected) / (10**9 // NS_PER_UNIT[unit])
        self._reject_where((seconds_s < 0) | (seconds_s > LONGEST_SLO_S), name, text, row, expected)
        return seconds_s

    def _floats(self, name: str, text: Any, row: int, expected: str) -> NDArray[np.float64]:
        try:
            numbers: NDArray[np.float64] = _numpy(pc.cast(text, pa.float64()))
        except pa.ArrowInvalid:
            numbers = np.full(len(text), np.nan)
        if not np.all(np.isfinite(numbers)):
            for k, value in enumerate(text.to_pylist()):
                if not _NUMBER.fullmatch(value):
                    self._reject(name, text, k, row, expected)
            numbers = np.array([float(value) for value in text.to_pylist()])
        return numbers

    def _ticks(self, name: str, unit: str, text: Any, row: int) -> Ticks:
        ns = NS_PER_UNIT[unit]
        matches = pc.extract_regex(text, _DECIMAL)
        limit = 9 * 10**18 // ns
        if matches.null_count == 0:
            try:
                whole: Ticks = _numpy(pc.cast(matches.field("whole"), pa.int64()))
            except pa.ArrowInvalid:
                whole = np.array([limit + 1])
            if np.all(np.abs(whole) <= limit):
                part = _billionths(matches.field("part"))
                is_negative = _numpy(pc.starts_with(matches.field("whole"), "-"))
                sign = np.where(is_negative, np.int64(-1), np.int64(1))
                return np.add(whole * ns, sign * (part // (10**9 // ns)), dtype=np.int64)
        numbers = self._floats(name, text, row, "a number") * ns  # an exponent, or far too large
        self._reject_where(np.abs(numbers) > 9e18, name, text, row, f"a time in {unit}")
        return np.rint(numbers).astype(np.int64)

    def _instants(self, name: str, first: dict[bool, int], text: Any, row: int) -> Ticks:
        plain_ns = _plain_instants(text)
        if plain_ns is not None and True not in first:
            first.setdefault(False, row)
            return plain_ns
        matches = pc.extract_regex(text, _INSTANT)
        try:
            if matches.null_count:
                raise pa.ArrowInvalid("no match")
            instants = pc.cast(matches.field("second"), pa.timestamp("s"))
            seconds: Ticks = _numpy(pc.cast(instants, pa.int64()))
        except pa.ArrowInvalid:
            self._reject_first_instant(name, text, row)
        zones = pc.dictionary_encode(matches.field("zone"))
        of_row = _numpy(zones.indices)
        names = zones.dictionary.to_pylist()
        for code, zone in enumerate(names):
            first.setdefault(zone != "", row + int(np.argmax(of_row == code)))
        if len(first) == 2:
            odd = max(first.values()) - row
            self._reject(name, text, odd, row, "a zone in every row or in none")
        offsets_s = np.array([_offset_s(zone) for zone in names], np.int64)
        utc_s: Ticks = seconds - offsets_s[of_row]
        is_far = np.abs(utc_s) > _FARTHEST_S
        self._reject_where(is_far, name, text, row, "a date between 1700 and 2250")
        return utc_s * 10**9 + _billionths(matches.field("part"))

    def _reject_first_instant(self, name: str, text: Any, row: int) -> NoReturn:
        pattern = re.compile(_INSTANT)
        for k, value in enumerate(text.to_pylist()):
            match = pattern.fullmatch(value)
            try:
                datetime.fromisoformat(match["second"] if match else "")
            except ValueError:
                self._reject(name, text, k, row, f"a date and time like {_INSTANT_EXAMPLE}")
        raise AssertionError(f"{self.source}: {name}: Arrow rejects instants that Python reads")

    def _reject_where(
        self, mask: NDArray[np.bool_], name: str, text: Any, row: int, expected: str
    ) -> None:
        """Raise for the first value at which the mask is true."""
        if mask.any():
            self._reject(name, text, int(np.argmax(mask)), row, expected)

    def _reject(self, name: str, text: Any, k: int, row: int, expected: str) -> NoReturn:
        """Raise TraceFileError for value k of a part that begins at `row`."""
        value = text[k].as_py()
        got = f"{value!r:.80}" if value else "nothing"
        raise TraceFileError(
            f"{self.source}:{self.line_of(row + k)}: {name}: expected {expected}, got {got}"
        )


def _plain_instants(text: Any) -> Ticks | None:
    """Nanoseconds since 1970 if every value is a date and time without a zone; else None.

    Arrow parses such values directly, in a tenth of the time of the pattern (schedule_speed.py).
    """
    if not len(text) or pc.min(pc.binary_length(text)).as_py() < len("2024-05-12 00:00:20"):
        return None
    try:
        instants = pc.cast(pc.cast(text, pa.timestamp("ns")), pa.int64())
    except pa.ArrowInvalid:
        return None
    instants_ns: Ticks = _numpy(instants)
    return instants_ns if np.all(np.abs(instants_ns // 10**9) <= _FARTHEST_S) else None


def read_csv(content: bytes, source: str, names: Iterable[str], separator: str = ",") -> TextTable:
    """The columns of a CSV file with a header line, which must contain `names`.

    Quotes, CRLF and blank lines are allowed. Raises TraceFileError for a missing column of `names`
    and, when a column is read, for a row with too few or too many cells.
    """
    header, begin = read_header(content, source, separator)
    names = list(names)
    if not set(names) <= set(header) and (other := _other_separator(content, names, separator)):
        raise TraceFileError(
            f"{source}:1: its columns are separated by {other!r}, not {separator!r}; set "
            f'separator: "{_SHOWN.get(other, other)}" (format: kind: columns)'
        )
    require(source, header, names)
    if not re.compile(rb"\S").search(content, begin):
        raise TraceFileError(f"{source}: has a header and no rows")
    has_quotes = b'"' in content
    # Arrow decodes an odd row for its handler, and prints a traceback where that fails.
    has_handler = content.isascii() or _is_utf8(content)

    def skip_if_blank(row: Any) -> str:
        return "error" if row.text.strip() else "skip"

    def read(name: str) -> Iterator[Any]:
        try:
            batches = pv.open_csv(
                pa.BufferReader(pa.py_buffer(content).slice(begin)),
                read_options=pv.ReadOptions(column_names=header, block_size=1 << 22),
                parse_options=pv.ParseOptions(
                    delimiter=separator,
                    invalid_row_handler=skip_if_blank if has_handler else None,
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
            pa.default_memory_pool().release_unused()  # else Arrow keeps 60 MB per 10⁶ rows

    def line_of(row: int) -> int:
        lines = (line for line, cells in _csv_rows(content, separator) if cells)
        return next(line for k, line in enumerate(lines) if k == row + 1)  # 0 is the header

    return TextTable(source, header, read, line_of)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def require(source: str, header: Collection[str], names: Iterable[str], line: int = 1) -> None:
    """Raise TraceFileError for a column that is missing or occurs twice."""
    for name in names:
        if name not in header:
            raise TraceFileError(f"{source}:{line}: no column '{name}'; {nearest(name, header)}")
        if list(header).count(name) > 1:
            raise TraceFileError(f"{source}:{line}: the column '{name}' occurs twice")


def first_line(content: bytes) -> tuple[bytes, int]:
    """(the first line that is not blank, offset of the next line), without copying the rest."""
    start = re.compile(rb"\s*").match(content)
    end = re.compile(rb"\r\n?|\n|$").search(content, start.end() if start else 0)
    assert end is not None, "$ matches the end of any text"
    return content[start.end() if start else 0 : end.start()], end.end()


def read_header(content: bytes, source: str, separator: str = ",") -> tuple[list[str], int]:
    line, begin = first_line(content)
    try:
        cells: list[str] = next(csv_rows([line.decode()], separator), [])
        return [cell.strip() for cell in cells], begin
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{source}:1: is not UTF-8 text ({error.reason})") from None


def _other_separator(content: bytes, names: Iterable[str], separator: str) -> str | None:
    """A separator other than `separator` by which the header has all `names`; None without any."""
    line = first_line(content)[0].decode("utf-8", "replace")
    for other in _SEPARATORS:
        cells = {cell.strip() for cell in next(csv_rows([line], other), [])}
        if other != separator and cells >= set(names):
            return other
    return None


def _csv_rows(content: bytes, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each row, [] for a blank line; slow, for line numbers in messages."""
    text = io.StringIO(content.decode("utf-8", "replace"), newline="")
    reader = csv_rows(text, separator)
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
    except UnicodeDecodeError as invalid:
        line = content.count(b"\n", 0, invalid.start) + 1
        return TraceFileError(f"{source}:{line}: is not UTF-8 text ({invalid.reason})")
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
