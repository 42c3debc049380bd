"""Baseline: a directory of small files that outlives the machines of the nights.

    <cell>-<key>/key.json             the settings that all its nights share
    <cell>-<key>/nights/<night>.json  the numbers of one night, about 1.5 kB per run
    <cell>-<key>/accepted.json        the nights that were accepted as a new level

Files are written by renaming and carry the SHA-256 of their content. A damaged file is rejected
with its name; names that begin with a dot are not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadgen.archive.directory_lock import held
from loadgen.archive.verify import Verified
from loadgen.errors import UsageError
from loadgen.studies.nightly.matrix import NightCell
from loadgen.studies.nightly.record import CellNight, from_json, to_json
from loadgen.studies.nightly.verdict import JOINING, History
from loadgen.system.whole_file import read_result, replacing

SCHEMA = 1
_WRITER_WAIT_S = 10.0
_WAITING = ("worse", "better")


class Baseline:
    """The nights stored in a directory, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_writable(self) -> None:
        """Raises UsageError for a directory that cannot be written, before a night is measured."""
        existing = next(path for path in (self.root, *self.root.resolve().parents) if path.exists())
        try:
            Path(tempfile.mkdtemp(prefix=".slobench-", dir=existing)).rmdir()
        except OSError as error:
            raise UsageError(f"baseline {self.root}: cannot be written: {error.strerror}") from None

    @contextlib.contextmanager
    def writing(self, writer: str) -> Iterator[None]:
        """Locks the store for writing. Raises UsageError with the holder's name if another process
        holds it for longer than 10 s."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"baseline {self.root}: cannot be written: {error.strerror}") from None
        with held(self.root, f"baseline {self.root}", writer, _WRITER_WAIT_S):
            yield

    def folder(self, cell: NightCell) -> Path:
        return self.root / f"{cell.name}-{cell.key}"

    def nights(self, cell: NightCell) -> list[CellNight]:
        """All stored nights, oldest first. Raises UsageError for a file that is damaged or belongs
        to another cell."""
        folder = self.folder(cell)
        if not folder.exists():
            return []
        stored = _read(folder / "key.json", "key")
        if stored["agrees"] != json.loads(json.dumps(cell.agrees, default=str)):
            raise _refused(folder / "key.json", "it belongs to another cell than its folder")
        return [
            self._night(path, cell)
            for path in sorted((folder / "nights").glob("*"))
            if not path.name.startswith(".")
        ]

    def history(self, cell: NightCell, window: int, before: str = "") -> History:
        """The levels of the baseline, the last `window` nights of each; only nights before the name
        `before`, if given."""
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
        """Store a night; a night of the same name is replaced."""
        folder = self.folder(cell)
        if not (folder / "key.json").exists():
            _write(folder / "key.json", "key", {"cell": cell.name, "agrees": dict(cell.agrees)})
        path = folder / "nights" / f"{night.night}.json"
        _write(path, "night", {"key": cell.key, **to_json(night)})
        return path

    def accept(self, cell: NightCell, now_utc: str) -> list[str]:
        """Start a new level with the last uninterrupted series of better or worse nights. Returns
        their names; empty if the last night is in the baseline already."""
        nights = [night for night in self.nights(cell) if night.trusted]
        accepted = self._accepted(cell)
        in_baseline = {name for level in accepted for name in level}
        row: list[str] = []
        for night in reversed(nights):
            is_waiting = night.verdict in _WAITING and night.night not in in_baseline
            if not is_waiting or (row and night.verdict != nights[-1].verdict):
                break
            row.insert(0, night.night)
        if row:
            levels = [*accepted, row]
            content = {"key": cell.key, "levels": levels, "accepted_utc": now_utc}
            _write(self.folder(cell) / "accepted.json", "accepted", content)
        return row

    def prune(self, cell: NightCell, keep: int, window: int) -> list[str]:
        """Delete the oldest nights beyond `keep`, except those in the baseline; their names."""
        nights = self.nights(cell)
        needed = {night.night for night in self.history(cell, window).baseline}
        old = [night.night for night in nights[:-keep] if night.night not in needed]
        for name in old:
            (self.folder(cell) / "nights" / f"{name}.json").unlink()
        return old

    def relatives(self, cell: NightCell) -> dict[str, Mapping[str, Any]]:
        """Folders of the same cell with another key, and the settings that their nights share."""
        folders = {}
        for path in sorted(self.root.glob(f"{cell.name}-????????/key.json")):
            content = _read(path, "key")
            if content["cell"] == cell.name and path.parent != self.folder(cell):
                folders[path.parent.name] = content["agrees"]
        return folders

    def verify(self) -> tuple[int, list[str]]:
        """The number of files in the store, and what is wrong with them, a sentence each."""
        problems: list[str] = []
        n_files = 0
        for folder in sorted(path.parent for path in self.root.glob("*/key.json")):
            key = folder.name[-8:]
            paths = [folder / "key.json", *sorted((folder / "nights").glob("[!.]*"))]
            if (folder / "accepted.json").exists():
                paths.append(folder / "accepted.json")
            for path in paths:
                n_files += 1
                try:
                    _verify_file(path, key)
                except UsageError as error:
                    problems.append(str(error))
        return n_files, problems

    def _accepted(self, cell: NightCell) -> list[list[str]]:
        path = self.folder(cell) / "accepted.json"
        if not path.exists():
            return []
        content = _read(path, "accepted")
        _check_key(path, content, cell.key)
        return [[str(name) for name in level] for level in content["levels"]]

    def _night(self, path: Path, cell: NightCell) -> CellNight:
        content = _read(path, "night")
        _check_key(path, content, cell.key)
        return replace(_night_of(path, content), cell=cell.name)


def is_baseline(path: Path) -> bool:
    """Whether a directory is the store of a baseline."""
    return any((key.parent / "nights").is_dir() for key in path.glob("*/key.json"))


def check_store(path: Path) -> Verified | None:
    """The files of a baseline, compared with their checksums; None for another directory."""
    if not is_baseline(path):
        return None
    n_files, problems = Baseline(path).verify()
    return Verified(
        str(path), "baseline", "damaged" if problems else "verified", n_files, tuple(problems)
    )


def _night_of(path: Path, content: Mapping[str, Any]) -> CellNight:
    try:
        night = from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise _refused(path, f"it is not the record of a night ({error!r})") from None
    if path.name != f"{night.night}.json":
        raise _refused(path, f"its content is night {night.night}")
    return night


def _verify_file(path: Path, key: str) -> None:
    """Raises UsageError for a file that is damaged, or that is not of the cell with this key."""
    if path.name == "key.json":
        content = _read(path, "key")
        text = json.dumps(content.get("agrees"), sort_keys=True)
        if _digest(text)[:8] != key:
            raise _refused(path, "it belongs to another cell than its folder")
        return
    kind = "accepted" if path.name == "accepted.json" else "night"
    content = _read(path, kind)
    _check_key(path, content, key)
    if kind == "night":
        _night_of(path, content)


def _check_key(path: Path, content: Mapping[str, Any], key: str) -> None:
    if content.get("key") != key:
        raise _refused(
            path, f"its key is {content.get('key')}, not {key}: it belongs to another cell"
        )


def _write(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    text = _canonical(content)
    whole = {"schema": SCHEMA, "kind": kind, "sha256": _digest(text), "content": content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1, allow_nan=False, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"baseline {path}: cannot be written: {error.strerror}") from None


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        whole = json.loads(read_result(path))
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
        raise _refused(path, "it is damaged: its content does not match its SHA-256")
    return content


def _refused(path: Path, reason: str) -> UsageError:
    return UsageError(f"baseline {path}: {reason}; restore it, or move it away and lose its nights")


def _canonical(content: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
