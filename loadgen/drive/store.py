"""Run directory: Parquet tables, the manifest, and the shards' parts until they are merged.

    manifest.json  schedule.parquet  edges.parquet  requests.parquet  chunks.parquet
    server.parquet (if the server exposes metrics)  summary.json  report.html  logs/

For use in notebooks, status, class, tenant, error and remote address are dictionary-encoded
strings, and requests.parquet has the derived columns `ttft_s tpot_s e2e_s slo_met`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.stall_watch import CountedFile
from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.sections import Manifest, read_client_report, read_manifest
from loadgen.manifest.self_report import ClientReport
from loadgen.records import (
    CHUNKS,
    EDGES,
    LATER,
    LATER_REQUESTS,
    NAMED,
    REQUESTS,
    SCHEDULE,
    SCHEMA,
    SERVER,
    Chunks,
    FinishReason,
    Names,
    Requests,
    Run,
    Schedule,
    Status,
    TokenSource,
    empty_requests,
)

if TYPE_CHECKING:
    import pyarrow as pa

_ENUMS = {"status": Status, "token_source": TokenSource, "finish_reason": FinishReason}
Part = tuple[Requests, Chunks, Names]


def write_part(
    path: Path,
    requests: Requests,
    chunks: Chunks,
    names: Names,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Writes a shard's rows for `read_part`; atomic. Calls `advance` as the file grows."""
    partial = path.with_suffix(".partial.npz")
    with CountedFile(partial, advance) as file:
        np.savez(
            file,
            requests=requests,
            chunks=chunks,
            errors=np.array(names.errors),
            remotes=np.array(names.remotes),
        )
    partial.rename(path)


def read_part(path: Path) -> Part:
    with np.load(path) as arrays:
        names = Names(errors=tuple(arrays["errors"]), remotes=tuple(arrays["remotes"]))
        return arrays["requests"], arrays["chunks"], names


def to_parquet(rows: NDArray[Any], names: Names) -> bytes:
    """A table as the bytes of a compressed Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(_table(rows, names, {}), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_parquet(data: bytes, dtype: np.dtype[Any], names: Names) -> NDArray[Any]:
    """The rows that `to_parquet` wrote. Raises RunInvalid for any other bytes."""
    import pyarrow as pa

    try:
        return _read_table(pa.BufferReader(data), dtype, names)[0]
    except (OSError, ValueError, KeyError) as error:
        raise RunInvalid(f"a damaged table: {error}") from error


def read_parts(directory: Path) -> list[Part]:
    """The parts of all shards in a directory."""
    return [read_part(path) for path in sorted(directory.glob("shard-*.npz"))]


def merge_parts(schedule: Schedule, parts: Sequence[Part]) -> Part:
    """All shards' rows as a single part, sorted by request id. Ids without a row are `lost`.

    Raises RunInvalid for an id that was never scheduled or that occurs twice.
    """
    ids = np.concatenate([np.empty(0, "u4"), *(part[0]["request_id"] for part in parts)])
    if not np.diff(np.sort(ids)).all() or not np.isin(ids, schedule["request_id"]).all():
        raise RunInvalid("the shards' records do not add up: a request appears twice or uninvited")
    errors: dict[str, int] = {"": 0}
    remotes: dict[str, int] = {"": 0}
    merged = empty_requests(schedule)
    merged["status"] = Status.lost
    merged["error_id"] = errors.setdefault("its load-generating process died", 1)
    for requests, _, names in parts:
        rows = requests.copy()
        rows["error_id"] = _renumber(rows["error_id"], names.errors, errors)
        rows["remote_id"] = _renumber(rows["remote_id"], names.remotes, remotes)
        merged[np.searchsorted(schedule["request_id"], rows["request_id"])] = rows
    chunks = np.concatenate([np.empty(0, CHUNKS), *(part[1] for part in parts)])
    chunks = chunks[np.argsort(chunks["request_id"], kind="stable")]
    return merged, chunks, Names(errors=tuple(errors), remotes=tuple(remotes))


def read_manifest_file(directory: Path) -> tuple[Manifest, ClientReport]:
    """The manifest of a run directory, and the client's measurements of itself from the same file.
    Raises UsageError if there is no manifest, RunInvalid if it is damaged."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise UsageError(f"{directory}: not a run directory (no manifest.json in it)")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunInvalid(f"{path}: damaged manifest: {error}") from None
    return read_manifest(content, str(path)), read_client_report(content, str(path))


def write_schedule(directory: Path, run: Run) -> None:
    """Writes manifest, schedule and edges: the plan, before the first request is sent."""
    _write_json(directory / "manifest.json", run.manifest.to_json())
    _write_table(directory / "schedule.parquet", run.schedule_rows, run.names, {})
    _write_table(directory / "edges.parquet", run.edge_rows, run.names, {})


def write_schedule_file(path: Path, schedule: Schedule, names: Names) -> None:
    """Writes a schedule in the format of `schedule.parquet`. Raises UsageError if that fails."""
    try:
        _write_table(path, schedule, names, {})
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_run(directory: Path, run: Run, derived: dict[str, NDArray[Any]]) -> None:
    """Writes the results of a run. `derived` are further columns of its requests (ttft_s, …)."""
    content = {**run.manifest.to_json(), "instrument": run.instrument.to_json()}
    _write_json(directory / "manifest.json", content)
    _write_table(directory / "chunks.parquet", run.chunk_rows, run.names, {})
    if len(run.server_rows):
        _write_table(directory / "server.parquet", run.server_rows, run.names, {})
    # Last: once this file exists, the shards' parts are not needed any more (`read_run`).
    _write_table(directory / "requests.parquet", run.request_rows, run.names, derived)


