"""Recorded rows of a shard: raw during the run, decoded after it (docs/decisions/0004)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.decode import Decoded, decode
from loadgen.drive.transport import Exchange
from loadgen.records import (
    CHUNKS,
    REQUESTS,
    Chunks,
    Names,
    Requests,
    Schedule,
    Status,
    empty_requests,
)
from targets.base import Adapter

_MAX_DISTINCT = 1000
_MAX_TEXT = 300
_BATCH = 512
_MOST_U2, _MOST_U4 = 2**16 - 1, 2**32 - 1
# Columns that a decoded exchange fills, and those of them that are times.
_COLUMNS = [
    name for name in REQUESTS.names or () if name not in ("request_id", "shard", "released_s")
]
_TIMES = (*_COLUMNS[: _COLUMNS.index("done_s") + 1], "finish_s")


class Ids:
    """Small ids for strings, in order of appearance; 0 is the empty string. After `_MAX_DISTINCT`
    different strings all further strings share an id, so that a server with a nonce in each error
    message cannot fill the table."""

    def __init__(self) -> None:
        self._ids = {"": 0}

    def id(self, text: str) -> int:
        text = text[:_MAX_TEXT]
        if text not in self._ids and len(self._ids) > _MAX_DISTINCT:
            text = f"(more than {_MAX_DISTINCT} different texts)"
        return self._ids.setdefault(text, len(self._ids))

    def texts(self) -> tuple[str, ...]:
        return tuple(self._ids)


class ShardRecorder:
    """The recorder of a shard.

    `finish` decodes the exchanges; until then they are stored as received. Bodies beyond
    `memory_bytes` go to a file at `spill_path`. `redact` is applied to each server text that is
    stored. `epoch_ns` may be set at any time before `finish`.
    """

    def __init__(
        self,
        schedule: Schedule,
        adapter: Adapter,
        epoch_ns: int,
        shard: int,
        spill_path: Path,
        memory_bytes: int = 512 << 20,
        redact: Callable[[str], str] = str,
    ) -> None:
        self.rows = empty_requests(schedule)
        self.rows["shard"] = shard
        self._released_s = self.rows["released_s"]  # a view: a write by field takes twice as long
        self._adapter, self.epoch_ns, self._redact = adapter, epoch_ns, redact
        self._errors, self._remotes = Ids(), Ids()
        self._exchanges: list[Exchange] = []
        self._spill = Spill(spill_path, memory_bytes)
        self._has_ended = np.zeros(len(schedule), bool)
        self.n_reads = 0  # socket reads with body bytes; counted by `finish`

    @property
    def spilled_bytes(self) -> int:
        return self._spill.n_bytes

    # called by the dispatcher and the client
    def released(self, row: int, release_s: float) -> None:
        self._released_s[row] = release_s

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._has_ended[row] = True
        self.rows["status"][row] = status
        self.rows["error_id"][row] = self._errors.id(reason)

    def ended(self, exchange: Exchange) -> None:
        self._spill.keep(exchange)
        self._exchanges.append(exchange)

    def finish(
        self, lost: str = "", advance: Callable[[int], None] = lambda n_bytes: None
    ) -> tuple[Requests, Chunks, Names]:
        """Decodes everything; returns the rows, their chunks grouped by request id, and the names.
        Rows without a recorded end get the status `lost` with the reason `lost`. Calls `advance`
        before each step with the bytes that the step works on."""
        columns = ExchangeColumns(self.rows, self.epoch_ns)
        for exchange in self._exchanges:
            advance(exchange.n_bytes)
            self._spill.restore(exchange)
            self._decode(exchange, columns)
            exchange.parts = []
        self._exchanges.clear()
        self._spill.close()
        for row in np.flatnonzero(~self._has_ended).tolist():
            self.unsent(row, Status.lost, lost or "no end was recorded")
        advance(columns.n_chunk_bytes)
        chunks = columns.finish()
        return self.rows, chunks, Names(errors=self._errors.texts(), remotes=self._remotes.texts())

    def _decode(self, exchange: Exchange, columns: ExchangeColumns) -> None:
        self._has_ended[exchange.row] = True
        self.n_reads += len(set(exchange.times))
        remote_id = self._remotes.id(exchange.remote)
        try:
            decoded = decode(exchange, self._adapter)
            error_id = self._errors.id(self._redact(decoded.error))
            columns.add(exchange, decoded, remote_id, error_id)
        except Exception as error:  # a codec's bug on a body must not cost the other rows
            reason = f"not decodable ({type(error).__name__}: {error}); please report this body"
            error_id = self._errors.id(self._redact(reason))
            first_ns = exchange.times[0] if exchange.times else 0
            decoded = Decoded(
                Status.stream_error, n_bytes=exchange.n_bytes, first_chunk_ns=first_ns
            )
            columns.add(exchange, decoded, remote_id, error_id)


class Spill:
    """Stores the bodies of finished exchanges: in memory up to `memory_bytes`, then in a file that
    is only appended to. Writing 16 kB takes about 10 µs; decoding them at once would take ten times
    as long, while other requests are being measured."""

    def __init__(self, path: Path, memory_bytes: int) -> None:
        self._path, self._left_bytes = path, memory_bytes
        self._file: BinaryIO | None = None
        self._places: dict[int, tuple[int, list[int]]] = {}  # row: offset, sizes of the parts
        self.n_bytes = 0

    def keep(self, exchange: Exchange) -> None:
        self._left_bytes -= exchange.n_bytes
        if self._left_bytes >= 0:
            return
        if self._file is None:
            self._file = self._path.open("w+b")
        self._places[exchange.row] = self.n_bytes, [len(part) for part in exchange.parts]
        body = b"".join(exchange.parts)
        self._file.write(body)
        self.n_bytes += len(body)
        exchange.parts = []

    def restore(self, exchange: Exchange) -> None:
        """Reads the parts of an exchange back, if they are in the file."""
        place = self._places.pop(exchange.row, None)
        if place is None or self._file is None:
            return
        offset, sizes = place
        self._file.seek(offset)
        exchange.parts = [self._file.read(size) for size in sizes]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._path.unlink()
            self._file = None


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

    def add(self, exchange: Exchange, decoded: Decoded, remote_id: int, error_id: int) -> None:
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
        self._at.append(exchange.row)
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
