"""Verification of run directories, and of folders and stores with any; changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from loadgen.archive import checksums, store
from loadgen.archive.names import runs_below
from loadgen.errors import RunInvalid, SlobenchError, UsageError

State = Literal["verified", "unfinished", "damaged"]


@dataclass(frozen=True)
class Verified:
    """The result for one directory. `kind` is `run`, `baseline`, or `folder` for the files that a
    night has besides its runs; `n_files` were compared with their checksums. `problems` are
    sentences that begin with the path of a file."""

    path: str
    kind: str
    state: State
    n_files: int
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


CheckStore = Callable[[Path], tuple[str, int, tuple[str, ...]] | None]
"""(kind, number of files, problems) of a store besides runs; None for another directory."""


def verify(path: Path, check_store: CheckStore = lambda path: None) -> list[Verified]:
    """The results for a run directory, a store, or a folder with any of them at any depth. Raises
    UsageError for a path without any."""
    if not path.is_dir():
        raise UsageError(f"{path}: not a directory")
    if (store_result := _store(path, check_store)) is not None:
        return [store_result]
    if (path / "manifest.json").is_file():
        return [_run(path)]
    found = [_run(directory) for directory in runs_below(path)]
    roots = sorted({key.parent.parent for key in path.rglob("key.json")})
    stores = [_store(root, check_store) for root in roots]
    found += [result for result in stores if result is not None]
    if (path / checksums.NAME).exists():
        problems = tuple(checksums.problems(path))
        state: State = "damaged" if problems else "verified"
        found.append(Verified(str(path), "folder", state, _n_files(path), problems))
    if not found:
        raise UsageError(f"{path}: holds no run, no night and no baseline")
    return found


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


def _store(path: Path, check_store: CheckStore) -> Verified | None:
    checked = check_store(path)
    if checked is None:
        return None
    kind, n_files, problems = checked
    state: State = "damaged" if problems else "verified"
    return Verified(str(path), kind, state, n_files, problems)


def _n_files(directory: Path) -> int:
    try:
        return len(checksums.read(directory) or {})
    except RunInvalid:
        return 0
