"""Exports of recorded runs: any number of runs in a single file.

csv and json hold a row per run and class, jsonl and parquet a row per request; `rows` selects
the other kind. The others are result files of other load generators, whose layout is fixed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from loadgen.archive.checksums import cover
from loadgen.errors import UsageError, nearest
from loadgen.measure.aggregate import summarize
from loadgen.measure.wording import csv_cell
from loadgen.records import Run

if TYPE_CHECKING:
    import pandas as pd

Rows = Literal["runs", "requests"]
ROWS: tuple[Rows, ...] = ("runs", "requests")
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Table:
    """Conversion of a table to bytes; `rows` is its kind of rows unless the caller selects the
    other."""

    rows: Rows
    file_name: str
    write: Callable[[pd.DataFrame], bytes]


@dataclass(frozen=True)
class Layout:
    """Conversion of runs to the file of another tool."""

    file_name: str
    write: Callable[[Sequence[Run]], bytes]


_OF_A_RUN = frozenset(
    f"{name}.parquet"
    for name in (
        "schedule",
        "edges",
        "requests",
        "chunks",
        "server",
        "engine_steps",
        "engine_events",
    )
) | {"manifest.json", "summary.json", "report.html"}


def export(
    runs: Run | Sequence[Run],
    format: str,
    path: Path | str | None = None,
    rows: str | None = None,
    slo: Sequence[str] | None = None,
) -> bytes:
    """The runs in a format of `FORMATS`, written to `path` if given.

    `rows` is "runs" or "requests". If `path` is a folder, the file gets the format's default name;
    a file in a run directory is added to its checksums.
    `slo` replaces the runs' own SLOs. Raises UsageError for an unknown format or rows, for a path
    that is a file of a run itself, or if the file cannot be written.
    """
    several = [runs] if isinstance(runs, Run) else list(runs)
    content = _content([_with_slo(run, slo) for run in several], format, rows)
    if path is not None:
        file = export_path(format, path)
        if file.name in _OF_A_RUN and (file.parent / "manifest.json").exists():
            raise UsageError(f"{file} is a file of the run itself; choose another name")
        try:
            file.write_bytes(content)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror or error}") from None
        _renew_checksum(file)
    return content


def _renew_checksum(file: Path) -> None:
    """Adds the file to the checksums of the run directory that it is in, if any."""
    for folder in file.resolve().parents:
        if (folder / "manifest.json").is_file():
            cover(folder, file)
            return


def export_path(format: str, path: Path | str) -> Path:
    """The path that `export` writes to."""
    file = Path(path)
    return file / FORMATS[format].file_name if file.is_dir() else file


def _with_slo(run: Run, slo: Sequence[str] | None) -> Run:
    """The run with these SLOs in place of its own and its classes'."""
    if slo is None:
        return run
    classes = {
        name: structs.replace(traffic, slo=()) for name, traffic in run.manifest.classes.items()
    }
    manifest = structs.replace(run.manifest, slo=tuple(slo), classes=classes)
    return replace(run, manifest=manifest)


def check_format(format: str, rows: str | None = None) -> None:
    """Raises UsageError for a format or rows that `export` rejects."""
    if format not in FORMATS:
        raise UsageError(f"unknown export format '{format}'; {nearest(format, FORMATS)}")
    if rows is not None and rows not in ROWS:
        raise UsageError(f"unknown rows '{rows}'; {nearest(rows, ROWS)}")
    if rows is not None and isinstance(FORMATS[format], Layout):
        raise UsageError(f"{format} has a fixed layout: leave rows out")


def _content(runs: Sequence[Run], format: str, rows: str | None) -> bytes:
    check_format(format, rows)
    if not runs:
        raise UsageError("nothing to export: name one or more runs")
    chosen = FORMATS[format]
    if isinstance(chosen, Layout):
        return chosen.write(runs)
    if (rows or chosen.rows) == "requests":
        from loadgen.exports.flat_tables import request_table

        return chosen.write(request_table(runs))
    return chosen.write(_run_table(runs))


