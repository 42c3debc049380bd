"""Run directory: Parquet tables, the manifest, and the shards' parts until they are merged.

    manifest.json  schedule.parquet  edges.parquet  requests.parquet  chunks.parquet
    pieces.npy (if prompts share pieces)  server.parquet (if the server exposes metrics)
    summary.json  report.html  logs/  checksums.sha256

Every file that is read is compared with checksums.sha256 first, and the files with each other.
For use in notebooks, status, class, tenant, error and remote address are dictionary-encoded
strings, and requests.parquet has the derived columns `ttft_s tpot_s e2e_s slo_met`.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.archive import checksums
from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.sections import Manifest, read_client_report, read_manifest
from loadgen.manifest.self_report import ClientReport
from loadgen.records import (
    CHUNKS,
    EDGES,
    LATER_COLUMNS,
    NAMED,
    NO_PIECES,
    PIECES,
    REQUESTS,
    SCHEDULE,
    SCHEMA,
    SERVER,
    Chunks,
    Edges,
    FinishReason,
    Names,
    Pieces,
    Requests,
    Run,
    Schedule,
    Status,
    TokenSource,
    empty_requests,
    schedule_sha256,
)
from loadgen.system.whole_file import CountedFile, opened_regular, read_result, replacing

if TYPE_CHECKING:
    import pyarrow as pa

_ENUMS = {"status": Status, "token_source": TokenSource, "finish_reason": FinishReason}
Part = tuple[Requests, Chunks, Names]
_UNDECODED = re.compile(r"shard-\d+-\d+\.(?:partial|raw|claimed)")  # see part_decoder
_MAX_DISTINCT = 1000
_MAX_TEXT = 300
_PLAN = ("manifest.json", "schedule.parquet", "edges.parquet")
_RESULTS = ("requests.parquet", "chunks.parquet")
_SERVER = "server.parquet"
_PIECES = "pieces.npy"  # not compressed: it can be mapped
MORE = ".more"
"""Of the file with the rows that a shard added to its plan."""
_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    MemoryError,
    OverflowError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy, zipfile and Arrow raise for damaged files."""


class Ids:
    """Small ids for strings, in order of appearance; 0 is the empty string. After `_MAX_DISTINCT`
    different strings all further strings share an id, so that a server with a nonce in each error
    message cannot fill the table."""

    def __init__(self) -> None:
        self._ids = {"": 0}

    def id(self, text: str) -> int:
        text = text[:_MAX_TEXT]
        if text not in self._ids and len(self._ids) > _MAX_DISTINCT:
            text = f"(more than {_MAX_DISTINCT} different texts)"
        return self._ids.setdefault(text, len(self._ids))

    def texts(self) -> tuple[str, ...]:
        return tuple(self._ids)


