"""Checks on a worker's counts and rows before they are merged with the others': a broken or
malicious worker spoils its own share only. Each check raises Bad with the reason."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import RunInvalid
from loadgen.live.live_histogram import LiveCounts
from loadgen.manifest.json_section import read_section
from loadgen.manifest.self_report import SelfReport
from loadgen.records import CHUNKS, REQUESTS, FinishReason, Status, TokenSource
from loadgen.web.control_messages import METRICS, Bad, Frame

_ENUMS: dict[str, type[IntEnum]] = {
    "status": Status,
    "token_source": TokenSource,
    "finish_reason": FinishReason,
}
_MOST_TEXT = 2000
_SIGNED = (
    "cores.own_s",
    "cores.idle_s",
    "cores.programs_s",
    "cores.total_s",
    "stalls.spans_s",
)
"""Readings that may be negative: differences of clocks."""
_TABLES = {"requests": REQUESTS, "chunks": CHUNKS}


def check_frame(frame: Frame, n_requests: int) -> None:
    """Checks that a frame can belong to a share of `n_requests`."""
    if not math.isfinite(frame.now_s):
        raise Bad(f"a frame of the time {frame.now_s}")
    ended = sum(frame.by_status)
    for state, n in (("ended", ended), ("released", frame.released), ("sent", frame.sent)):
        if n > n_requests:
            raise Bad(f"{n} requests {state}, of {n_requests} in its share")
    if sum(sum(counts.by_status) for counts in frame.classes.values()) > n_requests:
        raise Bad(f"its classes count more than {n_requests} ended requests")
    for metric in set(METRICS) & frame.histograms.keys():
        counts = LiveCounts()
        try:
            counts.add_encoded(frame.histograms[metric])
        except ValueError as problem:
            raise Bad(f"{metric}: {problem}") from None
        if metric != "itl" and counts.n > n_requests:  # a request has many gaps
            raise Bad(f"{metric} of {counts.n} requests, of {n_requests} in its share")


def check_part(data: bytes, ids: NDArray[np.uint32]) -> None:
    """Checks that rows are those of a share: each of its requests once, with a name for each
    number."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > len(data):  # slobench stores rows uncompressed
            raise Bad(f"its rows would unpack to {unpacked} bytes")
        with np.load(io.BytesIO(data)) as arrays:
            tables = {name: arrays[name] for name in (*_TABLES, "errors", "remotes")}
    except Bad:
        raise
    except Exception as problem:  # a worker's boundary: any bytes, through zipfile and NumPy
        raise Bad(f"its rows cannot be read: {problem}") from None
    for name, table in tables.items():
        if (
            not isinstance(table, np.ndarray) or table.ndim != 1
        ):  # NumPy returns other files as bytes
            raise Bad(f"its {name} are no list")
    for name, dtype in _TABLES.items():
        if tables[name].dtype != dtype:
            raise Bad(f"the columns of its table {name} are not those of this version")
    rows = tables["requests"]
    if not np.array_equal(np.sort(rows["request_id"]), np.sort(ids)):
        raise Bad("the requests of its rows are not those of its share")
    if not np.isin(tables["chunks"]["request_id"], ids).all():
        raise Bad("its chunks belong to requests outside its share")
    for field, enum in _ENUMS.items():
        if not np.isin(rows[field], list(enum)).all():
            raise Bad(f"its rows have an unknown {field}")
    for field, names in (("error_id", "errors"), ("remote_id", "remotes")):
        if tables[names].dtype.kind != "U" or (rows[field] >= len(tables[names])).any():
            raise Bad(f"its {field} column has numbers without an entry in {names}")


def read_self_report(content: Mapping[str, Any], shard: int) -> SelfReport:
    """The self-report of a load process, checked: all fields and no other, finite numbers, of that
    shard."""
    try:
        report = read_section(content, SelfReport, "its self-report")
    except RunInvalid as problem:
        raise Bad(str(problem)) from None
    for path, value in _leaves(content):
        where = f"its self-report: {path}"
        if isinstance(value, str) and len(value) > _MOST_TEXT:
            raise Bad(f"{where}: expected length <= {_MOST_TEXT}, found {len(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise Bad(f"{where}: expected a finite number, found {value}")
        if isinstance(value, int | float) and value < 0 and not path.startswith(_SIGNED):
            raise Bad(f"{where}: expected a number >= 0, found {value}")
    known = {path for path, _ in _leaves(report.to_json())}
    if unknown := {path for path, _ in _leaves(content)} - known:
        raise Bad(f"its self-report has the unknown field {min(unknown)}")
    if report.shard != shard:
        raise Bad(f"its self-report is of shard {report.shard}")
    return report


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each value in decoded JSON that is neither a mapping nor a list."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value
