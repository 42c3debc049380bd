"""The bundled engine's own account of a run: its steps and events, moved beside the other tables.

    logs/engine_steps.parquet, engine_events.parquet   times on the engine's clock
    engine_steps.parquet, engine_events.parquet        instants since the run epoch, as everywhere

Both clocks are CLOCK_MONOTONIC of one machine, so the difference of their epochs is exact. It is
in the metadata as `clock_shift_s`; what the events' `detail` holds stays on the engine's clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.drive.payloads import request_name

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.records import Run

NAMES = ("engine_steps.parquet", "engine_events.parquet")
_EPOCH_KEY, _SHIFT_KEY = b"epoch_monotonic_ns", b"clock_shift_s"
_INSTANTS = ("t_s", "began_s", "end_s")


class ServedRun(NamedTuple):
    """One run that an engine served, by the name in its requests' ids. `epoch_s` is its zero;
    nothing of it was under way before `begin_s` or after `end_s`, on CLOCK_MONOTONIC."""

    directory: Path
    name: str
    epoch_s: float
    begin_s: float = -math.inf
    end_s: float = math.inf

    @classmethod
    def of(cls, run: Run, directory: Path) -> ServedRun:
        """A recorded run whose log holds no other run's requests."""
        return cls(directory, run.manifest.run, run.manifest.epoch_s)


def adopt_engine_logs(log_dir: Path, runs: Sequence[ServedRun]) -> None:
    """Move the logs that an engine left in `log_dir` to the runs it served, to each its part, with
    instants since its epoch; events get the `row` of the schedule they are about, and what the
    engine is (`start`) is told to every run. Does nothing where there are none."""
    for name in NAMES:
        left = log_dir / name
        if left.exists():
            _share(left, runs)
            left.unlink()


def _share(path: Path, runs: Sequence[ServedRun]) -> None:
    from pyarrow import compute, parquet

    table = parquet.read_table(path)
    epoch_s = int(table.schema.metadata[_EPOCH_KEY]) / 1e9
    t_s = compute.add(table["t_s"], epoch_s)
    for run in runs:
        is_its = compute.and_(compute.greater(t_s, run.begin_s), compute.less(t_s, run.end_s))
        if "kind" in table.column_names:
            is_its = compute.or_(is_its, compute.equal(table["kind"], "start"))
        _write(run.directory / path.name, _since(table.filter(is_its), epoch_s, run))


def _since(table: pa.Table, epoch_s: float, run: ServedRun) -> pa.Table:
    import pyarrow as pa
    from pyarrow import compute

    shift_s = epoch_s - run.epoch_s
    for name in set(_INSTANTS).intersection(table.column_names):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, compute.add(table[name], shift_s))
    if "request_id" in table.column_names:
        # What a client sends is `<run>-<id>`; a preflight's requests have other names.
        pattern = f"^{re.escape(request_name(run.name))}-(?P<row>[0-9]+)$"
        found = compute.struct_field(compute.extract_regex(table["request_id"], pattern), "row")
        table = table.append_column("row", found.cast(pa.uint32()))
    said = {**table.schema.metadata, _SHIFT_KEY: repr(shift_s).encode()}
    return table.replace_schema_metadata(said)


def _write(path: Path, table: pa.Table) -> None:
    from pyarrow import parquet

    partial = path.with_suffix(".partial")
    parquet.write_table(table, partial, compression="zstd")
    partial.rename(path)