def write_summary(directory: Path, summary: Mapping[str, object]) -> None:
    _write_json(directory / "summary.json", summary)


def read_run(directory: Path | str) -> Run:
    """Reads a recorded run; from the shards' parts if its process ended before it merged them.
    Raises UsageError if `directory` is no run directory, RunInvalid if it is damaged."""
    directory = Path(directory)
    manifest, instrument = read_manifest_file(directory)
    known = Names(classes=manifest.names.classes, tenants=manifest.names.tenants)
    try:
        schedule, names = _read_table(directory / "schedule.parquet", SCHEDULE, known)
        edges, _ = _read_table(directory / "edges.parquet", EDGES, names)
        has_requests = (directory / "requests.parquet").exists()
        if not has_requests and (parts := read_parts(directory / "parts")):
            requests, chunks, found = merge_parts(schedule, parts)
            names = replace(names, errors=found.errors, remotes=found.remotes)
        else:
            requests, names = _read_table(directory / "requests.parquet", REQUESTS, names)
            chunks, _ = _read_table(directory / "chunks.parquet", CHUNKS, names)
        server = np.empty(0, SERVER)
        if (directory / "server.parquet").exists():
            server, names = _read_table(directory / "server.parquet", SERVER, names)
    except FileNotFoundError as error:
        raise UsageError(f"{directory}: this run was never finished ({error})") from None
    except (OSError, ValueError, KeyError) as error:
        raise RunInvalid(f"{directory}: damaged run directory: {error}") from error
    return Run(manifest, schedule, requests, chunks, edges, names, instrument, server)


def _renumber(
    ids: NDArray[np.unsignedinteger[Any]], texts: Sequence[str], into: dict[str, int]
) -> NDArray[np.int64]:
    return _lookup([into.setdefault(str(text), len(into)) for text in texts], ids)


def _lookup(numbers: Sequence[int], codes: NDArray[Any]) -> NDArray[np.int64]:
    table = np.array(numbers or [0], np.int64)
    looked_up: NDArray[np.int64] = table[codes]
    return looked_up


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    partial.rename(path)


def _write_table(
    path: Path, rows: NDArray[Any], names: Names, derived: dict[str, NDArray[Any]]
) -> None:
    from pyarrow import parquet

    partial = path.with_suffix(".partial")
    parquet.write_table(_table(rows, names, derived), partial, compression="zstd")
    partial.rename(path)


def _table(rows: NDArray[Any], names: Names, derived: dict[str, NDArray[Any]]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    for field in rows.dtype.names or ():
        column = np.ascontiguousarray(rows[field])
        if field in _ENUMS:
            columns[field] = _dictionary(column, [member.name for member in _ENUMS[field]])
        elif field in NAMED:
            word, texts = NAMED[field]
            columns[word] = _dictionary(column, getattr(names, texts))
        else:
            columns[field] = _plain(column)
    columns |= {name: _plain(np.ascontiguousarray(column)) for name, column in derived.items()}
    return pa.table(columns).replace_schema_metadata({"slobench": str(SCHEMA)})


def _plain(column: NDArray[Any]) -> pa.Array:
    """A column without nulls, from the array's memory. `pa.array` would import pandas (0.4 s), only
    to check whether the column is of a pandas type."""
    import pyarrow as pa

    if column.dtype == bool:
        bits = np.packbits(column, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(column), [None, pa.py_buffer(bits)])
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])


def _dictionary(codes: NDArray[Any], words: Sequence[str]) -> pa.Array:
    import pyarrow as pa

    encoded = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    texts = pa.Array.from_buffers(pa.string(), len(words), buffers)
    return pa.DictionaryArray.from_arrays(_plain(codes.astype(np.int32)), texts)


def _read_table(
    source: Path | pa.BufferReader, dtype: np.dtype[Any], names: Names
) -> tuple[NDArray[Any], Names]:
    from pyarrow import parquet

    with parquet.ParquetFile(source) as file:  # `read_table` would import pandas, 0.4 s
        table = file.read()
    rows = np.zeros(table.num_rows, dtype)
    for field in dtype.names or ():
        if field in _ENUMS:
            codes, words = _codes(table, field)
            rows[field] = _lookup([int(_ENUMS[field][word]) for word in words], codes)
        elif field in NAMED:
            word, texts = NAMED[field]
            codes, words = _codes(table, word)
            known = list(getattr(names, texts))
            known += [text for text in words if text not in known]
            rows[field] = _lookup([known.index(text) for text in words], codes)
            names = replace(names, **{texts: tuple(known)})
        elif field in LATER_REQUESTS and field not in table.column_names:
            rows[field] = np.nan
        elif field in table.column_names or field not in LATER:
            rows[field] = _numbers(table.column(field).combine_chunks())
    return rows, names


def _codes(table: pa.Table, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    encoded = table.column(column).combine_chunks()
    if not table.num_rows:
        return np.empty(0, np.int64), ()
    codes: NDArray[np.int64] = _numbers(encoded.indices).astype(np.int64)
    return codes, tuple(encoded.dictionary.to_pylist())


def _numbers(array: pa.Array) -> NDArray[Any]:
    """The values of an array without nulls. `to_numpy` would import pandas, as `pa.array` does."""
    import pyarrow as pa

    if array.null_count:
        raise ValueError("a column of numbers has holes")
    values, start, stop = array.buffers()[1], array.offset, array.offset + len(array)
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(values, np.uint8) if values else np.empty(0, np.uint8)
        return np.unpackbits(bits, count=stop, bitorder="little")[start:].astype(bool)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(values, dtype, stop)[start:] if values else np.empty(0, dtype)
