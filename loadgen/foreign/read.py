"""Reads result files of other load generators, whose tool is recognized by their content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.errors import UsageError
from loadgen.foreign.aiperf import TOOL as AIPERF
from loadgen.foreign.aiperf import is_aiperf, read_aiperf
from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import ForeignRun, JsonValue, json_values
from loadgen.foreign.guidellm import TOOL as GUIDELLM
from loadgen.foreign.guidellm import is_guidellm, read_guidellm
from loadgen.foreign.inference_perf import TOOL as INFERENCE_PERF
from loadgen.foreign.inference_perf import is_inference_perf, read_inference_perf
from loadgen.foreign.locust import JudgedSummary, judge_locust, read_locust
from loadgen.foreign.mlperf_endpoints import TOOL as MLPERF_ENDPOINTS
from loadgen.foreign.mlperf_endpoints import is_mlperf_endpoints, read_mlperf_endpoints
from loadgen.foreign.sglang import TOOL as SGLANG
from loadgen.foreign.sglang import is_sglang, read_sglang
from loadgen.foreign.vllm import TOOL as VLLM
from loadgen.foreign.vllm import is_vllm, read_vllm
from loadgen.manifest.sections import text_sha256
from loadgen.records import Run
from loadgen.system.whole_file import read_regular

_MOST_BYTES = 2 << 30
_SUFFIXES = (".json", ".jsonl")


class Format(NamedTuple):
    """A format: the tool, whether the first JSON value of a file is of it, and its reader."""

    tool: str
    is_of: Callable[[Any], bool]
    read: Callable[[Sequence[JsonValue], Path], Iterator[ForeignRun]]


def _summary_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}_aiperf.json")


def _with_summary(values: Sequence[JsonValue], path: Path) -> Iterator[ForeignRun]:
    """The records of aiperf with the summary next to them."""
    summary = _summary_of(path)
    beside = json_values(_text(summary), str(summary)) if summary.is_file() else []
    return read_aiperf(values, str(path), next(iter(beside), None), str(summary))


def _of_object(is_of: Callable[[Mapping[str, Any]], bool]) -> Callable[[Any], bool]:
    """The predicate of objects for any JSON value."""
    return lambda content: isinstance(content, dict) and is_of(content)


FORMATS = (
    Format(VLLM, _of_object(is_vllm), lambda values, path: read_vllm(values, str(path))),
    Format(SGLANG, _of_object(is_sglang), lambda values, path: read_sglang(values, str(path))),
    Format(
        GUIDELLM, _of_object(is_guidellm), lambda values, path: read_guidellm(values, str(path))
    ),
    Format(AIPERF, _of_object(is_aiperf), _with_summary),
    Format(
        MLPERF_ENDPOINTS,
        _of_object(is_mlperf_endpoints),
        lambda values, path: read_mlperf_endpoints(values, str(path)),
    ),
    Format(
        INFERENCE_PERF,
        is_inference_perf,
        lambda values, path: read_inference_perf(values, str(path)),
    ),
)


def imported_runs(
    paths: Iterable[Path],
    command: Sequence[str],
    slobench: str,
    slo: Sequence[str] = (),
    skip: Callable[[Path], None] = lambda path: None,
) -> Iterator[tuple[str, Run]]:
    """The results of files and of all files below directories: name and run. Calls `skip` with
    each file of a directory that is of no known tool. Raises UsageError for a file that cannot be
    read, and for paths without any result."""
    for path in paths:
        is_any = False
        for file in _files(path):
            found = _of_file(file, tuple(command), slobench, slo, path.is_dir())
            if not found:
                skip(file)
            is_any = is_any or bool(found)
            yield from found
        if not is_any:
            raise UsageError(f"{path}: no result of {_tools()} in it")


def read_summaries(paths: Iterable[Path], slo: Sequence[str]) -> Iterator[JudgedSummary]:
    """The verdicts of results without requests: the statistics of Locust. Raises UsageError for a
    damaged file, and for an SLO whose number it does not have."""
    for path in paths:
        yield judge_locust(read_locust(_text(path), str(path)), path.stem, slo)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = {file for suffix in _SUFFIXES for file in path.rglob(f"*{suffix}")}
    return sorted(files - {_summary_of(file) for file in files})


def _of_file(
    path: Path, command: tuple[str, ...], slobench: str, slo: Sequence[str], is_optional: bool
) -> list[tuple[str, Run]]:
    """The results of a file; none of a file of no known tool, if it is optional."""
    text = _text(path)
    if path.suffix == ".csv" and not is_optional:
        raise UsageError(f"{path}: a CSV file has no requests; `slobench judge` reads Locust's")
    values = json_values(text, str(path))
    first = values[0].content if values else None
    format_ = next((f for f in FORMATS if f.is_of(first)), None)
    if format_ is None:
        if is_optional:
            return []
        raise UsageError(f"{path}: not a result of {_tools()}")
    results = list(format_.read(values, path))
    origin = Origin(str(path), text_sha256(text), command, slobench)
    names = [path.stem if len(results) == 1 else f"{path.stem}-{r.part}" for r in results]
    return [
        (name, build(found, name, origin, slo)) for name, found in zip(names, results, strict=True)
    ]


def _text(path: Path) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None


def _tools() -> str:
    *others, last = (format_.tool for format_ in FORMATS)
    return f"{', '.join(others)} or {last}" if others else last
