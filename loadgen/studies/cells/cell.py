"""Cell: a scenario against a target, its definition and its planned runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadgen.archive import checksums
from loadgen.archive.directory import free
from loadgen.archive.store import read_manifest_file
from loadgen.errors import RunInvalid, UsageError
from loadgen.live.watching import Watch
from loadgen.run.manifest import version, without_key
from loadgen.run.run_options import RunOptions
from loadgen.system.whole_file import read_result
from loadgen.workload.scenario import Scenario

CELL_FILE = "cell.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=@+-]{0,119}")
_ENDED = ("completed", "stopped")
_MISSING = "(not there)"


@dataclass(frozen=True)
class Cell:
    """A scenario against a target (as after `--target`).

    `name` is its folder; `factors` are the values in which it differs from other cells, for tables.
    The options' `out_dir`, `force` and `name` are set for each run. Only cells with the same
    `server` label can share a server. A control that `stays_up` keeps its own server and that of
    its cell up while either is measured.
    """

    name: str
    scenario: Scenario
    target: str
    options: RunOptions
    factors: Mapping[str, str] = field(default_factory=dict)
    server: str = ""
    stays_up: bool = False

    def watched(self, watch: Watch | None) -> Cell:
        """The cell with live metrics of its runs exported."""
        return replace(self, options=replace(self.options, watch=watch))

    @property
    def server_key(self) -> tuple[object, ...]:
        """Cells with equal keys can be measured on the same server, in turn."""
        options = self.options
        plugins, settings = tuple(options.plugins), tuple(options.target_settings)
        file = _file_sha256(self.target)
        return self.target, file, settings, options.engine, plugins, self.server


@dataclass(frozen=True)
class PlannedRun:
    """A run to measure, or measured already.

    `beside` are the runs measured right before or after it, as a pair; the run is done only when
    all of them are, because a partner measured hours later is no control. The server of
    `up_beside` is up at the same time. `starts_anew`: servers of an earlier pair are stopped first.
    """

    cell: Cell
    repeat: int
    directory: Path
    beside: tuple[Path, ...] = ()
    up_beside: Cell | None = None
    starts_anew: bool = False

    @property
    def is_done(self) -> bool:
        return all(_is_whole(directory) for directory in (self.directory, *self.beside))

    def make_room(self) -> Path | None:
        """Write cell.json; the new place of an unfinished run that had to be moved aside, or
        None."""
        folder = self.directory.parent
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(definition(self.cell), indent=1) + "\n"
        checksums.replace(folder.parent, f"{folder.name}/{CELL_FILE}", text.encode())
        if not self.directory.exists():
            return None
        aside = folder / "unfinished"
        aside.mkdir(exist_ok=True)
        return self.directory.rename(free(aside / self.directory.name))


def check_cells(cells: Sequence[Cell], directory: Path) -> None:
    """Raises UsageError for a name that cannot be a folder or that two cells have, and for a cell
    with another definition in `directory`, with the keys that differ."""
    for cell in cells:
        if not _NAME.fullmatch(cell.name) or cell.name == "servers":
            raise UsageError(f"cell {cell.name!r}: cannot be the name of a folder")
    twice = [name for name, n in Counter(cell.name for cell in cells).items() if n > 1]
    if twice:
        raise UsageError(f"cell {twice[0]!r}: two cells have this name")
    for cell in cells:
        if changes := differing(definition(cell), _stored_definition(directory, cell)):
            lines = "\n".join(f"  {change}" for change in changes)
            raise UsageError(
                f"{directory / cell.name}: holds runs of a cell with another definition; choose "
                f"another --out or move it away:\n{lines}"
            )


def definition(cell: Cell) -> dict[str, Any]:
    """All settings that the runs of a cell depend on, as JSON without secrets."""
    options = cell.options
    return {
        "scenario": cell.scenario.resolved(),
        "target": cell.target,
        "target_file_sha256": _file_sha256(cell.target),
        "target_settings": list(options.target_settings),
        "engine": [without_key(word) for word in options.engine.split(",") if word],
        "model": options.model,
        "transport": options.transport,
        "plugins_sha256": [_sha256(path) for path in options.plugins],
        "slobench": version(),
    }


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> list[str]:
    """`scenario.arrivals.rate: '2/s' → '4/s'` for every key in which two definitions differ, the
    old value (`theirs`) first; empty for None."""
    if theirs is None:
        return []
    new, old = _flat("", ours), _flat("", theirs)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {old.get(key, _MISSING)!r} → {new.get(key, _MISSING)!r}"
        for key in keys
        if old.get(key, _MISSING) != new.get(key, _MISSING)
    ]


def _stored_definition(directory: Path, cell: Cell) -> dict[str, Any] | None:
    """The definition of the cell in `directory`; None without runs of it. Raises RunInvalid for a
    file that was changed, or removed from beside its runs."""
    name = f"{cell.name}/{CELL_FILE}"
    path, listed = directory / name, checksums.read(directory)
    has_runs = any((directory / cell.name).glob("r*/manifest.json"))
    if listed is not None and (has_runs or path.exists()):
        checksums.check(directory, listed, [name])
    try:
        stored: dict[str, Any] = json.loads(read_result(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    return stored


def _is_whole(directory: Path) -> bool:
    return _ending(directory) in _ENDED and (directory / "requests.parquet").exists()


def _ending(directory: Path) -> str:
    """How the run of a directory ended; "nothing" where it has no manifest that can be read."""
    try:
        return read_manifest_file(directory)[0].ended
    except (UsageError, RunInvalid):
        return "nothing"


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    dot = f"{prefix}." if prefix else ""
    return {k: v for key, inner in value.items() for k, v in _flat(f"{dot}{key}", inner).items()}


def _file_sha256(target: str) -> str | None:
    """The digest of a target file; None for any other target."""
    return _sha256(Path(target)) if Path(target).is_file() else None


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
