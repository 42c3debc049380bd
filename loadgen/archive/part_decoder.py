"""Parts of decoded rows, from requests in memory or in files of their bytes as received.

    shard-0-0007.partial → shard-0-0007.raw → shard-0-0007.claimed → shard-0-0007.npz

A `.partial` file is still being written; its last record may be cut. A `.raw` file is complete. The
process that renames it to `.claimed` decodes it. The first record is a `RawHead`, each other record
a request. A record is its length, the CRC-32 of the length, the CRC-32 of the content, 4 bytes
each, and the content in MessagePack.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.archive.decode import Decoded, decode
from loadgen.archive.exchange import Exchange
from loadgen.archive.store import Ids, Part, read_parts, undecoded, write_part
from loadgen.errors import RunInvalid
from loadgen.fields import as_data
from loadgen.manifest.json_section import JsonObject
from loadgen.records import CHUNKS, REQUESTS, Chunks, Names, Requests, Status, empty_requests
from targets.base import TARGETS, Adapter
from targets.safe_text import SecretForms

PARTIAL, RAW, CLAIMED = ".partial", ".raw", ".claimed"
_PLAN = np.dtype([("request_id", "u4"), ("released_s", "f8")])
_BUFFER_BYTES = 1 << 16
_WRITERS_POLL_S = 0.05
_FRAME = struct.Struct(">III")  # length, its CRC-32, the CRC-32 of the content
_OF_REQUESTS = ("model", "extra_body")  # fields of a codec that decoding does not need
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


class RawHead(NamedTuple):
    """What decoding a file needs beyond its requests: the epoch (monotonic) and the codec."""

    epoch_ns: int
    codec: JsonObject

    @classmethod
    def of(cls, epoch_ns: int, adapter: Adapter) -> RawHead:
        """Without the fields that may hold a secret."""
        fields = as_data(adapter, "json", exclude_defaults=True)
        kept = {name: value for name, value in fields.items() if name not in _OF_REQUESTS}
        return cls(epoch_ns, {"kind": adapter.kind, **kept})

    def adapter(self) -> Adapter:
        """Raises UnknownKind for a codec of a plug-in that is not loaded."""
        return TARGETS.build(self.codec)


class RawFile:
    """A new file of requests as received; it has its name `path` (`.raw`) after `close`. Secrets in
    the answers are replaced by asterisks."""

    def __init__(self, path: Path, head: RawHead, secrets: SecretForms) -> None:
        self._path, self._partial, self._secrets = path, path.with_suffix(PARTIAL), secrets
        self._file = self._partial.open("wb", buffering=_BUFFER_BYTES)
        self._write(head)

    def append(self, ended: Ended) -> None:
        self._write(ended._replace(exchange=_masked(ended.exchange, self._secrets)))

    def close(self) -> Path:
        self._file.close()
        return self._partial.rename(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # of bytes that are still to be written
            self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink()

    def _write(self, content: Ended | RawHead) -> None:
        record = msgspec.msgpack.encode(content)
        length = len(record).to_bytes(4, "big")
        self._file.write(_FRAME.pack(len(record), zlib.crc32(length), zlib.crc32(record)))
        self._file.write(record)


def _masked(exchange: Exchange, secrets: SecretForms) -> Exchange:
    """An exchange without the secrets that its server repeated, of the same reads and sizes."""
    if not secrets:
        return exchange
    texts = (exchange.error, exchange.content_type, exchange.content_encoding, exchange.limits)
    body = b"".join(exchange.parts)
    if not (secrets.are_in(body) or any(secrets.are_in(text.encode()) for text in texts if text)):
        return exchange
    rest = iter(secrets.masked(body))
    error, content_type, encoding, limits = (
        secrets.masked(text.encode()).decode(errors="replace") for text in texts
    )
    return replace(
        exchange,
        parts=[bytes(islice(rest, len(part))) for part in exchange.parts],
        error=error,
        content_type=content_type,
        content_encoding=encoding,
        limits=limits,
    )


def mark_as_written(directory: Path) -> None:
    """Marks the directory of the parts as being written by this process and its forks, until they
    end: `wait_for_writers` waits for them. Without effect on a file system without locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(directory, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)


def wait_for_writers(directory: Path, most_s: float) -> bool:
    """Waits until no process writes parts into a directory; False if there is still one after
    `most_s`."""
    end_s = time.monotonic() + most_s
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end_s:
                    return False
                time.sleep(_WRITERS_POLL_S)
                continue
            except OSError:  # a file system without locks
                pass
            return True
    finally:
        os.close(descriptor)


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


