"""Preallocated rows of one shard: written by index, decoded when nothing is being measured."""

from __future__ import annotations

import numpy as np

from loadgen.drive.decode import Decoded, decode
from loadgen.drive.exchange import Exchange
from loadgen.records import CHUNKS, Chunks, Names, Requests, Schedule, Status, empty_requests
from targets.base import Adapter

_MAX_DISTINCT = 1000
_MAX_TEXT = 300
_NEVER = 0


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

    Raw exchanges are kept and decoded by `finish`, or, once they hold more than `backlog_bytes`,
    oldest first and a few at a time by `relieve`, which the shard calls when its loop is idle;
    `decoded_in_run_bytes` says how much of that happened.
    """

    def __init__(
        self,
        schedule: Schedule,
        adapter: Adapter,
        epoch_ns: int,
        shard: int,
        backlog_bytes: int = 512 << 20,
    ) -> None:
        self.rows = empty_requests(schedule)
        self.rows["shard"] = shard
        self._adapter, self._epoch_ns, self._limit = adapter, epoch_ns, backlog_bytes
        self._errors, self._remotes = Ids(), Ids()
        self._backlog: list[Exchange] = []
        self._held_bytes = 0
        self._chunks: list[Chunks] = []
        self.decoded_in_run_bytes = 0

    # what the dispatcher and the client report
    def released(self, row: int, release_s: float) -> None:
        self.rows["released_s"][row] = release_s

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self.rows["status"][row] = status
        self.rows["error_id"][row] = self._errors.id(reason)

    def ended(self, exchange: Exchange) -> None:
        self._backlog.append(exchange)
        self._held_bytes += exchange.n_bytes

    def relieve(self, at_most: int = 4) -> None:
        """Decode a few of the oldest exchanges if the backlog is over its bound."""
        while self._backlog and at_most and self._held_bytes > self._limit:
            exchange = self._backlog.pop(0)
            self._held_bytes -= exchange.n_bytes
            self.decoded_in_run_bytes += exchange.n_bytes
            self._write(exchange)
            at_most -= 1

    def finish(self) -> tuple[Requests, Chunks, Names]:
        """Decode what is left; the rows, their chunks grouped by request id, and the names."""
        for exchange in self._backlog:
            self._write(exchange)
        self._backlog.clear()
        chunks = np.concatenate(self._chunks) if self._chunks else np.empty(0, CHUNKS)
        chunks = chunks[np.argsort(chunks["request_id"], kind="stable")]
        return self.rows, chunks, Names(errors=self._errors.texts(), remotes=self._remotes.texts())

    def _write(self, exchange: Exchange) -> None:
        decoded = decode(exchange, self._adapter)
        row = self.rows[exchange.row]
        for name, ns in (
            ("sent_s", exchange.sent_ns),
            ("connected_s", exchange.connected_ns),
            ("headers_s", exchange.headers_ns),
            ("first_chunk_s", exchange.times[0] if exchange.times else _NEVER),
            ("first_token_s", decoded.first_token_ns),
            ("first_answer_s", decoded.first_answer_ns),
            ("last_token_s", decoded.last_token_ns),
            ("done_s", exchange.done_ns),
        ):
            row[name] = self._seconds(ns)
        row["reused_connection"] = exchange.reused
        row["bytes"] = exchange.n_bytes
        row["http_status"] = exchange.http_status
        row["remote_id"] = self._remotes.id(exchange.remote)
        self._write_decoded(row, decoded)
        self._add_chunks(int(row["request_id"]), decoded)

    def _write_decoded(self, row: np.void, decoded: Decoded) -> None:
        row["status"] = decoded.status
        row["error_id"] = self._errors.id(decoded.error)
        row["input_tokens"] = decoded.input_tokens
        row["cached_tokens"] = decoded.cached_tokens
        row["output_tokens"] = decoded.output_tokens
        row["first_chunk_tokens"] = decoded.chunk_tokens[0] if decoded.chunk_tokens else 0
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
        chunks["tokens"] = decoded.chunk_tokens
        self._chunks.append(chunks)

    def _seconds(self, ns: int) -> float:
        return (ns - self._epoch_ns) * 1e-9 if ns else np.nan
