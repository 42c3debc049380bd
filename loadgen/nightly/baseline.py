"""The baseline: a directory of small files that outlives the machines the nights ran on.

    <cell>-<key>/key.json             what all its nights agree in
    <cell>-<key>/nights/<night>.json  a few numbers per run of one night, about 1.5 kB a run
    <cell>-<key>/accepted.json        which nights were accepted as a new level

Every file is written beside its place and moved there, and carries the SHA-256 of what it says. A
file that does not say what it should is refused by name; names that begin with a dot are not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.measure.nights.night_record import CellNight, from_json, to_json
from loadgen.measure.nights.night_verdict import JOINING, History
from loadgen.nightly.matrix import NightCell

SCHEMA = 1
_WAITING = ("worse", "better")


class Baseline:
    """The nights kept in a directory, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_writable(self) -> None:
        """Raises UsageError where a night could not be kept, before it is measured for nothing."""
        there = next(path for path in (self.root, *self.root.resolve().parents) if path.exists())
        try:
            Path(tempfile.mkdtemp(prefix=".slobench-", dir=there)).rmdir()
        except OSError as error:
            raise UsageError(f"baseline {self.root}: cannot be written: {error.strerror}") from None

    def folder(self, cell: NightCell) -> Path:
        return self.root / f"{cell.name}-{cell.key}"

    def nights(self, cell: NightCell) -> list[CellNight]:
        """Every night that is kept, oldest first. Raises UsageError for a file that is damaged or
        is not of this cell."""
        folder = self.folder(cell)
        if not folder.exists():
            return []
        kept = _read(folder / "key.json", "key")
        if kept["agrees"] != json.loads(json.dumps(cell.agrees, default=str)):
            raise _refused(folder / "key.json", "it belongs to another cell than its folder says")
        return [
            self._night(path, cell)
            for path in sorted((folder / "nights").glob("*"))
            if not path.name.startswith(".")
        ]

    def history(self, cell: NightCell, window: int, before: str = "") -> History:
        """The levels of the baseline, the last `window` nights of each; only nights `before` the
        named one, if one is named."""
        nights = [night for night in self.nights(cell) if not before or night.night < before]
        accepted = self._accepted(cell)
        starts = [min(level) for level in accepted]
        levels: list[list[CellNight]] = [[] for _ in range(len(starts) + 1)]
        for night in nights:
            level = sum(start <= night.night for start in starts)
            is_taken = level > 0 and night.night in accepted[level - 1]
            if night.trusted and (night.verdict in JOINING or is_taken):
                levels[level].append(night)
        kept = [tuple(level[-window:]) for level in levels]
        return History((*(level for level in kept[:-1] if level), kept[-1]))

    def add(self, cell: NightCell, night: CellNight) -> Path:
        """Keep a night; one of the same name is replaced."""
        folder = self.folder(cell)
        if not (folder / "key.json").exists():
            _write(folder / "key.json", "key", {"cell": cell.name, "agrees": dict(cell.agrees)})
        path = folder / "nights" / f"{night.night}.json"
        _write(path, "night", {"key": cell.key, **to_json(night)})
        return path

    def accept(self, cell: NightCell, now_utc: str) -> list[str]:
        """Make the last unbroken row of better or worse nights the beginning of a new level; their
        names, none where the last night is part of the baseline already."""
        nights = [night for night in self.nights(cell) if night.trusted]
        accepted = self._accepted(cell)
        known = {name for level in accepted for name in level}
        row: list[str] = []
        for night in reversed(nights):
            is_waiting = night.verdict in _WAITING and night.night not in known
            if not is_waiting or (row and night.verdict != nights[-1].verdict):
                break
            row.insert(0, night.night)
        if row:
            levels = [*accepted, row]
            said = {"key": cell.key, "levels": levels, "accepted_utc": now_utc}
            _write(self.folder(cell) / "accepted.json", "accepted", said)
        return row

    def prune(self, cell: NightCell, keep: int, window: int) -> list[str]:
        """Drop the oldest nights beyond `keep`, but none that is part of the baseline; names."""
        nights = self.nights(cell)
        needed = {night.night for night in self.history(cell, window).baseline}
        old = [night.night for night in nights[:-keep] if night.night not in needed]
        for name in old:
            (self.folder(cell) / "nights" / f"{name}.json").unlink()
        return old

    def relatives(self, cell: NightCell) -> dict[str, Mapping[str, Any]]:
        """Folders of the same cell with another key, and what their nights agree in."""
        found = {}
        for path in sorted(self.root.glob(f"{cell.name}-????????/key.json")):
            said = _read(path, "key")
            if said["cell"] == cell.name and path.parent != self.folder(cell):
                found[path.parent.name] = said["agrees"]
        return found

    def _accepted(self, cell: NightCell) -> list[list[str]]:
        path = self.folder(cell) / "accepted.json"
        if not path.exists():
            return []
        said = _read(path, "accepted")
        _check_key(path, said, cell)
        return [[str(name) for name in level] for level in said["levels"]]

    def _night(self, path: Path, cell: NightCell) -> CellNight:
        said = _read(path, "night")
        _check_key(path, said, cell)
        try:
            night = from_json(said)
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            raise _refused(path, f"it is not the record of a night ({error!r})") from None
        if path.name != f"{night.night}.json":
            raise _refused(path, f"it is the record of night {night.night}")
        return replace(night, cell=cell.name)


def _check_key(path: Path, said: Mapping[str, Any], cell: NightCell) -> None:
    if said.get("key") != cell.key:
        raise _refused(path, f"it is of key {said.get('key')}, not {cell.key}: of another cell")


def _write(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    text = _canonical(content)
    whole = {"schema": SCHEMA, "kind": kind, "sha256": _digest(text), "content": content}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1, allow_nan=False, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise UsageError(f"baseline {path}: cannot be written: {error.strerror}") from None


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _refused(path, f"it is damaged: {error}") from None
    if not isinstance(whole, dict) or whole.get("kind") != kind:
        raise _refused(path, f"it is not a {kind} file of slobench")
    if whole.get("schema") != SCHEMA:
        raise _refused(path, f"it has schema {whole.get('schema')}; this version reads {SCHEMA}")
    content = whole.get("content")
    if not isinstance(content, dict) or whole.get("sha256") != _digest(_canonical(content)):
        raise _refused(path, "it is damaged: its content is not what its SHA-256 says")
    return content


def _refused(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"baseline {path}: {reason}; restore it, or move it away and lose what it stood for"
    )


def _canonical(content: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