def write_part(
    path: Path,
    requests: Requests,
    chunks: Chunks,
    names: Names,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Writes a shard's rows for `read_part`; atomic. Calls `advance` as the file grows."""
    with replacing(path) as partial, CountedFile(partial, advance) as file:
        _save_part(file, requests, chunks, names)


def part_bytes(requests: Requests, chunks: Chunks, names: Names) -> bytes:
    """The content of the file that `write_part` writes."""
    content = io.BytesIO()
    _save_part(content, requests, chunks, names)
    return content.getvalue()


def write_small_parts(directory: Path, run: Run, most_bytes: int) -> None:
    """Writes the recorded rows of a run as parts in files of at most `most_bytes`.
    Raises OSError, also where a single row is too large."""
    directory.mkdir(exist_ok=True)
    rows = run.request_rows[run.request_rows["status"] != Status.lost]
    n_files = 2 + 2 * (rows.nbytes + run.chunk_rows.nbytes) // most_bytes
    for number, share in enumerate(np.array_split(rows, min(n_files, max(1, len(rows))))):
        chunks = run.chunk_rows[np.isin(run.chunk_rows["request_id"], share["request_id"])]
        write_part(directory / f"shard-kept-{number}.npz", share, chunks, run.names)


def _save_part(file: IO[bytes], requests: Requests, chunks: Chunks, names: Names) -> None:
    np.savez(
        file,
        requests=requests,
        chunks=chunks,
        errors=np.array(names.errors),
        remotes=np.array(names.remotes),
    )


def read_part(path: Path) -> Part:
    """The rows that `write_part` wrote. Raises RunInvalid for a damaged file; the CRC-32 of each
    array is verified before it is parsed."""
    try:
        with opened_regular(path) as file:
            return part_of_file(file, str(path))
    except OSError as error:
        raise RunInvalid(f"{path}: damaged: {error}") from None


def part_of_file(file: IO[bytes], where: str) -> Part:
    """`read_part` of an open file, or of `part_bytes`."""
    try:
        with zipfile.ZipFile(file) as archive:
            if (name := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {name} is wrong")
        file.seek(0)
        with np.load(file) as arrays:
            names = Names(errors=tuple(arrays["errors"]), remotes=tuple(arrays["remotes"]))
            requests, chunks = arrays["requests"], arrays["chunks"]
    except _DAMAGED as error:
        raise RunInvalid(f"{where}: damaged: {error}") from None
    if requests.dtype != REQUESTS or chunks.dtype != CHUNKS:
        raise RunInvalid(f"{where}: its columns are not those of this version")
    return requests, chunks, names


def to_parquet(rows: NDArray[Any], names: Names, marks: Mapping[str, str] | None = None) -> bytes:
    """A table as the bytes of a compressed Parquet file."""
    from loadgen.archive.arrow import pa, parquet

    sink = pa.BufferOutputStream()
    table = _table(rows, names, {}, marks or {})
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_parquet(data: bytes, dtype: np.dtype[Any], names: Names) -> NDArray[Any]:
    """The rows that `to_parquet` wrote. Raises RunInvalid for any other bytes."""
    from loadgen.archive.arrow import pa

    try:
        return _read_table(pa.BufferReader(data), dtype, names, {})[0]
    except _DAMAGED as error:
        raise RunInvalid(f"a damaged table: {error}") from error


def read_parts(directory: Path) -> list[Part]:
    """The parts of all shards in a directory."""
    return [read_part(path) for path in sorted(directory.glob("shard-*.npz"))]


def append_more(path: Path, rows: Schedule, edges: Edges) -> None:
    """Adds planned rows, and the edges that lead to them, to a shard's file of rows beyond its
    plan."""
    with path.open("ab") as file:
        np.save(file, rows)
        np.save(file, edges)


def with_more(schedule: Schedule, edges: Edges, directory: Path) -> tuple[Schedule, Edges]:
    """A plan with the rows that shards have added to it, from their files in `directory`."""
    added = [block for path in sorted(directory.glob(f"shard-*{MORE}")) for block in _more_in(path)]
    if not added:
        return schedule, edges
    rows = np.concatenate([schedule, *(rows for rows, _ in added)])
    links = np.concatenate([edges, *(links for _, links in added)])
    by_id = np.argsort(rows["request_id"], kind="stable")
    return rows[by_id], links[np.lexsort((links["after"], links["request_id"]))]


def _more_in(path: Path) -> Iterator[tuple[Schedule, Edges]]:
    """The blocks of a file, without a last block that is cut."""
    with path.open("rb") as file:
        while True:
            try:
                rows, edges = np.load(file), np.load(file)
            except (EOFError, ValueError):
                return
            if rows.dtype != SCHEDULE or edges.dtype != EDGES:
                raise RunInvalid(f"{path}: its columns are not those of this version")
            yield rows, edges


def merge_parts(schedule: Schedule, parts: Sequence[Part]) -> Part:
    """All shards' rows as a single part, sorted by request id. Ids without a row are `lost`.

    Raises RunInvalid for an id that was never scheduled or that occurs twice.
    """
    ids = np.concatenate([np.empty(0, "u4"), *(part[0]["request_id"] for part in parts)])
    if not np.diff(np.sort(ids)).all() or not np.isin(ids, schedule["request_id"]).all():
        raise RunInvalid("the shards' records do not add up: a request appears twice or uninvited")
    errors = Ids()
    merged = empty_requests(schedule)
    merged["status"] = Status.lost
    merged["error_id"] = errors.id("its load-generating process died")
    rows, chunks, names = _joined(parts, errors)
    merged[np.searchsorted(schedule["request_id"], rows["request_id"])] = rows
    return merged, chunks, names


def join_parts(path: Path) -> None:
    """Joins the parts of the shard with the last part at `path` into that file."""
    others = sorted(path.parent.glob(f"{path.stem}-*.npz"))
    if others:
        write_part(path, *joined([read_part(part) for part in (path, *others)]))
    for part in others:
        part.unlink()


def joined(parts: Sequence[Part]) -> Part:
    """The rows of all parts of a shard as one part."""
    return _joined(parts, Ids())


def _joined(parts: Sequence[Part], errors: Ids) -> Part:
    """The rows of all parts, their chunks grouped by request id, and the names of both."""
    remotes, tables = Ids(), [np.empty(0, REQUESTS)]
    for requests, _, names in parts:
        rows = requests.copy()
        rows["error_id"] = _renumber(rows["error_id"], names.errors, errors)
        rows["remote_id"] = _renumber(rows["remote_id"], names.remotes, remotes)
        tables.append(rows)
    chunks = np.concatenate([np.empty(0, CHUNKS), *(part[1] for part in parts)])
    chunks = chunks[np.argsort(chunks["request_id"], kind="stable")]
    return np.concatenate(tables), chunks, Names(errors=errors.texts(), remotes=remotes.texts())


def read_manifest_file(directory: Path) -> tuple[Manifest, ClientReport]:
    """The manifest of a run directory, and the client's measurements of itself from the same file.
    Raises UsageError if there is no manifest, RunInvalid if it is damaged."""
    return _read_manifest_file(directory)[:2]


def _read_manifest_file(
    directory: Path,
) -> tuple[Manifest, ClientReport, dict[str, tuple[str, ...]]]:
    """Also the checksums of the directory."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise UsageError(f"{directory}: not a run directory (no manifest.json in it)")
    listed = checksums.read(directory)
    if listed is not None:
        checksums.check(directory, listed, ["manifest.json"])
    try:
        content = json.loads(read_result(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RunInvalid(f"{path}: damaged manifest: {error}") from None
    manifest = read_manifest(content, str(path))
    if listed is None:
        raise checksums.missing(directory)
    return manifest, read_client_report(content, str(path)), listed


def write_schedule(directory: Path, run: Run) -> None:
    """Writes manifest, schedule, edges and pieces: the plan, before the first request is sent."""
    marks = _marks(run.manifest)
    _write_bytes(directory / "manifest.json", _json_bytes(run.manifest.to_json()))
    _write_table(directory / "schedule.parquet", run.schedule_rows, run.names, {}, marks)
    _write_table(directory / "edges.parquet", run.edge_rows, run.names, {}, marks)
    if len(run.piece_rows):
        with replacing(directory / _PIECES) as partial, partial.open("wb") as file:
            np.save(file, run.piece_rows)
        checksums.begin(directory, (*_PLAN, _PIECES))
    else:
        checksums.begin(directory, _PLAN)


def write_schedule_file(path: Path, schedule: Schedule, names: Names) -> None:
    """Writes a schedule in the format of `schedule.parquet`. Raises UsageError if that fails."""
    try:
        _write_table(path, schedule, names, {}, {})
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_run(directory: Path, run: Run, derived: dict[str, NDArray[Any]]) -> None:
    """Writes the results of a run. `derived` are further columns of its requests (ttft_s, …).

    The shards' parts are needed until the manifest is written, which is the last file; `expect`
    makes the directory readable at every moment in between.
    """
    if run.manifest.extended_rows:
        _replace_table(directory, "schedule.parquet", run.schedule_rows, run)
        _replace_table(directory, "edges.parquet", run.edge_rows, run)
    content = {**run.manifest.to_json(), "instrument": run.instrument.to_json()}
    tables = {"chunks.parquet": run.chunk_rows, "requests.parquet": run.request_rows}
    if len(run.server_rows):
        tables[_SERVER] = run.server_rows
    for name, rows in tables.items():
        added = derived if name == "requests.parquet" else {}
        _write_table(directory / name, rows, run.names, added, _marks(run.manifest))
    checksums.cover(directory, *(directory / name for name in tables))
    checksums.replace(directory, "manifest.json", _json_bytes(content))


def _replace_table(directory: Path, name: str, rows: NDArray[Any], run: Run) -> None:
    checksums.replace(directory, name, to_parquet(rows, run.names, _marks(run.manifest)))


def write_summary(directory: Path, summary: Mapping[str, object]) -> None:
    """Writes summary.json and renews its checksum."""
    checksums.replace(directory, "summary.json", _json_bytes(summary))


def read_summary(directory: Path) -> dict[str, Any]:
    """The content of summary.json. Raises FileNotFoundError without it, RunInvalid if it is
    damaged."""
    path = directory / "summary.json"
    try:
        text = read_result(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RunInvalid(f"{path}: cannot be read: {error}") from None
    listed = checksums.read(directory)
    if listed is not None:
        checksums.check(directory, listed, [path.name])
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunInvalid(f"{path}: damaged: {error}; slobench report writes it again") from None
    if not isinstance(content, dict):
        raise RunInvalid(f"{path}: damaged: no object; slobench report writes it again")
    return content


def undecoded(parts: Path) -> list[Path]:
    """The files of requests as received in the directory of the parts; `part_decoder.decode_left`
    makes parts of them."""
    found = (path for path in sorted(parts.glob("shard-*")) if _UNDECODED.fullmatch(path.name))
    return [path for path in found if path.is_file()]


def has_parts(directory: Path) -> bool:
    """Whether the run's process ended before it had merged the shards' parts."""
    return _has_parts(directory, *_read_manifest_file(directory)[::2])


def read_run(directory: Path | str) -> Run:
    """Reads a recorded run; from the shards' parts if its process ended before it merged them.

    Each file is compared with checksums.sha256, and the files with each other. Raises UsageError if
    `directory` is no run directory, RunInvalid that names the file if it is damaged.
    """
    from loadgen.measure.closed_loop import with_start_left_out  # 16 modules that no writer needs

    directory = Path(directory)
    manifest, instrument, listed = _read_manifest_file(directory)
    is_from_parts = _has_parts(directory, manifest, listed)
    if is_from_parts and undecoded(directory / "parts"):
        raise UsageError(
            f"{directory}: this run was never finished; slobench report {directory} recovers the "
            "rows recorded so far"
        )
    names_read = [*_PLAN[1:], *(() if is_from_parts else _RESULTS)]
    if _SERVER in listed or (directory / _SERVER).exists():
        names_read.append(_SERVER)
    if _PIECES in listed or (directory / _PIECES).exists():
        names_read.append(_PIECES)
    are_listed = [name in listed for name in _RESULTS]
    is_there = any(are_listed) and (directory / "requests.parquet").exists()
    if not (is_from_parts or all(are_listed) or is_there):
        raise UsageError(f"{directory}: this run was never finished (no requests.parquet)")
    checksums.check(directory, listed, names_read)
    marks = _marks(manifest)
    names = Names(classes=manifest.names.classes, tenants=manifest.names.tenants)

    def table(name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        nonlocal names
        try:
            with opened_regular(directory / name):
                rows, names = _read_table(directory / name, dtype, names, marks)
        except FileNotFoundError as error:
            raise UsageError(f"{directory}: this run was never finished ({error})") from None
        except _DAMAGED as error:
            raise RunInvalid(f"{directory / name}: damaged: {error}") from error
        return rows

    schedule, edges = table("schedule.parquet", SCHEDULE), table("edges.parquet", EDGES)
    if is_from_parts:
        schedule, edges = with_more(schedule, edges, directory / "parts")
        n_added = len(schedule) - manifest.n_requests
        manifest = msgspec.structs.replace(manifest, extended_rows=n_added)
        requests, chunks, merged = merge_parts(schedule, read_parts(directory / "parts"))
        names = replace(names, errors=merged.errors, remotes=merged.remotes)
    else:
        requests, chunks = table("requests.parquet", REQUESTS), table("chunks.parquet", CHUNKS)
    has_server = (directory / _SERVER).exists()
    server = table(_SERVER, SERVER) if has_server else np.empty(0, SERVER)
    pieces = _read_pieces(directory / _PIECES) if _PIECES in names_read else NO_PIECES
    run = Run(manifest, schedule, requests, chunks, edges, names, instrument, server, pieces)
    _check_agreement(directory, run)
    return with_start_left_out(run)


def _read_pieces(path: Path) -> Pieces:
    try:
        with opened_regular(path) as file:
            pieces: Pieces = np.load(file)
    except _DAMAGED as error:
        raise RunInvalid(f"{path}: damaged: {error}") from error
    if pieces.dtype != PIECES:
        raise RunInvalid(f"{path}: its columns are not those of this version")
    return pieces


def _has_parts(directory: Path, manifest: Manifest, listed: Mapping[str, tuple[str, ...]]) -> bool:
    name = "requests.parquet"
    is_merged = name in listed and (directory / name).exists() and manifest.ended != "running"
    parts = directory / "parts"
    return not is_merged and (any(parts.glob("shard-*.npz")) or bool(undecoded(parts)))


def _check_agreement(directory: Path, run: Run) -> None:
    """Raises RunInvalid where the files are not of the same run."""
    manifest, requests, chunks = run.manifest, run.request_rows, run.chunk_rows
    planned, n_first = len(run.schedule_rows), manifest.n_requests
    if n_first + manifest.extended_rows != planned:
        raise RunInvalid(
            f"{directory / 'schedule.parquet'}: has {planned} rows, and manifest.json states "
            f"{n_first + manifest.extended_rows}: they are not of the same run"
        )
    edges = run.edge_rows[run.edge_rows["request_id"] < n_first]  # of the plan, with ids 0, 1, …
    planned_sha256 = schedule_sha256(run.schedule_rows[:n_first], edges, run.piece_rows)
    if planned_sha256 != manifest.schedule_sha256:
        raise RunInvalid(
            f"{directory / 'schedule.parquet'}: is not the schedule of manifest.json "
            "(schedule_sha256): they are not of the same run"
        )
    if not np.array_equal(requests["request_id"], run.schedule_rows["request_id"]):
        raise RunInvalid(
            f"{directory / 'requests.parquet'}: its {len(requests)} requests are not the {planned} "
            "of schedule.parquet: they are not of the same run"
        )
    if not np.array_equal(
        chunks["request_id"], np.repeat(requests["request_id"], requests["chunks"])
    ):
        raise RunInvalid(
            f"{directory / 'chunks.parquet'}: its {len(chunks)} chunks are not those that "
            "requests.parquet counts: they are not of the same run"
        )


def _marks(manifest: Manifest) -> dict[str, str]:
    """The run that a table belongs to, for its metadata."""
    return {"run": manifest.run, "started_utc": manifest.started_utc}


def _renumber(
    ids: NDArray[np.unsignedinteger[Any]], texts: Sequence[str], into: Ids
) -> NDArray[np.int64]:
    return _lookup([into.id(str(text)) for text in texts], ids)


def _lookup(numbers: Sequence[int], codes: NDArray[Any]) -> NDArray[np.int64]:
    table = np.array(numbers or [0], np.int64)
    looked_up: NDArray[np.int64] = table[codes]
    return looked_up


def _json_bytes(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def _write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)


def _write_table(
    path: Path,
    rows: NDArray[Any],
    names: Names,
    derived: dict[str, NDArray[Any]],
    marks: Mapping[str, str],
) -> None:
    from loadgen.archive.arrow import parquet

    table = _table(rows, names, derived, marks)
    with replacing(path) as partial:
        parquet.write_table(table, partial, compression="zstd", write_page_checksum=True)


def _table(
    rows: NDArray[Any],
    names: Names,
    derived: dict[str, NDArray[Any]],
    marks: Mapping[str, str],
) -> pa.Table:
    from loadgen.archive.arrow import pa

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
    return pa.table(columns).replace_schema_metadata({"slobench": str(SCHEMA), **marks})


def _plain(column: NDArray[Any]) -> pa.Array:
    """A column without nulls, from the array's memory. `pa.array` would import pandas (0.4 s), only
    to check whether the column is of a pandas type."""
    from loadgen.archive.arrow import pa

    if column.dtype == bool:
        bits = np.packbits(column, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(column), [None, pa.py_buffer(bits)])
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])


def _dictionary(codes: NDArray[Any], words: Sequence[str]) -> pa.Array:
    from loadgen.archive.arrow import pa

    encoded = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    texts = pa.Array.from_buffers(pa.string(), len(words), buffers)
    return pa.DictionaryArray.from_arrays(_plain(codes.astype(np.int32)), texts)


def _read_table(
    source: Path | pa.BufferReader, dtype: np.dtype[Any], names: Names, marks: Mapping[str, str]
) -> tuple[NDArray[Any], Names]:
    """The rows of a table, and `names` with those that it adds. Raises OSError, ValueError or
    KeyError for a damaged table, and for metadata other than `marks`."""
    from loadgen.archive.arrow import parquet

    # `read_table` would import pandas, 0.4 s
    with parquet.ParquetFile(source, page_checksum_verification=True) as file:
        table = file.read()
    metadata = table.schema.metadata or {}
    for key, value in marks.items():
        if (found := metadata.get(key.encode(), b"").decode("utf-8", "replace")) != value:
            raise ValueError(f"it is of another run ({key} {found!r}, not {value!r})")
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
        elif field in LATER_COLUMNS and field not in table.column_names:
            rows[field] = LATER_COLUMNS[field]
        else:
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
    from loadgen.archive.arrow import pa

    if array.null_count:
        raise ValueError("a column of numbers has holes")
    values, start, stop = array.buffers()[1], array.offset, array.offset + len(array)
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(values, np.uint8) if values else np.empty(0, np.uint8)
        return np.unpackbits(bits, count=stop, bitorder="little")[start:].astype(bool)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(values, dtype, stop)[start:] if values else np.empty(0, dtype)
