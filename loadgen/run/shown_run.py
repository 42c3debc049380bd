"""A run that shows its results at a prompt and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.archive import store
from loadgen.archive.names import directory_of
from loadgen.records import Run

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary


@dataclass(frozen=True, repr=False)
class ShownRun(Run):
    """A Run with its directory, if it has one. Its `repr` and its HTML hold the verdict, the SLOs,
    the latencies and a link to the page; the summary is computed at the first display."""

    directory: Path | None = None

    def __repr__(self) -> str:
        from reports.run import notebook

        return notebook.text(self.manifest.run, self._summary, self._page)

    def _repr_html_(self) -> str:
        from reports.run import notebook

        return notebook.html(self.manifest.run, self._summary, self._page)

    @cached_property
    def _summary(self) -> Summary:
        from loadgen.measure.aggregate import summarize

        return summarize(self)

    @property
    def _page(self) -> str:
        """The path of the page, below the working directory if it is there."""
        if self.directory is None or not (page := self.directory / "report.html").is_file():
            return ""
        return str(page.relative_to(Path.cwd()) if page.is_relative_to(Path.cwd()) else page)


def shown(run: Run, directory: Path | None) -> ShownRun:
    """The run with its directory."""
    return ShownRun(**{f.name: getattr(run, f.name) for f in fields(Run)}, directory=directory)


def read_run(directory: Path | str) -> ShownRun:
    """Reads a recorded run by its path or its name in runs/; from the workers' parts if its process
    ended before it merged them.

    Raises UsageError if `directory` is no run directory, RunInvalid that names the file if it is
    damaged.
    """
    found = directory_of(directory)
    return shown(store.read_run(found), found)
