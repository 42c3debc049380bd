"""What a sweep leaves behind beside its runs: JSON, CSV, Parquet and a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.sweep.sweep import Swept
from reports.page import write_page
from reports.sweep.page import render

_ENDS = ("value", "low", "high")


def write_all(swept: Swept, cache_dir: Path | None) -> None:
    """`sweep.json` and `sweep.csv` with a row per cell, `sweep.parquet` with a row per run, and
    `report.html`."""
    facts, directory = swept.facts, swept.directory
    text = json.dumps(facts, indent=1, allow_nan=False)
    (directory / "sweep.json").write_text(text + "\n", encoding="utf-8")
    (directory / "sweep.csv").write_text(to_csv(facts["rows"]), encoding="utf-8")
    if swept.runs:
        _write_runs(swept.runs, facts["rows"], directory / "sweep.parquet")
    write_page(directory / "report.html", render(facts, cache_dir))


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row per cell: its factors, then every number and the ends of its interval, seconds
    throughout; an empty cell is a value that does not exist or is infinite."""
    if not rows:
        return ""
    text = io.StringIO()
    flat = [_flat(row) for row in rows]
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        "offered_rate_per_s": row["offered_rate_per_s"],
        "benefit_per_gpu": row["benefit"],
        **row["measures"],
    }
    numbers = {
        name if end == "value" else f"{name}_{end}": estimate[end]
        for name, estimate in named.items()
        for end in _ENDS
    }
    verdicts = " ".join(f"{verdict}:{n}" for verdict, n in row["verdicts"].items())
    return {
        "cell": row["cell"],
        **row["factors"],
        "n": row["n"],
        "n_failed": len(row["failures"]),
        "n_untrusted": row["n_untrusted"],
        "n_due": row["n_due"],
        "gpus": row["gpus"],
        "verdicts": verdicts,
        "is_front": row["is_front"],
        "beaten_by": row["beaten_by"],
        **{name: None if end is None else f"{end:.9g}" for name, end in numbers.items()},
    }


def _write_runs(
    runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], path: Path
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    factors = {row["cell"]: row["factors"] for row in rows}
    plain = ("repeat", "directory", "seed", "schedule_sha256", "verdict", "is_trusted", "n_due",
             "offered_rate_per_s", "gpus")  # fmt: skip
    table = [
        {
            "cell": run["cell"],
            **factors[run["cell"]],
            **{key: run[key] for key in plain},
            **{text: found["value"] for text, found in run["measures"].items()},
        }
        for run in runs
    ]
    numbers = list(runs[0]["measures"])
    schema = pa.Table.from_pylist(table).schema
    for name in numbers:  # all of one kind, also where no run has a value
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.float64()))
    partial = path.with_suffix(".partial")
    parquet.write_table(pa.Table.from_pylist(table, schema), partial, compression="zstd")
    partial.rename(path)