def _run_table(runs: Sequence[Run]) -> pd.DataFrame:
    import pandas as pd

    from loadgen.exports.flat_tables import summary_rows

    return pd.DataFrame([row for run in runs for row in summary_rows(run, summarize(run))])


def _csv(table: pd.DataFrame) -> bytes:
    words = {str(name): table[name].map(csv_cell) for name in table.select_dtypes(exclude="number")}
    return table.assign(**words).to_csv(index=False).encode()


def _json(table: pd.DataFrame) -> bytes:
    return json.dumps(list(_records(table)), indent=2, allow_nan=False).encode() + b"\n"


def _json_lines(table: pd.DataFrame) -> bytes:
    return b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in _records(table))


def _records(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Rows with every digit (`to_json` rounds to ten decimals) and NaN as None. Converts some rows
    at a time: a row of objects takes ten times the memory of a row of numbers."""
    for start in range(0, len(table), _ROWS_AT_ONCE):
        part = table.iloc[start : start + _ROWS_AT_ONCE]
        objects = part.astype(object).where(part.notna(), None)
        yield from ({str(key): row[key] for key in row} for row in objects.to_dict("records"))


def _parquet(table: pd.DataFrame) -> bytes:
    content = io.BytesIO()
    table.to_parquet(content, index=False, compression="zstd")
    return content.getvalue()


def _vllm_bench(runs: Sequence[Run]) -> bytes:
    """A line per run, as `--append-result` writes them."""
    from loadgen.exports.vllm_bench import vllm_bench

    return b"".join(json.dumps(vllm_bench(run), allow_nan=False).encode() + b"\n" for run in runs)


def _vllm_bench_text(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.vllm_bench_text import vllm_bench_text

    return "".join(map(vllm_bench_text, runs)).encode()


def _aiperf(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.aiperf import aiperf_summary

    return _json_object(aiperf_summary(_single(runs, "aiperf")))


def _aiperf_records(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.aiperf import aiperf_records

    lines = aiperf_records(_single(runs, "aiperf-records"))
    return b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)


def _guidellm(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.guidellm import guidellm_report

    return _json_object(guidellm_report(runs))


def _llm_d(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.llm_d import llm_d_report

    return _json_object(llm_d_report(_single(runs, "llm-d")))


def _inferencex(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.inferencex import inferencex_row

    rows = [inferencex_row(run) for run in runs]
    return json.dumps(rows, indent=2, allow_nan=False).encode() + b"\n"


def _otlp_json(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.otlp_json import otlp_json

    return b"".join(json.dumps(otlp_json(run), allow_nan=False).encode() + b"\n" for run in runs)


def _mlperf_endpoints(runs: Sequence[Run]) -> bytes:
    from loadgen.exports.mlperf_endpoints import result_summary

    return _json_object(result_summary(_single(runs, "mlperf-endpoints")))


def _single(runs: Sequence[Run], format: str) -> Run:
    if len(runs) > 1:
        raise UsageError(f"{format} holds a single run: export {len(runs)} runs one by one")
    return runs[0]


def _json_object(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"


FORMATS: Mapping[str, Table | Layout] = MappingProxyType(
    {
        "csv": Table("runs", "export.csv", _csv),
        "json": Table("runs", "export.json", _json),
        "jsonl": Table("requests", "export.jsonl", _json_lines),
        "parquet": Table("requests", "export.parquet", _parquet),
        "vllm-bench": Layout("vllm-bench.json", _vllm_bench),
        "vllm-bench-text": Layout("vllm-bench.txt", _vllm_bench_text),
        "aiperf": Layout("profile_export_aiperf.json", _aiperf),
        "aiperf-records": Layout("profile_export.jsonl", _aiperf_records),
        "guidellm": Layout("guidellm.json", _guidellm),
        "llm-d": Layout("benchmark_report_v0.2.json", _llm_d),
        "inferencex": Layout("agg_bmk.json", _inferencex),
        "mlperf-endpoints": Layout("result_summary.json", _mlperf_endpoints),
        "otlp-json": Layout("metrics.otlp.jsonl", _otlp_json),
    }
)
"""Every format by name."""
