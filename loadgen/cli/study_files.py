"""Files and stores of the studies, which lie above the command line and are loaded by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadgen.archive.verify import Verified

_FILES = ("loadgen.studies.nightly.run",)
"""Modules with `check_file`: the content of a file in words, None for another kind of file."""
_STORES = ("loadgen.studies.study", "loadgen.studies.nightly.baseline")
"""Modules with `check_store`: the files of a study or a baseline and their problems, None for any
other directory."""

_RESULTS = ("loadgen.studies.stored",)
"""Modules with `stored_result`: the result of a study in a directory, None for another one."""


def check_file(path: Path) -> str | None:
    """The content of a file that a study reads in place of a scenario, in words; None for a
    scenario. Raises UsageError for a mistake in it."""
    content: str | None = _first(_FILES, "check_file", path)
    return content


def check_store(path: Path) -> Verified | None:
    """The check of a directory that a study keeps; None for any other."""
    found: Verified | None = _first(_STORES, "check_store", path)
    return found


def stored_result(directory: Path) -> Any:
    """The result of a study with its JSON, its page and its text for the terminal
    (`loadgen.studies.stored`); None for a directory without a study."""
    return _first(_RESULTS, "stored_result", directory)


def _first(modules: tuple[str, ...], check: str, path: Path) -> Any:
    results = (getattr(import_module(module), check)(path) for module in modules)
    return next((result for result in results if result is not None), None)
