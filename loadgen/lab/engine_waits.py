"""Why the requests of a measured run waited, from the log of the bundled engine that served it."""

from __future__ import annotations

import json
from pathlib import Path

from loadgen.measure.attainment import due_rows
from loadgen.records import Run

EVENTS = "engine_events.parquet"


def read_waits(run: Run, directory: Path) -> dict[str, dict[str, float]]:
    """Seconds of waiting by class and reason, of the requests due in the measured window; empty
    where the engine left no log, or one that does not say."""
    path = directory / EVENTS
    if not path.exists():
        return {}
    from pyarrow import parquet

    events = parquet.read_table(path, columns=["kind", "row", "detail"]).to_pylist()
    is_due, classes = due_rows(run), run.schedule_rows["class_id"]
    waits: dict[str, dict[str, float]] = {}
    for event in events:
        row = event["row"]
        if event["kind"] not in ("finish", "cancel") or row is None or not is_due[row]:
            continue
        by_reason = waits.setdefault(run.names.classes[int(classes[row])], {})
        for reason, seconds in json.loads(event["detail"]).get("waits", {}).items():
            by_reason[reason] = by_reason.get(reason, 0.0) + seconds
    return waits
