"""Decoded exchanges on their way into the tables, some hundreds at a time.

A field of a numpy row takes 0.3 µs to write, and a request has twenty-five: writing them one by one
took longer than decoding the request. Here a request is a tuple, and a column is written at once.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.decode import Decoded
from loadgen.drive.transport import Exchange
from loadgen.records import CHUNKS, Chunks, Requests

_BATCH = 512
_MOST_U2, _MOST_U4 = 2**16 - 1, 2**32 - 1
_INSTANTS = (
    "sent_s",
    "connected_s",
    "headers_s",
    "first_chunk_s",
    "first_token_s",
    "first_answer_s",
    "last_token_s",
    "done_s",
)
_OTHERS = (
    "reused_connection",
    "bytes",
    "http_status",
    "remote_id",
    "status",
    "error_id",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "first_chunk_tokens",
    "token_source",
    "chunks",
    "finish_reason",
    "server_queue_s",
    "server_ttft_s",
)
Line = tuple[float, ...]


class ExchangeColumns:
    """Writes into `rows`; instants are nanoseconds, turned into seconds since `epoch_ns`."""

    def __init__(self, rows: Requests, epoch_ns: int) -> None:
        self._rows, self._epoch_ns = rows, epoch_ns
        self._at: list[int] = []
        self._lines: list[Line] = []
        self._chunk_ns: list[list[int]] = []
        self._chunk_tokens: list[list[int]] = []
        self._chunks: list[Chunks] = []

    def add(self, exchange: Exchange, decoded: Decoded, remote_id: int, error_id: int) -> None:
        """Raises whatever a count that is no number raises, and then has added nothing."""
        counts = decoded.chunk_tokens
        if counts and not (min(counts) >= 0 and max(counts) <= _MOST_U2):
            counts = [_fitting(count, _MOST_U2) for count in counts]
        line = (
            exchange.sent_ns,
            exchange.connected_ns,
            exchange.headers_ns,
            decoded.first_chunk_ns,
            decoded.first_token_ns,
            decoded.first_answer_ns,
            decoded.last_token_ns,
            exchange.done_ns,
            exchange.reused,
            decoded.n_bytes,
            exchange.http_status,
            remote_id,
            decoded.status,
            error_id,
            _fitting(decoded.input_tokens, _MOST_U4),
            _fitting(decoded.cached_tokens, _MOST_U4),
            _fitting(decoded.output_tokens, _MOST_U4),
            counts[0] if counts else 0,
            decoded.token_source,
            len(decoded.chunk_ns),
            decoded.finish_reason,
            decoded.server.get("queue_s", np.nan),
            decoded.server.get("ttft_s", np.nan),
        )
        self._at.append(exchange.row)
        self._lines.append(line)
        self._chunk_ns.append(decoded.chunk_ns)
        self._chunk_tokens.append(counts)
        if len(self._lines) == _BATCH:
            self._write()

    def finish(self) -> Chunks:
        """Writes what is left; every chunk, grouped by request id."""
        self._write()
        chunks = np.concatenate([np.empty(0, CHUNKS), *self._chunks])
        return chunks[np.argsort(chunks["request_id"], kind="stable")]

    def _write(self) -> None:
        at = np.array(self._at, np.intp)
        names = (*_INSTANTS, *_OTHERS)
        for name, values in zip(names, zip(*self._lines, strict=True), strict=False):
            if name in _INSTANTS:
                ns = np.array(values, np.int64)
                self._rows[name][at] = np.where(ns != 0, self._seconds(ns), np.nan)
            else:
                self._rows[name][at] = values
        self._write_chunks(at)
        for kept in (self._at, self._lines, self._chunk_ns, self._chunk_tokens):
            kept.clear()

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
    """A count a server stated, or 0 (unknown) where no honest one could be so large."""
    return count if 0 <= count <= most else 0
