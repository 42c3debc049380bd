"""What a worker counted and recorded, looked at before it is put together with the others': one
that is broken, or lies, spoils its own share only. Everything here raises Bad, saying why."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.live_histogram import LiveCounts
from loadgen.errors import RunInvalid
from loadgen.json_section import read_section
from loadgen.records import CHUNKS, REQUESTS, FinishReason, Status, TokenSource
from loadgen.self_report import SelfReport
from loadgen.web.control_messages import Bad, Frame
from loadgen.web.frame_builder import METRICS

_ENUMS: dict[str, type[IntEnum]] = {
    "status": Status, "token_source": TokenSource, "finish_reason": FinishReason,
}  # fmt: skip
_UNREADABLE = (
    ValueError, KeyError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_MOST_TEXT = 2000
_SIGNED = (
    "cores.own_s", "cores.idle_s", "cores.programs_s", "cores.total_s", "stalls.spans_s",
)  # fmt: skip
"""Readings that may be negative: differences of clocks."""
_TABLES = {"requests": REQUESTS, "chunks": CHUNKS}


def check_frame(frame: Frame, n_requests: int) -> None:
    """That a frame may be of a share of `n_requests`."""
    if not math.isfinite(frame.now_s):
        raise Bad(f"a frame of the instant {frame.now_s}")
    ended = sum(frame.by_status)
    for what, n in (("ended", ended), ("released", frame.released), ("sent", frame.sent)):
        if n > n_requests:
            raise Bad(f"{n} requests {what}, of {n_requests}")
    if sum(sum(one.by_status) for one in frame.classes.values()) > n_requests:
        raise Bad(f"its classes have more than {n_requests} requests that ended")
    for metric in set(METRICS) & frame.histograms.keys():
        counts = LiveCounts()
        try:
            counts.add_encoded(frame.histograms[metric])
        except ValueError as problem:
            raise Bad(f"{metric}: {problem}") from None
        if metric != "itl" and counts.n > n_requests:  # of gaps there are many per request
            raise Bad(f"{metric} of {counts.n} requests, of {n_requests}")


def check_part(data: bytes, ids: NDArray[np.uint32]) -> None:
    """That rows are those of a share: of its requests, each once, with names for its numbers."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(one.file_size for one in archive.infolist())
        if unpacked > len(data):  # ours are stored as they are
            raise Bad(f"its rows would be {unpacked} bytes unpacked")
        with np.load(io.BytesIO(data)) as arrays:
            found = {name: arrays[name] for name in (*_TABLES, "errors", "remotes")}
    except _UNREADABLE as problem:
        raise Bad(f"its rows cannot be read: {problem}") from None
    for name, dtype in _TABLES.items():
        if found[name].dtype != dtype or found[name].ndim != 1:
            raise Bad(f"its table of {name} has other columns than ours")
    rows = found["requests"]
    if not np.array_equal(np.sort(rows["request_id"]), np.sort(ids)):
        raise Bad("its rows are not those of its requests")
    if not np.isin(found["chunks"]["request_id"], ids).all():
        raise Bad("its chunks are not those of its requests")
    for field, enum in _ENUMS.items():
        if not np.isin(rows[field], list(enum)).all():
            raise Bad(f"its rows have a {field} that there is not")
    for field, names in (("error_id", "errors"), ("remote_id", "remotes")):
        if found[names].dtype.kind != "U" or (rows[field] >= len(found[names])).any():
            raise Bad(f"its rows have numbers in {field} that {names} does not name")


def read_self_report(content: Mapping[str, Any], shard: int) -> SelfReport:
    """A worker's measurements of itself: every field and no other, finite numbers, of that
    shard."""
    try:
        report = read_section(content, SelfReport, "what it measured of itself")
    except RunInvalid as problem:
        raise Bad(str(problem)) from None
    for path, value in _leaves(content):
        where = f"what it measured of itself: {path}"
        if isinstance(value, str) and len(value) > _MOST_TEXT:
            raise Bad(f"{where}: expected length <= {_MOST_TEXT}, found {len(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise Bad(f"{where}: {value} is a number that is none")
        if isinstance(value, int | float) and value < 0 and not path.startswith(_SIGNED):
            raise Bad(f"{where}: expected a number >= 0, found {value}")
    unknown = {path for path, _ in _leaves(content)} - {
        path for path, _ in _leaves(report.to_json())
    }
    if unknown:
        raise Bad(f"what it measured of itself has the unknown field {min(unknown)}")
    if report.shard != shard:
        raise Bad(f"what shard {report.shard} measured of itself")
    return report


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in decoded JSON that is no mapping and no list."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value
