"""The steps and events of an engine as two Parquet files, written and read.

    engine_steps.parquet    one row per step (see `steps.StepRecord`)
    engine_events.parquet   arrivals, cancels, finishes, interventions, with the step they precede

The engine thread appends to a list; a thread per file encodes full lists, and turns 4096 rows into
a row group. The lists are short because their encoding holds the interpreter's lock: with 4096 rows
each, a decoding engine paused for up to 60 ms at every row group. A file gets its name when it is
complete, so every visible file can be read. Times are seconds on the engine's
clock. The files' metadata hold the clock's epoch (`epoch_monotonic_ns`, CLOCK_MONOTONIC, ns) and
the number of their `schema`; a copy on another clock also holds its shift (`clock_shift_s`).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from loadgen.errors import UsageError
from reference_engine.state.steps import StepEvent, StepRecord
from reference_engine.step_log.log_replay import EngineLog

log = logging.getLogger(__name__)

EPOCH_KEY, SCHEMA_KEY, SHIFT_KEY = "epoch_monotonic_ns", "schema", "clock_shift_s"
SCHEMA = 2  # 1 lacked `began_s`, `end_s`, `prefill_attention` and the inputs of a replay
STEPS, EVENTS = "engine_steps.parquet", "engine_events.parquet"
_ROWS = 4096  # per row group
_LISTED_ROWS = 64  # encoded at once
_INSTANTS = ("t_s", "began_s", "end_s")

_COUNTS = pa.list_(pa.struct([("reason", pa.string()), ("requests", pa.int32())]))
_ITEMS = pa.list_(pa.struct([("request_id", pa.string()), ("tokens", pa.int32())]))
STEP_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("t_s", pa.float64()),
        ("began_s", pa.float64()),
        ("end_s", pa.float64()),
        ("duration_s", pa.float64()),
        ("plan_s", pa.float64()),
        ("n_prefill_tokens", pa.int32()),
        ("prefill_attention", pa.float64()),
        ("n_decode", pa.int32()),
        ("context_tokens", pa.int64()),
        ("n_running", pa.int32()),
        ("n_waiting", pa.int32()),
        ("kv_used_blocks", pa.int32()),
        ("padding_tokens", pa.int64()),
        ("n_preempted", pa.int32()),
        ("policy", pa.string()),
        ("action", pa.string()),
        ("group", pa.int32()),
        ("items", _ITEMS),
        ("causes", _COUNTS),
        ("padding_context_tokens", pa.int64()),
    ]
)
EVENT_SCHEMA = pa.schema(
    [
        ("t_s", pa.float64()),
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("request_id", pa.string()),
        ("tenant", pa.string()),
        ("actor", pa.string()),
        ("detail", pa.string()),  # JSON
    ]
)

Entry = TypeVar("Entry")
Row = dict[str, Any]  # a row of a Parquet file, by column


class StepFiles:
    """Log files in `directory`, filled by `on_step` and `on_event`; `close` completes them."""

    def __init__(self, directory: Path, epoch_ns: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._steps = _File(directory / STEPS, STEP_SCHEMA, epoch_ns, _step_row)
        self._events = _File(directory / EVENTS, EVENT_SCHEMA, epoch_ns, _event_row)
        self.on_step, self.on_event = self._steps.add, self._events.add

    def close(self) -> None:
        self._steps.close()
        self._events.close()


class _File(Generic[Entry]):
    """One Parquet file, written by a thread of its own until `close`."""

    def __init__(
        self, path: Path, schema: pa.Schema, epoch_ns: int, row: Callable[[Entry], Row]
    ) -> None:
        self._path, self._partial = path, path.with_suffix(".partial")
        self._schema = schema.with_metadata({EPOCH_KEY: str(epoch_ns), SCHEMA_KEY: str(SCHEMA)})
        self._row = row
        self._entries: list[Entry] = []
        self._full: queue.SimpleQueue[list[Entry] | None] = queue.SimpleQueue()
        self._is_broken = False
        self._thread = threading.Thread(target=self._write, name=path.stem, daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) >= _LISTED_ROWS:
            if not self._is_broken:
                self._full.put(self._entries)
            self._entries = []

    def close(self) -> None:
        self._full.put(self._entries)
        self._full.put(None)
        self._thread.join()

    def _write(self) -> None:
        try:
            with pq.ParquetWriter(self._partial, self._schema) as writer:
                encoder, lines, n_rows = msgspec.json.Encoder(), bytearray(), 0
                while (entries := self._full.get()) is not None:
                    lines += encoder.encode_lines(list(map(self._row, entries)))
                    n_rows += len(entries)
                    if n_rows >= _ROWS:
                        writer.write_table(_table(lines, self._schema))
                        lines, n_rows = bytearray(), 0
                if n_rows:
                    writer.write_table(_table(lines, self._schema))
            self._partial.rename(self._path)
        except Exception:  # the thread's boundary: a full disk must not end the serving
            self._is_broken = True
            log.exception("%s is incomplete: writing it failed", self._path)


def _table(lines: bytearray, schema: pa.Schema) -> pa.Table:
    # JSON lines, which pyarrow parses without the interpreter's lock. Building arrays of lists
    # would import pandas for half a second, while the engine thread needs the interpreter.
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    reader = pa.BufferReader(lines)
    return pj.read_json(reader, pj.ReadOptions(use_threads=False), options).cast(schema)


def _step_row(record: StepRecord) -> Row:
    items = [{"request_id": name, "tokens": n} for name, n in record.items]
    causes = [{"reason": name, "requests": n} for name, n in record.causes]
    return record._asdict() | {"items": items, "causes": causes}


def _event_row(event: StepEvent) -> Row:
    return event._asdict() | {"detail": json.dumps(dict(event.detail))}


def read_log(directory: Path) -> EngineLog:
    """Read the steps and events of an engine's `--log-dir` or of a run's directory, on the engine's
    clock. Raises UsageError for missing files or files of another schema."""
    steps, events = (_rows(directory / name) for name in (STEPS, EVENTS))
    return EngineLog([_step(row) for row in steps], [_event(row) for row in events])


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise UsageError(
            f"{path}: not found; the bundled engine writes it when it ends: "
            "slobench run SCENARIO --target reference --engine log_level=full"
        )
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path}: {error}") from error
    metadata = table.schema.metadata or {}
    version = int(metadata.get(SCHEMA_KEY.encode(), b"1"))
    if version != SCHEMA:
        raise UsageError(
            f"{path}: written with schema {version}, this version reads {SCHEMA}; measure again"
        )
    rows: list[Row] = table.to_pylist()
    shift_s = float(metadata.get(SHIFT_KEY.encode(), b"0"))
    if shift_s:
        # The engine's clock counts whole nanoseconds, so rounding restores its instants exactly.
        for row in rows:
            for key in _INSTANTS:
                if key in row:
                    row[key] = round((row[key] - shift_s) * 1_000_000_000) * 1e-9
    return rows


def _step(row: Row) -> StepRecord:
    items = tuple((item["request_id"], item["tokens"]) for item in row["items"])
    causes = tuple((cause["reason"], cause["requests"]) for cause in row["causes"])
    return StepRecord(**{**row, "items": items, "causes": causes})


def _event(row: Row) -> StepEvent:
    fields = {name: row[name] for name in StepEvent._fields}  # a run's table has the `row`, too
    return StepEvent(**{**fields, "detail": json.loads(row["detail"])})
