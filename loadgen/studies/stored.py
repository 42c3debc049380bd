"""The stored result of a study in a directory, as its verb prints it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.archive.names import MARKER

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class StoredResult:
    """A result with its JSON and its page; `shown` makes its text for the terminal."""

    content: Mapping[str, Any]
    shown: Callable[[], RenderableType]
    page: Path


def stored_result(directory: Path) -> StoredResult | None:
    """The result in the directory of a study that measures runs; None for any other directory.
    Raises UsageError for a study without a result, and for a damaged file."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        read = _READERS.get(marker["study"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if read is None else read(directory, marker["definition"])


def _capacity(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.capacity.files import CAPACITY
    from loadgen.studies.capacity.view import table

    found = CAPACITY.read(directory).capacity()
    return StoredResult(
        found.to_json(), lambda: table(found, "the SLO", is_full=False), directory / "report.html"
    )


def _sweep(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.sweep.run import SWEEP
    from loadgen.studies.sweep.view import tables

    result = SWEEP.read(directory)
    return StoredResult(result.to_json(), lambda: tables(result), directory / "report.html")


def _modes(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    page = directory / "modes.html"
    if definition.get("capacity"):
        from loadgen.studies.modes.capacity import MODE_CAPACITIES
        from loadgen.studies.modes.capacity_view import tables as capacity_tables

        capacities = MODE_CAPACITIES.read(directory)
        return StoredResult(capacities.to_json(), lambda: capacity_tables(capacities), page)
    from loadgen.studies.modes.run import MODES
    from loadgen.studies.modes.view import tables

    result = MODES.read(directory)
    return StoredResult(result.to_json(), lambda: tables(result), page)


def _nightly(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.nightly.files import NIGHTLY
    from loadgen.studies.nightly.view import tables

    night = NIGHTLY.read(directory)
    return StoredResult(night.to_json(), lambda: tables(night), directory / "index.html")


def _compare(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.compare.run import COMPARE
    from loadgen.studies.compare.view import table

    comparison = COMPARE.read(directory)
    page = directory / "compare.html"
    return StoredResult(comparison.to_json(), lambda: table(comparison), page)


_READERS = {
    "capacity": _capacity,
    "compare": _compare,
    "modes": _modes,
    "nightly": _nightly,
    "sweep": _sweep,
}
