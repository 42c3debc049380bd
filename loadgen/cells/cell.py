"""A cell: one scenario against one target, what it depends on, and where its runs are kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadgen.drive.store import read_manifest_file
from loadgen.errors import RunInvalid, UsageError
from loadgen.live.watching import Watch
from loadgen.run.directory import free
from loadgen.run.manifest import version, without_key
from loadgen.run.run_options import RunOptions
from loadgen.workload.scenario import Scenario

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=@+-]{0,119}")
_ENDED = ("completed", "stopped")
_MISSING = "(not there)"


@dataclass(frozen=True)
class Cell:
    """One circumstance: a scenario against a target (as after `--target`). `name` is its folder,
    `factors` is what it differs by, for tables; the options' `out_dir`, `force` and `name` are
    set here. `server` names one that only cells of the same word share. A control that `stays_up`
    keeps its server, and its cell's, while either is measured."""

    name: str
    scenario: Scenario
    target: str
    options: RunOptions
    factors: Mapping[str, str] = field(default_factory=dict)
    server: str = ""
    stays_up: bool = False

    def watched(self, watch: Watch | None) -> Cell:
        """The same cell, with the live metrics of its runs exported."""
        return replace(self, options=replace(self.options, watch=watch))

    @property
    def server_key(self) -> tuple[object, ...]:
        """Cells of one key can be measured on one server, one after the other."""
        options = self.options
        plugins, settings = tuple(options.plugins), tuple(options.target_settings)
        file = _file_sha256(self.target)
        return self.target, file, settings, options.engine, plugins, self.server


@dataclass(frozen=True)
class PlannedRun:
    """One run to be made, or there already. `beside` are the runs it is measured together with: it
    is done when all of them are, for a partner made hours later tells nothing. The server of
    `up_beside` is up meanwhile. One that `starts_anew` finds no server of an earlier pair up."""

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
        """Write down what the cell is; where an unfinished run went that stood in the way."""
        folder = self.directory.parent
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(definition(self.cell), indent=1)
        (folder / "cell.json").write_text(text + "\n", encoding="utf-8")
        if not self.directory.exists():
            return None
        aside = folder / "unfinished"
        aside.mkdir(exist_ok=True)
        return self.directory.rename(free(aside / self.directory.name))


def check_cells(cells: Sequence[Cell], directory: Path) -> None:
    """Raises UsageError where a name is no folder's or stands for two cells, or where `directory`
    has a cell of this name that is defined in another way, with the keys that differ."""
    for cell in cells:
        if not _NAME.fullmatch(cell.name) or cell.name == "servers":
            raise UsageError(f"cell {cell.name!r}: cannot be the name of a folder")
    twice = [name for name, n in Counter(cell.name for cell in cells).items() if n > 1]
    if twice:
        raise UsageError(f"cell {twice[0]!r}: there are two of this name")
    for cell in cells:
        if changes := differing(definition(cell), _kept_definition(directory, cell)):
            lines = "\n".join(f"  {change}" for change in changes)
            raise UsageError(
                f"{directory / cell.name}: holds runs of a cell of this name that was defined in "
                f"another way; choose another --out or move it away:\n{lines}"
            )


def definition(cell: Cell) -> dict[str, Any]:
    """Everything about a cell that its runs depend on, as JSON and without secrets."""
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
    """`scenario.arrivals.rate: '2/s' → '4/s'`, for every key in which a kept definition (None:
    there is none) is another one."""
    if theirs is None:
        return []
    new, old = _flat("", ours), _flat("", theirs)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {old.get(key, _MISSING)!r} → {new.get(key, _MISSING)!r}"
        for key in keys
        if old.get(key, _MISSING) != new.get(key, _MISSING)
    ]


def _kept_definition(directory: Path, cell: Cell) -> dict[str, Any] | None:
    """What `directory` holds under the cell's name; None if it has no runs of it."""
    path = directory / cell.name / "cell.json"
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    return kept


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
    """Of a target file; None for any other target."""
    return _sha256(Path(target)) if Path(target).is_file() else None


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
