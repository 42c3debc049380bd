"""Names of recorded results: a path, or a name below runs/, such as `latest`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from loadgen.errors import UsageError, nearest

RESULTS = Path("runs")
MARKER = "study.json"
"""The file that the directory of a study holds."""
_MOST_NAMES = 8


def directory_of(name: Path | str) -> Path:
    """The directory of a run, of a search or of a folder of runs. A path comes before a name below
    runs/. Raises UsageError for a name that is neither; a path that does not exist is returned, for
    the reader to refuse."""
    path = Path(name)
    if path.exists() or len(path.parts) != 1:
        return path
    if (RESULTS / path).is_dir():
        return RESULTS / path
    recorded = RESULTS.iterdir() if RESULTS.is_dir() else ()
    names = sorted((p.name for p in recorded if is_result(p)), reverse=True)
    known = nearest(path.name, _some(names)) if names else f"{RESULTS}/ has none"
    raise UsageError(f"{name}: no such run or search here or in {RESULTS}/; {known}")


def _some(names: list[str]) -> list[str]:
    """The newest names, `latest` first."""
    return names if len(names) <= _MOST_NAMES else ["latest", *names[: _MOST_NAMES - 1]]


def is_result(directory: Path) -> bool:
    """Whether a directory holds a run or a study."""
    return (directory / "manifest.json").is_file() or (directory / MARKER).is_file()


def runs_of(names: Iterable[Path | str]) -> list[Path]:
    """The run directories of several names, each once: of a search or another folder all runs in
    it. Raises UsageError for a name that is unknown; a directory without any is its own only entry,
    for the reader to refuse."""
    found: dict[Path, Path] = {}
    for name in names:
        directory = directory_of(name)
        for run in _runs_in(directory):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_in(directory: Path) -> list[Path]:
    if not directory.is_dir() or (directory / "manifest.json").is_file():
        return [directory]
    return runs_below(directory) or [directory]


def runs_below(directory: Path) -> list[Path]:
    """The run directories at any depth below a directory, without those behind links."""
    return [manifest.parent for manifest in files_below(directory, "manifest.json")]


def files_below(directory: Path, name: str) -> list[Path]:
    """The files of this name at any depth below a directory, in order, without those behind links
    below it, such as runs/latest."""
    found = sorted(directory.rglob(name))
    return [file for file in found if not _is_behind_link(file, directory)]


def _is_behind_link(file: Path, directory: Path) -> bool:
    between = (part for part in file.parents if directory in part.parents)
    return any(part.is_symlink() for part in between)
