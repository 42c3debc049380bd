"""Verification of run directories, and of folders and stores with any; changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from loadgen.archive import checksums, store
from loadgen.archive.names import files_below, runs_below
from loadgen.errors import RunInvalid, SlobenchError, UsageError

State = Literal["verified", "unfinished", "damaged"]


@dataclass(frozen=True)
class Verified:
    """The result for one directory. `kind` is `run`, `baseline`, or the verb of a study, for the
    files that it has besides its runs. `n_files` were compared with their checksums. `problems` are
    sentences that begin with the path of a file. A study is unfinished without its result."""

    path: str
    kind: str
    state: State
    n_files: int
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


CheckStore = Callable[[Path], Verified | None]
"""The result for a study or a baseline, without its runs; None for another directory."""
_MARKS = {"study.json": 1, "key.json": 2}
"""Files of studies and baselines, and how many levels below the directory they are."""


def verify(path: Path, check_store: CheckStore = lambda path: None) -> list[Verified]:
    """The results for a run directory, a study, a baseline, or a folder with any of them at any
    depth. Raises UsageError for a path without any."""
    if not path.is_dir():
        raise UsageError(f"{path}: not a directory")
    if (path / "manifest.json").is_file():
        return [_run(path)]
    results = [_run(directory) for directory in runs_below(path)]
    roots = {
        file.parents[depth - 1]
        for mark, depth in _MARKS.items()
        for file in files_below(path, mark)
    }
    stores = [check_store(root) for root in sorted({path, *roots})]
    results += [result for result in stores if result is not None]
    if not results:
        raise UsageError(f"{path}: holds no run, no study and no baseline")
    return results


def exit_code(results: list[Verified]) -> int:
    """0 if everything is verified, else 3."""
    return 0 if all(result.state == "verified" for result in results) else RunInvalid.exit_code


def _run(directory: Path) -> Verified:
    problems = checksums.problems(directory)
    try:
        run = store.read_run(directory)
        summary = _summary_problem(directory, run.manifest.run, len(run.schedule_rows))
    except UsageError:
        return Verified(str(directory), "run", "unfinished", _n_files(directory), tuple(problems))
    except SlobenchError as error:
        problems = list(dict.fromkeys([*problems, str(error)]))
        return Verified(str(directory), "run", "damaged", _n_files(directory), tuple(problems))
    problems += [summary] if summary else []
    state: State = "unfinished" if store.has_parts(directory) else "verified"
    if problems:
        state = "damaged"
    return Verified(str(directory), "run", state, _n_files(directory), tuple(problems))


def _summary_problem(directory: Path, run: str, n_requests: int) -> str:
    """What shows that summary.json is of another run; "" if nothing does, or without the file."""
    path = directory / "summary.json"
    if not path.exists():
        return ""
    content = store.read_summary(directory)
    counts = content.get("counts")
    scheduled = counts.get("scheduled") if isinstance(counts, dict) else None
    if (content.get("run"), scheduled) == (run, n_requests):
        return ""
    return (
        f"{path}: is of run {content.get('run')!r} with {scheduled} requests, and manifest.json of "
        f"{run!r} with {n_requests}"
    )


def _n_files(directory: Path) -> int:
    try:
        return len(checksums.read(directory) or {})
    except RunInvalid:
        return 0
