"""Reading of a corpus of agents from a file or a folder, in any known format, compressed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from loadgen.errors import TraceFileError
from loadgen.workload.agents.corpus import (
    AgentTree,
    Corpus,
    Notes,
    RecordedTree,
    tree_of,
    within_context,
)
from loadgen.workload.agents.trajectories import is_trajectories, read_trajectories
from loadgen.workload.agents.weka import is_weka, read_weka
from loadgen.workload.traces.file import read_bytes

MAX_CONTEXT_TOKENS = 2**31 - 1
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class _Reader(NamedTuple):
    """`is_mine(content)`: whether a file has the format; `read(content, source, notes)`: its
    conversations."""

    is_mine: Callable[[bytes], bool]
    read: Callable[[bytes, str, Notes], Iterator[RecordedTree]]


_READERS: dict[str, _Reader] = {
    "weka": _Reader(is_weka, read_weka),
    "trajectories": _Reader(is_trajectories, read_trajectories),
}


def load_corpus(path: str | Path, format: str = "auto", max_context: int | None = None) -> Corpus:
    """The trees in a file, or in all files of a folder, one file at a time, each up to its first
    request with more than `max_context` tokens of prompt and answer. Raises TraceFileError for a
    file that cannot be read and for a corpus without a tree."""
    notes, trees = Notes(), list[AgentTree]()
    for file in _files(Path(path)):
        content = read_bytes(file)
        for recorded in _reader(content, str(file), format).read(content, str(file), notes):
            kept = within_context(recorded, max_context or MAX_CONTEXT_TOKENS, notes)
            if kept is not None:
                trees.append(tree_of(kept))
    if not trees:
        raise TraceFileError(f"{path}: no conversation in it can be replayed")
    return Corpus(tuple(trees), notes.texts())


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        raise TraceFileError(f"{path}: no file {', '.join(_SUFFIXES)} in this folder")
    return files


def _reader(content: bytes, source: str, format: str) -> _Reader:
    if format != "auto":
        return _READERS[format]
    matching = [reader for reader in _READERS.values() if reader.is_mine(content)]
    if not matching:
        known = ", ".join(_READERS)
        raise TraceFileError(f"{source}: is in no known format of agents ({known})")
    return matching[0]
