"""Files of a night.

<out>/nightly.json                         the result, written last
<out>/index.html  junit.xml  summary.md    the same for people and for CI
<out>/checksums.sha256                     of all files outside of the run directories
<out>/<cell>/r<k>/                         the run directory of the k-th repeat of a cell
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadgen.archive import checksums
from loadgen.errors import UsageError
from loadgen.studies.nightly.page import render
from loadgen.studies.nightly.result import NightResult
from loadgen.studies.nightly.view import junit, markdown
from loadgen.studies.study import Place, Study

NIGHTLY = Study("nightly", "night", NightResult, before=("cell.json",))


@contextlib.contextmanager
def opened(
    out: Path | None, *, resume: bool, command: Sequence[str]
) -> Iterator[Place[NightResult]]:
    """The directory of a night. Raises UsageError, also for a finished night."""
    if out is not None:
        _refuse_finished(out)
    with NIGHTLY.opened("", out, resume=resume, command=command) as place:
        _refuse_finished(place.directory)  # by another process in the meantime
        yield place


def _refuse_finished(directory: Path) -> None:
    if (directory / NIGHTLY.file).exists():
        raise UsageError(f"--out {directory}: holds a finished night; choose another directory")


def write(place: Place[NightResult], night: NightResult, cache_dir: Path | None) -> None:
    """Writes the files of a finished night. `cache_dir` caches the plotting bundle."""
    place.write_text("index.html", render(night, cache_dir))
    place.write_text("junit.xml", junit(night.cells))
    place.write_text("summary.md", markdown(night))
    place.write(night)
    checksums.cover_rest(place.directory)
