"""Every step and every event of an engine as two Parquet files.

    engine_steps.parquet    one row per step (see `steps.StepRecord`)
    engine_events.parquet   arrivals, cancels, finishes, interventions, with the step they precede

The engine thread appends to a list; a thread of its own turns lists into row groups. A file gets
its name when it is complete, so what can be seen can be read. Times are seconds on the engine's
clock, whose epoch (CLOCK_MONOTONIC, ns) is in the files' metadata as `epoch_monotonic_ns`, beside
the number of their `schema`. A copy on another clock says by how much it was shifted
(`clock_shift_s`). See `log_files` for reading.
"""

from __future__ import annotations

import io
import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
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

EPOCH_KEY, SCHEMA_KEY = "epoch_monotonic_ns", "schema"
SCHEMA = 2  # 1 had neither `began_s`, `end_s`, `prefill_attention` nor what a replay needs
STEPS, EVENTS = "engine_steps.parquet", "engine_events.parquet"
_ROWS = 4096  # per row group

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


class StepFiles:
    """Files in `directory` while an engine runs; `close` completes them."""

    def __init__(self, directory: Path, epoch_ns: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._steps = _File(directory / STEPS, STEP_SCHEMA, epoch_ns, _step_rows)
        self._events = _File(directory / EVENTS, EVENT_SCHEMA, epoch_ns, _event_rows)

    def on_step(self, record: StepRecord) -> None:
        self._steps.add(record)

    def on_event(self, event: StepEvent) -> None:
        self._events.add(event)

    def close(self) -> None:
        self._steps.close()
        self._events.close()


class _File(Generic[Entry]):
    """Entries in, row groups out, written by a thread that ends with `close`."""

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        epoch_ns: int,
        rows: Callable[[Sequence[Entry]], list[dict[str, Any]]],
    ) -> None:
        self._path, self._partial = path, path.with_suffix(".partial")
        self._schema = schema.with_metadata({EPOCH_KEY: str(epoch_ns), SCHEMA_KEY: str(SCHEMA)})
        self._rows = rows
        self._entries: list[Entry] = []
        self._full: queue.SimpleQueue[list[Entry] | None] = queue.SimpleQueue()
        self._is_broken = False
        self._thread = threading.Thread(target=self._write, name=path.stem, daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) >= _ROWS:
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
                while (entries := self._full.get()) is not None:
                    if entries:
                        writer.write_table(_table(self._rows(entries), self._schema))
            self._partial.rename(self._path)
        except Exception:  # the thread's boundary: a full disk must not end the serving
            self._is_broken = True
            log.exception("%s is not written any more", self._path)


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Through JSON lines, parsed without the interpreter's lock. Building arrays of lists would
    import pandas for half a second, beside an engine that wants the interpreter."""
    lines = io.BytesIO(msgspec.json.Encoder().encode_lines(rows))
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    return pj.read_json(lines, pj.ReadOptions(use_threads=False), options).cast(schema)


def _step_rows(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        row = record._asdict()
        row["items"] = [{"request_id": name, "tokens": n} for name, n in record.items]
        row["causes"] = [{"reason": name, "requests": n} for name, n in record.causes]
        rows.append(row)
    return rows


def _event_rows(events: Sequence[StepEvent]) -> list[dict[str, Any]]:
    return [{**event._asdict(), "detail": json.dumps(dict(event.detail))} for event in events]


SHIFT_KEY = "clock_shift_s"
_INSTANTS = ("t_s", "began_s", "end_s")
_PER_S = 1_000_000_000  # an engine's clock counts nanoseconds


def read_log(directory: Path) -> EngineLog:
    """Steps and events on the engine's clock. Raises UsageError where there are none, or where they
    are of a version that did not say enough."""
    steps, events = (_rows(directory / name) for name in (STEPS, EVENTS))
    return EngineLog([_step(row) for row in steps], [_event(row) for row in events])


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(
            f"{path}: not found; the bundled engine leaves it when it ends: "
            "slobench run SCENARIO --target reference --engine log_level=full"
        )
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path}: {error}") from error
    said = table.schema.metadata or {}
    version = int(said.get(SCHEMA_KEY.encode(), b"1"))
    if version != SCHEMA:
        raise UsageError(
            f"{path}: written with schema {version}, this version reads {SCHEMA}; measure again"
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    shift_s = float(said.get(SHIFT_KEY.encode(), b"0"))
    if shift_s:
        _unshift(rows, shift_s)
    return rows


def _unshift(rows: list[dict[str, Any]], shift_s: float) -> None:
    """Instants as the engine read them off its clock, to the last bit: whole nanoseconds."""
    for row in rows:
        for key in _INSTANTS:
            if key in row:
                row[key] = round((row[key] - shift_s) * _PER_S) * 1e-9


def _step(row: dict[str, Any]) -> StepRecord:
    items = tuple((item["request_id"], item["tokens"]) for item in row["items"])
    causes = tuple((cause["reason"], cause["requests"]) for cause in row["causes"])
    return StepRecord(**{**row, "items": items, "causes": causes})


def _event(row: dict[str, Any]) -> StepEvent:
    known = {name: row[name] for name in StepEvent._fields}  # a run's table also has the `row`
    return StepEvent(**{**known, "detail": json.loads(row["detail"])})
