"""Parts of decoded rows, from requests in memory or in files of their bytes as received.

    shard-0-0007.partial → shard-0-0007.raw → shard-0-0007.claimed → shard-0-0007.npz

A `.partial` file is still being written; its last record may be cut. A `.raw` file is complete. The
process that renames it to `.claimed` decodes it. A record is its length, 4 bytes, and the request
in MessagePack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.drive.decode import Decoded, decode
from loadgen.drive.store import Ids, Part, write_part
from loadgen.drive.transport import Exchange
from loadgen.records import CHUNKS, REQUESTS, Chunks, Names, Requests, Status, empty_requests
from targets.base import Adapter

PARTIAL, RAW, CLAIMED = ".partial", ".raw", ".claimed"
_PLAN = np.dtype([("request_id", "u4"), ("released_s", "f8")])
_BUFFER_BYTES = 1 << 16
_LENGTH_BYTES = 4
_BATCH = 512
_MOST_U2, _MOST_U4 = 2**16 - 1, 2**32 - 1
# Columns that a decoded exchange fills, and those of them that are times.
_COLUMNS = [
    name for name in REQUESTS.names or () if name not in ("request_id", "shard", "released_s")
]
_TIMES = (*_COLUMNS[: _COLUMNS.index("done_s") + 1], "finish_s")
Advance = Callable[[int], None]
"""Called before each step with the bytes that the step works on."""


class Ended(NamedTuple):
    """A request that was sent, as received."""

    request_id: int
    released_s: float
    exchange: Exchange


class Unsent(NamedTuple):
    """Requests that were not sent, or whose ends are unknown: arrays of the same length.
    `released_s` NaN: never released; `reason_ids` are indices into `reasons`."""

    request_ids: NDArray[np.uint32]
    released_s: NDArray[np.float64]
    status: NDArray[np.uint8]
    reason_ids: NDArray[np.uint16]
    reasons: tuple[str, ...]


class RawFile:
    """A new file of requests as received; it has its name `path` (`.raw`) after `close`."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_suffix(PARTIAL)
        self._file = self._partial.open("wb", buffering=_BUFFER_BYTES)

    def append(self, ended: Ended) -> None:
        record = msgspec.msgpack.encode(ended)
        self._file.write(len(record).to_bytes(_LENGTH_BYTES, "big"))
        self._file.write(record)

    def close(self) -> Path:
        self._file.close()
        return self._partial.rename(self._path)


def claim(path: Path) -> bool:
    """Reserves a `.raw` file for the caller to decode; False if another process has done so."""
    try:
        path.rename(path.with_suffix(CLAIMED))
    except FileNotFoundError:
        return False
    return True


def part_of(path: Path) -> Path:
    """The part with the rows of a `.raw` file."""
    return path.with_suffix(".npz")


def records(data: bytes) -> Iterator[Ended]:
    """The requests in the bytes of a file, without a last record that is cut."""
    decoder, start = msgspec.msgpack.Decoder(Ended), 0
    while len(data) >= start + _LENGTH_BYTES:
        end = start + _LENGTH_BYTES + int.from_bytes(data[start : start + _LENGTH_BYTES], "big")
        if end > len(data):
            return
        yield decoder.decode(memoryview(data)[start + _LENGTH_BYTES : end])
        start = end


@dataclass(frozen=True)
class PartDecoder:
    """Decodes requests of a shard into parts. `redact` is applied to each server text that is
    stored."""

    shard: int
    adapter: Adapter
    redact: Callable[[str], str] = str

    def decode_file(
        self, path: Path, epoch_ns: int, advance: Advance = lambda n_bytes: None
    ) -> None:
        """Writes the part of a claimed `.raw` file, and removes that file."""
        claimed = path.with_suffix(CLAIMED)
        if not part_of(path).exists():
            part = self.part(records(claimed.read_bytes()), epoch_ns, advance=advance)
            write_part(part_of(path), *part, lambda: advance(0))
        claimed.unlink()

    def part(
        self,
        ended: Iterable[Ended],
        epoch_ns: int,
        unsent: Unsent | None = None,
        advance: Advance = lambda n_bytes: None,
    ) -> Part:
        """The rows of requests, sorted by request id, and their chunks. Times count from `epoch_ns`
        (monotonic)."""
        sent, errors, remotes = [*ended], Ids(), Ids()
        n_sent = len(sent)
        plan = np.zeros(n_sent + (0 if unsent is None else len(unsent.status)), _PLAN)
        plan["request_id"][:n_sent] = [row.request_id for row in sent]
        plan["released_s"][:n_sent] = [row.released_s for row in sent]
        if unsent is not None:
            plan["request_id"][n_sent:] = unsent.request_ids
            plan["released_s"][n_sent:] = unsent.released_s
        rows = empty_requests(plan)
        rows["shard"], rows["released_s"] = self.shard, plan["released_s"]
        if unsent is not None:
            rows["status"][n_sent:] = unsent.status
            error_ids = np.array([errors.id(reason) for reason in unsent.reasons], "u2")
            rows["error_id"][n_sent:] = error_ids[unsent.reason_ids]
        columns = ExchangeColumns(rows, epoch_ns)
        for at, (_, _, exchange) in enumerate(sent):
            advance(exchange.n_bytes)
            self._add(at, exchange, columns, errors, remotes)
        advance(columns.n_chunk_bytes)
        chunks = columns.finish()
        rows = rows[np.argsort(rows["request_id"])]
        return rows, chunks, Names(errors=errors.texts(), remotes=remotes.texts())

    def _add(
        self, at: int, exchange: Exchange, columns: ExchangeColumns, errors: Ids, remotes: Ids
    ) -> None:
        remote_id = remotes.id(exchange.remote)
        try:
            decoded = decode(exchange, self.adapter)
            error_id = errors.id(self.redact(decoded.error))
            columns.add(at, exchange, decoded, remote_id, error_id)
        except Exception as error:  # a codec's bug on a body must not cost the other rows
            reason = f"not decodable ({type(error).__name__}: {error}); please report this body"
            error_id = errors.id(self.redact(reason))
            first_ns = exchange.times[0] if exchange.times else 0
            decoded = Decoded(
                Status.stream_error, n_bytes=exchange.n_bytes, first_chunk_ns=first_ns
            )
            columns.add(at, exchange, decoded, remote_id, error_id)


