"""The stored result of a study in a directory, as its verb prints it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.archive.names import MARKER
from loadgen.studies.study import print_result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from reports.ending import Ending


@dataclass(frozen=True)
class StoredResult:
    """A result with its JSON and its page; `shown` makes its text for the terminal, `ending` its
    last lines (None: `shown` is short)."""

    content: Mapping[str, Any]
    shown: Callable[[], RenderableType]
    page: Path
    ending: Callable[[], Ending] | None = None

    def print(self, *, is_full: bool) -> None:
        """Prints the result as its verb did."""
        print_result(self.shown, self.ending, is_full=is_full)


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
    from loadgen.studies.sweep.view import ending, tables

    result = SWEEP.read(directory)
    page = directory / "report.html"
    return StoredResult(result.to_json(), lambda: tables(result), page, lambda: ending(result))


def _modes(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    page = directory / "modes.html"
    if definition.get("capacity"):
        from loadgen.studies.modes import capacity_view
        from loadgen.studies.modes.capacity import MODE_CAPACITIES

        found = MODE_CAPACITIES.read(directory)
        return StoredResult(
            found.to_json(),
            lambda: capacity_view.tables(found),
            page,
            lambda: capacity_view.ending(found),
        )
    from loadgen.studies.modes.run import MODES
    from loadgen.studies.modes.view import ending, tables

    result = MODES.read(directory)
    return StoredResult(result.to_json(), lambda: tables(result), page, lambda: ending(result))


def _nightly(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.nightly.files import NIGHTLY
    from loadgen.studies.nightly.view import ending, tables

    night = NIGHTLY.read(directory)
    page = directory / "index.html"
    return StoredResult(night.to_json(), lambda: tables(night), page, lambda: ending(night))


def _compare(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.compare.run import COMPARE
    from loadgen.studies.compare.view import ending, table

    comparison = COMPARE.read(directory)
    page = directory / "compare.html"
    return StoredResult(
        comparison.to_json(), lambda: table(comparison), page, lambda: ending(comparison)
    )


def _size(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.size.result import sentences
    from loadgen.studies.size.run import SIZE

    result = SIZE.read(directory)
    page = directory / "report.html"
    return StoredResult(result.to_json(), lambda: "\n".join(sentences(result)), page)


def _demo(directory: Path, definition: Mapping[str, Any]) -> StoredResult:
    from loadgen.studies.demo.run import DEMO, PAGE
    from loadgen.studies.demo.view import lines

    result = DEMO.read(directory)
    return StoredResult(result.to_json(), lambda: "\n".join(lines(result)), directory / PAGE)


_READERS = {
    "capacity": _capacity,
    "compare": _compare,
    "demo": _demo,
    "modes": _modes,
    "nightly": _nightly,
    "size": _size,
    "sweep": _sweep,
}
