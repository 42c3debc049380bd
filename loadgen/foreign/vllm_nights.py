"""Nights of results of `vllm bench serve --save-result`, as vLLM's perf-benchmark and perf-eval
keep them: a directory per night, a file per run, without requests.

perf-eval repeats a run as `bench-NAME-run-1.json`, `-run-2`, … and writes their medians to
`bench-NAME.json`.

Source: vllm-project/perf-eval, lib/aggregate_perf.py and lib/check_perf_assertions.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError, nearest
from loadgen.foreign.foreign_run import as_section, json_values
from loadgen.foreign.vllm import is_vllm, started
from loadgen.manifest.json_section import JsonSection
from loadgen.system.whole_file import read_regular

_MOST_BYTES = 2 << 30
_RUN = re.compile(r"-run-\d+$")
_IDENTITY = ("model_id", "backend", "num_prompts", "request_rate", "max_concurrency")


class VllmNumbers(JsonSection, frozen=True):
    """The keys that are read besides the numbers. With `aggregation_method` the file holds the
    medians of several runs."""

    model_id: str = ""
    backend: str = ""
    num_prompts: int = 0
    request_rate: float | str | None = None
    max_concurrency: int | None = None
    completed: int = 0
    date: str = ""
    aggregation_method: str | None = None


@dataclass(frozen=True, slots=True)
class VllmRuns:
    """The runs of a configuration in a night: by metric a number per run, and the load, which
    nights must share to be compared."""

    numbers: Mapping[str, Sequence[float]]
    load: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VllmNight:
    """A night: its runs by configuration (the name of the file without the number of the run).
    `started` is the ISO 8601 time of its first file, "" where a file has none. `left_out` are
    sentences."""

    name: str
    started: str
    runs: Mapping[str, VllmRuns]
    left_out: tuple[str, ...] = ()


def read_nights(path: Path, metrics: Sequence[str]) -> list[VllmNight]:
    """The nights of a directory, in order of time, or of name where a file has no date. Runs with
    failed requests are left out. Raises UsageError for a damaged file, an unknown metric, and for
    fewer than two nights."""
    folders = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    nights = [night for folder in folders if (night := _night(folder, metrics)) is not None]
    if len(nights) < 2:
        raise UsageError(
            f"{path}: expected a directory with two or more nights, each a directory with results "
            f"of vllm bench serve, found {len(nights)}"
        )
    if all(night.started for night in nights):
        nights.sort(key=lambda night: night.started)
    return nights


def _night(folder: Path, metrics: Sequence[str]) -> VllmNight | None:
    """The night of a folder; None without a result in it."""
    single: dict[str, list[tuple[VllmNumbers, list[float]]]] = {}
    medians: dict[str, list[tuple[VllmNumbers, list[float]]]] = {}
    dates, left_out = [], []
    for file in sorted(folder.rglob("*.json")):
        for value in json_values(_text(file), str(file)):
            content, place = value.content, value.place(str(file))
            if not isinstance(content, dict) or not is_vllm(content):
                continue
            run = as_section(content, VllmNumbers, place)
            name = _RUN.sub("", file.relative_to(folder).with_suffix("").as_posix())
            dates.append(started(run.date))
            if run.completed < run.num_prompts:
                failed = run.num_prompts - run.completed
                left_out.append(f"{place}: {failed} of {run.num_prompts} requests failed")
                continue
            of_kind = single if run.aggregation_method is None else medians
            numbers = [_number(content, metric, place) for metric in metrics]
            of_kind.setdefault(name, []).append((run, numbers))
    if not dates:
        return None
    runs = {
        name: _runs(found, metrics, f"{folder / name}")
        for name, found in (medians | single).items()
    }
    return VllmNight(folder.name, min(dates), runs, tuple(left_out))


def _runs(
    found: Sequence[tuple[VllmNumbers, list[float]]], metrics: Sequence[str], where: str
) -> VllmRuns:
    """Raises UsageError for runs of different loads under a name."""
    loads = [{key: getattr(run, key) for key in _IDENTITY} for run, _ in found]
    for load in loads[1:]:
        for key in _IDENTITY:
            if load[key] != loads[0][key]:
                raise UsageError(f"{where}: {key}: runs with {loads[0][key]} and with {load[key]}")
    columns = zip(*(numbers for _, numbers in found), strict=True)
    return VllmRuns(dict(zip(metrics, columns, strict=True)), loads[0])


def _number(content: Mapping[str, Any], metric: str, place: str) -> float:
    """A metric; NaN for a zero, which vLLM writes where it has no sample."""
    value = content.get(metric)
    if metric not in content:
        known = [key for key, other in content.items() if isinstance(other, float)]
        raise UsageError(f"{place}: no metric {metric}; {nearest(metric, known)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{place}: {metric}: expected a number of 0 or more, found {value!r}")
    return float(value) or math.nan


def _text(file: Path) -> str:
    try:
        return read_regular(file, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from None
