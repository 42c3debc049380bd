"""Preallocated rows of one shard: written by index, decoded when nothing is being measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from loadgen.drive.decode import Decoded, decode
from loadgen.drive.exchange import Exchange
from loadgen.drive.spill import Spill
from loadgen.records import CHUNKS, Chunks, Names, Requests, Schedule, Status, empty_requests
from targets.base import Adapter

_MAX_DISTINCT = 1000
_MAX_TEXT = 300
_NEVER = 0
_MOST_U2, _MOST_U4 = 2**16 - 1, 2**32 - 1


class Ids:
    """Strings to small ids in order of appearance; 0 is the empty string. Past `_MAX_DISTINCT`
    distinct ones the rest share one id, so that a server that puts a nonce into each error
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
    """The recorder of one shard.

    Raw exchanges are kept as they came and decoded by `finish`. Once they hold more than
    `memory_bytes`, the bodies of later ones go to a file at `spill_path` until then. `redact` is
    applied to every text of the server's that is kept.
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
        self._adapter, self._epoch_ns, self._redact = adapter, epoch_ns, redact
        self._errors, self._remotes = Ids(), Ids()
        self._exchanges: list[Exchange] = []
        self._spill = Spill(spill_path, memory_bytes)
        self._chunks: list[Chunks] = []
        self._is_accounted = np.zeros(len(schedule), bool)

    @property
    def spilled_bytes(self) -> int:
        return self._spill.n_bytes

    # what the dispatcher and the client report
    def released(self, row: int, release_s: float) -> None:
        self.rows["released_s"][row] = release_s

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._is_accounted[row] = True
        self.rows["status"][row] = status
        self.rows["error_id"][row] = self._errors.id(reason)

    def ended(self, exchange: Exchange) -> None:
        self._spill.keep(exchange)
        self._exchanges.append(exchange)

    def finish(self, lost: str = "") -> tuple[Requests, Chunks, Names]:
        """Decode everything; the rows, their chunks grouped by request id, and the names. Rows
        that nobody accounted for are `lost`, with that reason."""
        for exchange in self._exchanges:
            self._spill.restore(exchange)
            self._write(exchange)
            exchange.parts = []
        self._exchanges.clear()
        self._spill.close()
        for row in np.flatnonzero(~self._is_accounted).tolist():
            self.unsent(row, Status.lost, lost or "never accounted for")
        chunks = np.concatenate(self._chunks) if self._chunks else np.empty(0, CHUNKS)
        chunks = chunks[np.argsort(chunks["request_id"], kind="stable")]
        return self.rows, chunks, Names(errors=self._errors.texts(), remotes=self._remotes.texts())

    def _write(self, exchange: Exchange) -> None:
        self._is_accounted[exchange.row] = True
        row = self.rows[exchange.row]
        self._write_wire(row, exchange)
        try:
            decoded = decode(exchange, self._adapter)
            self._write_decoded(row, decoded)
            self._add_chunks(int(row["request_id"]), decoded)
        except Exception as error:  # a codec's bug on one body must not cost the other rows
            row["status"] = Status.stream_error
            what = f"not decodable ({type(error).__name__}: {error}); please report this body"
            row["error_id"] = self._errors.id(self._redact(what))

    def _write_wire(self, row: np.void, exchange: Exchange) -> None:
        for name, ns in (
            ("sent_s", exchange.sent_ns),
            ("connected_s", exchange.connected_ns),
            ("headers_s", exchange.headers_ns),
            ("first_chunk_s", exchange.times[0] if exchange.times else _NEVER),
            ("done_s", exchange.done_ns),
        ):
            row[name] = self._seconds(ns)
        row["reused_connection"] = exchange.reused
        row["bytes"] = exchange.n_bytes
        row["http_status"] = exchange.http_status
        row["remote_id"] = self._remotes.id(exchange.remote)

    def _write_decoded(self, row: np.void, decoded: Decoded) -> None:
        row["first_token_s"] = self._seconds(decoded.first_token_ns)
        row["first_answer_s"] = self._seconds(decoded.first_answer_ns)
        row["last_token_s"] = self._seconds(decoded.last_token_ns)
        row["status"] = decoded.status
        row["error_id"] = self._errors.id(self._redact(decoded.error))
        row["input_tokens"] = _fitting(decoded.input_tokens, _MOST_U4)
        row["cached_tokens"] = _fitting(decoded.cached_tokens, _MOST_U4)
        row["output_tokens"] = _fitting(decoded.output_tokens, _MOST_U4)
        counts = decoded.chunk_tokens
        row["first_chunk_tokens"] = _fitting(counts[0], _MOST_U2) if counts else 0
        row["token_source"] = decoded.token_source
        row["chunks"] = len(decoded.chunk_ns)
        row["finish_reason"] = decoded.finish_reason
        row["server_queue_s"] = decoded.server.get("queue_s", np.nan)
        row["server_ttft_s"] = decoded.server.get("ttft_s", np.nan)

    def _add_chunks(self, request_id: int, decoded: Decoded) -> None:
        if not decoded.chunk_ns:
            return
        chunks = np.empty(len(decoded.chunk_ns), CHUNKS)
        chunks["request_id"] = request_id
        chunks["received_s"] = (np.array(decoded.chunk_ns, np.int64) - self._epoch_ns) * 1e-9
        tokens = np.array(decoded.chunk_tokens, np.int64)
        chunks["tokens"] = np.where((tokens >= 0) & (tokens <= _MOST_U2), tokens, 0)
        self._chunks.append(chunks)

    def _seconds(self, ns: int) -> float:
        return (ns - self._epoch_ns) * 1e-9 if ns else np.nan


def _fitting(count: int, most: int) -> int:
    """A count a server stated, or 0 (unknown) where no honest one could be so large."""
    return count if 0 <= count <= most else 0
