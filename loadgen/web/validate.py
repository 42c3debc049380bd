"""Checks on a worker's counts and rows before they are merged with the others': a broken or
malicious worker spoils its own share only. Each check raises Bad with the reason."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.drive.live_histogram import LiveCounts
from loadgen.records import CHUNKS, REQUESTS, FinishReason, Status, TokenSource
from loadgen.web.control_messages import METRICS, Bad, Count, Frame, Text

_ENUMS: dict[str, type[IntEnum]] = {
    "status": Status, "token_source": TokenSource, "finish_reason": FinishReason,
}  # fmt: skip
_UNREADABLE = (
    ValueError, KeyError, OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
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
    except _UNREADABLE as problem:
        raise Bad(f"its rows cannot be read: {problem}") from None
    for name, dtype in _TABLES.items():
        if tables[name].dtype != dtype or tables[name].ndim != 1:
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


Share = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Cores(_Fields, frozen=True):
    allowed: list[Count]
    online: Count | None
    own_s: float
    idle_s: float
    programs_s: float
    total_s: float
    most_stolen_s: Seconds | None


class LoopLag(_Fields, frozen=True):
    n: Count
    p50: Seconds
    p99: Seconds
    max: Seconds


class StallsReport(_Fields, frozen=True):
    over_s: Seconds
    spans_s: list[tuple[float, float, float]]


class BacklogReport(_Fields, frozen=True):
    looks: Count
    waiting: Count
    bytes_max: Count
    reads: Count
    wait_mean_s: Seconds


class Processor(_Fields, frozen=True):
    looks: Count
    usual_s: Seconds
    slow_s: Seconds
    slow_in_stalls_s: Seconds
    slow_speed: Share | None


class Gc(_Fields, frozen=True):
    collections: Count
    pause_max_s: Seconds


class Decoding(_Fields, frozen=True):
    cpu_s: Seconds
    wall_s: Seconds


class ConnectionsReport(_Fields, frozen=True):
    opened: Count
    reused: Count
    known: list[Text]
    not_opened_ahead: int = 0


class SelfReport(_Fields, frozen=True):
    shard: Count
    broken: Text
    window_s: Seconds
    cpu_share: Share | None
    run_delay_share: Share | None
    throttled_share: Share | None
    stolen_share: Share | None
    cores: Cores | None
    loop_lag_s: LoopLag
    stalls: StallsReport
    backlog: BacklogReport | None
    processor: Processor | None
    gc: Gc
    decoding: Decoding
    connections: ConnectionsReport
    encoded_late: Count
    spilled_bytes: Count


def check_self_report(told: Mapping[str, Any], shard: int) -> None:
    """That it is whole, of finite numbers, and that shard's. Raises Bad."""
    try:
        found = msgspec.convert(dict(told), SelfReport)
    except msgspec.ValidationError as problem:
        raise Bad(f"what it measured of itself: {problem}") from None
    if found.shard != shard:
        raise Bad(f"what shard {found.shard} measured of itself")
    if not all(math.isfinite(one) for one in _floats(told)):
        raise Bad("what it measured of itself has a number that is none")


def _floats(told: Any) -> Iterator[float]:
    if isinstance(told, float):
        yield told
    elif isinstance(told, Mapping):
        for one in told.values():
            yield from _floats(one)
    elif isinstance(told, (list, tuple)):
        for one in told:
            yield from _floats(one)
