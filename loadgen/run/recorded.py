"""Numbers and exports of runs that are given as objects, by their paths, or by their names in
runs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.archive.names import runs_of
from loadgen.archive.store import read_run
from loadgen.errors import UsageError
from loadgen.exports import formats
from loadgen.measure import aggregate
from loadgen.records import Run
from loadgen.run import shown_run

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary

OneRun = Run | Path | str


def summarize(
    run: OneRun,
    slo: Sequence[str] | None = None,
    confidence: float | None = None,
    min_requests: int | None = None,
    clear: bool = False,
) -> Summary:
    """The summary and the verdict of a run, under its own SLOs or under others, as
    `loadgen.measure.aggregate.summarize` has them. Raises UsageError for no such run, for invalid
    other SLOs, and for a confidence outside (0.5, 1)."""
    if confidence is not None and not 0.5 < confidence < 1:
        raise UsageError(f"confidence {confidence}: expected above 0.5 and below 1")
    recorded = run if isinstance(run, Run) else shown_run.read_run(run)
    return aggregate.summarize(recorded, slo, confidence, min_requests, clear)


def export(
    runs: OneRun | Sequence[OneRun],
    format: str,
    path: Path | str | None = None,
    rows: str | None = None,
    slo: Sequence[str] | None = None,
) -> bytes:
    """The runs in a format of `slobench export`, written to `path` if given; a folder or a search
    stands for its runs. Further parameters and errors: `loadgen.exports.formats.export`."""
    several = [runs] if isinstance(runs, (Run, Path, str)) else runs
    recorded: list[Run] = []
    for run in several:
        recorded += [run] if isinstance(run, Run) else map(read_run, runs_of([run]))
    return formats.export(recorded, format, path, rows, slo)
