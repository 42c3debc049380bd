"""The logs that `step_files` wrote, read back: from the engine's own directory or from a run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loadgen.errors import UsageError
from reference_engine.state.steps import StepEvent, StepRecord
from reference_engine.step_log.log_replay import EngineLog
from reference_engine.step_log.step_files import EVENTS, SCHEMA, SCHEMA_KEY, STEPS

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