def read_raw(path: Path) -> tuple[RawHead, Iterator[Ended]] | None:
    """The head and the requests of a file; None for a `.partial` file that ends before its first
    request. Raises RunInvalid for a damaged file, also while the requests are read. The last record
    of a `.partial` file may be cut."""
    try:
        contents = _contents(path.read_bytes(), may_be_cut=path.suffix == PARTIAL)
        head = next(contents, None)
        if head is None and path.suffix == PARTIAL:
            return None
        decoded = msgspec.msgpack.decode(head or b"", type=RawHead)
    except (OSError, ValueError) as error:
        raise RunInvalid(f"{path}: damaged: {error}") from None
    return decoded, _requests(contents, path)


def _requests(contents: Iterator[memoryview], path: Path) -> Iterator[Ended]:
    decoder = msgspec.msgpack.Decoder(Ended)
    try:
        for content in contents:
            yield decoder.decode(content)
    except ValueError as error:
        raise RunInvalid(f"{path}: damaged: {error}") from None


def _contents(data: bytes, *, may_be_cut: bool) -> Iterator[memoryview]:
    """The contents of the records. Raises ValueError for a wrong checksum, and for a last record
    that is cut unless it `may_be_cut`."""
    start = 0
    while start < len(data):
        begin = start + _FRAME.size
        if begin <= len(data):
            length, of_length, of_content = _FRAME.unpack_from(data, start)
            if zlib.crc32(data[start : start + 4]) != of_length:
                raise ValueError(f"a wrong checksum at byte {start}")
            if begin + length <= len(data):
                content = memoryview(data)[begin : begin + length]
                if zlib.crc32(content) != of_content:
                    raise ValueError(f"a wrong checksum at byte {begin}")
                yield content
                start = begin + length
                continue
        if may_be_cut:
            return
        raise ValueError("the last record is cut")


@dataclass(frozen=True)
class PartDecoder:
    """Decodes requests of a shard into parts. `redact` is applied to each server text that is
    stored."""

    shard: int
    adapter: Adapter
    redact: Callable[[str], str] = str

    def decode_file(self, path: Path, advance: Advance = lambda n_bytes: None) -> None:
        """Writes the part of a claimed `.raw` file, and removes that file. Raises RunInvalid if it
        is damaged."""
        claimed = path.with_suffix(CLAIMED)
        if not part_of(path).exists() and (raw := read_raw(claimed)) is not None:
            self.write_part(part_of(path), *raw, advance)
        claimed.unlink()

    def write_part(
        self,
        path: Path,
        head: RawHead,
        requests: Iterable[Ended],
        advance: Advance = lambda n_bytes: None,
    ) -> None:
        """Writes the part of the requests in a file."""
        part = self.part(requests, head.epoch_ns, advance=advance)
        write_part(path, *part, lambda: advance(0))

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


def decode_left(
    directory: Path,
    decoder: Callable[[int], PartDecoder] | None = None,
    unwritten: list[Part] | None = None,
) -> None:
    """Decodes the files that shards left in a directory: their processes died, or the processes
    that decoded for them. `decoder` returns the decoder of a shard; by default the head of a file
    names its codec. A part that cannot be written is added to `unwritten`, if given, and its file
    stays. Raises RunInvalid that names a damaged file, UnknownKind for a codec of a plug-in that is
    not loaded."""
    for path in undecoded(directory):
        raw = None if part_of(path).exists() else read_raw(path)
        if raw is not None:
            shard = int(path.stem.split("-")[1])
            own = PartDecoder(shard, raw[0].adapter()) if decoder is None else decoder(shard)
            part = own.part(raw[1], raw[0].epoch_ns)
            try:
                write_part(part_of(path), *part)
            except OSError:
                if unwritten is None:
                    raise
                unwritten.append(part)
                continue
        path.unlink()


def n_recorded(parts: Path) -> int:
    """The requests whose ends are recorded in the directory of the parts. Raises RunInvalid for a
    damaged file."""
    ends = sum(int((rows["status"] != Status.lost).sum()) for rows, _, _ in read_parts(parts))
    left = [path for path in undecoded(parts) if not part_of(path).exists()]
    raws = [raw for path in left if (raw := read_raw(path)) is not None]
    return ends + sum(1 for _, requests in raws for _ in requests)


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
            _fitting(decoded.hidden_tokens, _MOST_U4),
            min(decoded.unknown_events, _MOST_U2),
            decoded.retry_after_s,
            decoded.answer_crc32,
            _fitting(decoded.results, _MOST_U4),
            _fitting(decoded.reasoning_tokens, _MOST_U4),
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