def decode_left(directory: Path, decoder: Callable[[int], PartDecoder], epoch_ns: int) -> None:
    """Decodes the files that shards left in a directory: their processes died, or the processes
    that decoded for them. `decoder` returns the decoder of a shard."""
    for suffix in (PARTIAL, RAW, CLAIMED):
        for path in sorted(directory.glob(f"shard-*{suffix}")):
            shard = int(path.stem.split("-")[1])
            path.rename(path.with_suffix(CLAIMED))
            decoder(shard).decode_file(path.with_suffix(RAW), epoch_ns)


class ExchangeColumns:
    """Writes decoded exchanges into `rows` and converts nanoseconds to seconds since `epoch_ns`.

    Column by column for `_BATCH` requests at a time: writing a field of a numpy row takes 0.3 µs,
    and 23 fields per request took longer than decoding it.
    """

    def __init__(self, rows: Requests, epoch_ns: int) -> None:
        self._rows, self._epoch_ns = rows, epoch_ns
        self._at: list[int] = []
        self._lines: list[tuple[float, ...]] = []
        self._chunk_ns: list[list[int]] = []
        self._chunk_tokens: list[list[int]] = []
        self._chunks: list[Chunks] = []

    def add(
        self, row: int, exchange: Exchange, decoded: Decoded, remote_id: int, error_id: int
    ) -> None:
        """Adds a row. Adds nothing if a count of `decoded` is not a number, and raises its
        TypeError."""
        counts = decoded.chunk_tokens
        if counts and not (min(counts) >= 0 and max(counts) <= _MOST_U2):
            counts = [_fitting(count, _MOST_U2) for count in counts]
        line = (  # in the order of _COLUMNS
            exchange.sent_ns,
            exchange.connected_ns,
            exchange.headers_ns,
            decoded.first_chunk_ns,
            decoded.first_token_ns,
            decoded.first_answer_ns,
            decoded.last_token_ns,
            exchange.done_ns,
            exchange.reused,
            _fitting(decoded.input_tokens, _MOST_U4),
            _fitting(decoded.cached_tokens, _MOST_U4),
            _fitting(decoded.output_tokens, _MOST_U4),
            _fitting(decoded.first_chunk_tokens, _MOST_U2) or (counts[0] if counts else 0),
            decoded.token_source,
            len(decoded.chunk_ns),
            decoded.n_bytes,
            decoded.status,
            exchange.http_status,
            decoded.finish_reason,
            error_id,
            remote_id,
            decoded.server.get("queue_s", np.nan),
            decoded.server.get("ttft_s", np.nan),
            decoded.finish_ns,
        )
        self._at.append(row)
        self._lines.append(line)
        self._chunk_ns.append(decoded.chunk_ns)
        self._chunk_tokens.append(counts)
        if len(self._lines) == _BATCH:
            self._write()

    @property
    def n_chunk_bytes(self) -> int:
        """The size of the chunks that `finish` will sort."""
        return sum(chunks.nbytes for chunks in self._chunks)

    def finish(self) -> Chunks:
        """Writes the last batch and returns all chunks, grouped by request id."""
        self._write()
        chunks = np.concatenate([np.empty(0, CHUNKS), *self._chunks])
        return chunks[np.argsort(chunks["request_id"], kind="stable")]

    def _write(self) -> None:
        at = np.array(self._at, np.intp)
        columns = zip(*self._lines, strict=True)  # none for an empty batch
        for name, values in zip(_COLUMNS, columns, strict=False):
            if name in _TIMES:
                ns = np.array(values, np.int64)
                self._rows[name][at] = np.where(ns != 0, self._seconds(ns), np.nan)
            else:
                self._rows[name][at] = values
        self._write_chunks(at)
        for batch in (self._at, self._lines, self._chunk_ns, self._chunk_tokens):
            batch.clear()

    def _write_chunks(self, at: NDArray[np.intp]) -> None:
        sizes = np.fromiter(map(len, self._chunk_ns), np.intp, len(at))
        n = int(sizes.sum())
        if not n:
            return
        chunks = np.empty(n, CHUNKS)
        chunks["request_id"] = np.repeat(self._rows["request_id"][at], sizes)
        received_ns = np.fromiter(chain.from_iterable(self._chunk_ns), np.int64, n)
        chunks["received_s"] = self._seconds(received_ns)
        chunks["tokens"] = np.fromiter(chain.from_iterable(self._chunk_tokens), np.int64, n)
        self._chunks.append(chunks)

    def _seconds(self, ns: NDArray[np.int64]) -> NDArray[np.float64]:
        seconds: NDArray[np.float64] = np.multiply(ns - self._epoch_ns, 1e-9, dtype=np.float64)
        return seconds


def _fitting(count: int, most: int) -> int:
    """A count stated by a server; 0 (unknown) if it does not fit into its column."""
    return count if 0 <= count <= most else 0
