"""Log of the bundled engine (steps and events), moved into the directories of the runs it served.

    logs/engine_steps.parquet, engine_events.parquet   times on the engine's clock
    engine_steps.parquet, engine_events.parquet        times since the run epoch, as elsewhere

Both clocks are CLOCK_MONOTONIC of the same machine, so the difference of their epochs is exact; the
metadata hold it as `clock_shift_s`. Times inside the events' `detail` stay on the engine's clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.archive import checksums
from loadgen.archive.request_names import RequestNames
from loadgen.system.whole_file import SUFFIX, replacing

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.records import Run

NAMES = ("engine_steps.parquet", "engine_events.parquet")
_EPOCH_KEY, _SHIFT_KEY = b"epoch_monotonic_ns", b"clock_shift_s"
_TIMES = ("t_s", "began_s", "end_s")


class ServedRun(NamedTuple):
    """A run with request_ids below `n_requests` that an engine served. `epoch_s` is its epoch; no
    request of it was in flight before `begin_s` or after `end_s` (all on CLOCK_MONOTONIC)."""

    directory: Path
    name: str
    epoch_s: float
    n_requests: int
    begin_s: float = -math.inf
    end_s: float = math.inf

    @classmethod
    def of(cls, run: Run, directory: Path) -> ServedRun:
        """A recorded run that was the only run of its engine."""
        n_requests = int(run.schedule_rows["request_id"][-1]) + 1
        return cls(directory, run.manifest.run, run.manifest.epoch_s, n_requests)


def adopt_engine_logs(log_dir: Path, runs: Sequence[ServedRun]) -> None:
    """Splits the logs in `log_dir` among the runs that the engine served, with times since each
    run's epoch. Events get the column `row`, their row of the schedule; the event `start`, which
    describes the engine, goes to every run. Does nothing without logs. The half-written logs of a
    killed engine have no Parquet footer, so they cannot be read; they are removed."""
    for name in NAMES:
        path = log_dir / name
        path.with_suffix(SUFFIX).unlink(missing_ok=True)  # of an engine that was killed
        if path.exists():
            _split(path, runs)
            path.unlink()
            for run in runs:
                checksums.cover(run.directory, run.directory / name)


def _split(path: Path, runs: Sequence[ServedRun]) -> None:
    from pyarrow import compute, parquet

    table = parquet.read_table(path)
    epoch_s = int(table.schema.metadata[_EPOCH_KEY]) / 1e9
    t_s = compute.add(table["t_s"], epoch_s)
    for run in runs:
        is_of_run = compute.and_(compute.greater(t_s, run.begin_s), compute.less(t_s, run.end_s))
        if "kind" in table.column_names:
            is_of_run = compute.or_(is_of_run, compute.equal(table["kind"], "start"))
        _write(run.directory / path.name, _shifted(table.filter(is_of_run), epoch_s, run))


def _shifted(table: pa.Table, epoch_s: float, run: ServedRun) -> pa.Table:
    import pyarrow as pa
    from pyarrow import compute

    shift_s = epoch_s - run.epoch_s
    for name in set(_TIMES).intersection(table.column_names):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, compute.add(table[name], shift_s))
    if "request_id" in table.column_names:
        names = RequestNames(run.name, run.n_requests)
        rows = [names.request_id(name) for name in table["request_id"].to_pylist()]
        table = table.append_column("row", pa.array(rows, pa.uint32()))
    metadata = {**table.schema.metadata, _SHIFT_KEY: repr(shift_s).encode()}
    return table.replace_schema_metadata(metadata)


def _write(path: Path, table: pa.Table) -> None:
    from pyarrow import parquet

    with replacing(path) as partial:
        parquet.write_table(table, partial, compression="zstd")
