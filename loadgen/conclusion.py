"""What is made of a recorded run: its tables where they are missing, its summary, its page."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.drive import store
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.summary import Summary
from loadgen.records import Run
from reports.html import render
from reports.page import write_page


def conclude(
    directory: Path, slo: Sequence[str] | None, confidence: float | None, cache_dir: Path | None
) -> Summary:
    """Compute a recorded run's numbers again, with other promises if given, and render its page.
    A run whose results were never put together is put together first."""
    run = store.read_run(directory)
    if not (directory / "requests.parquet").exists():
        ending = {"ended": "interrupted", "end_reason": "slobench was ended from outside"}
        run = replace(run, manifest=run.manifest | ending)
        store.write_run(directory, run, derived(run))
        shutil.rmtree(directory / "parts")
    return summarized(run, directory, slo, confidence, cache_dir)


def summarized(
    run: Run,
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
) -> Summary:
    """The summary of a run, written beside it."""
    summary = summarize(run, slo=slo, confidence=confidence)
    tell(run, summary, directory, cache_dir)
    return summary


def tell(run: Run, summary: Summary, directory: Path, cache_dir: Path | None) -> None:
    """What was made of a run, for programs and, as a page, for people."""
    store.write_summary(directory, summary.to_json())
    write_page(directory / "report.html", render(run, summary, cache_dir))
