"""The bundled engine's own account of a run: its steps and events, moved beside the other tables.

    logs/engine_steps.parquet, engine_events.parquet   times on the engine's clock
    engine_steps.parquet, engine_events.parquet        times since the run epoch, as everywhere

Both clocks are CLOCK_MONOTONIC of one machine, so the difference of their epochs is exact.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.drive.payloads import request_name

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = ("engine_steps.parquet", "engine_events.parquet")
_EPOCH_KEY = b"epoch_monotonic_ns"


def adopt_engine_logs(directory: Path, run_epoch_s: float) -> None:
    """Move the logs that an engine left in `directory/logs` to `directory`, with `t_s` since
    `run_epoch_s` (CLOCK_MONOTONIC); events get the `row` of the schedule they are about. Does
    nothing where there are none."""
    for name in NAMES:
        left = directory / "logs" / name
        if left.exists():
            _write(directory / name, _since(left, run_epoch_s, directory.name))
            left.unlink()


def _since(path: Path, run_epoch_s: float, run_name: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import compute, parquet

    table = parquet.read_table(path)
    shift_s = int(table.schema.metadata[_EPOCH_KEY]) / 1e9 - run_epoch_s
    at = table.schema.get_field_index("t_s")
    table = table.set_column(at, "t_s", compute.add(table["t_s"], shift_s))
    if "request_id" in table.column_names:
        # What a client sends is `<run>-<id>`; a preflight's requests have other names.
        pattern = f"^{re.escape(request_name(run_name))}-(?P<row>[0-9]+)$"
        found = compute.struct_field(compute.extract_regex(table["request_id"], pattern), "row")
        table = table.append_column("row", found.cast(pa.uint32()))
    return table.replace_schema_metadata(None)


def _write(path: Path, table: pa.Table) -> None:
    from pyarrow import parquet

    partial = path.with_suffix(".partial")
    parquet.write_table(table, partial, compression="zstd")
    partial.rename(path)
