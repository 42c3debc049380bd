"""What is made of a recorded run: its tables where they are missing, its summary, its page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.drive import store
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.summary import Summary
from loadgen.records import Run
from reports.engine_story import EngineStory
from reports.html import render
from reports.page import write_page

ReadStory = Callable[[Path, Run, bool], EngineStory | None]
"""Reads what the bundled engine left beside a run, if it did: `loadgen.lab.engine_story`; whether
the run is judged by its own promises is the third."""


def conclude(
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
    read_story: ReadStory | None = None,
) -> Summary:
    """Compute a recorded run's numbers again, with other promises if given, and render its page.
    A run whose results were never put together is put together first."""
    run = store.read_run(directory)
    if not (directory / "requests.parquet").exists():
        ending = {"ended": "interrupted", "end_reason": "slobench was ended from outside"}
        run = replace(run, manifest=run.manifest | ending)
        store.write_run(directory, run, derived(run))
        shutil.rmtree(directory / "parts")
    return summarized(run, directory, slo, confidence, cache_dir, read_story)


def summarized(
    run: Run,
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
    read_story: ReadStory | None = None,
) -> Summary:
    """The summary of a run, written beside it."""
    summary = summarize(run, slo=slo, confidence=confidence)
    tell(run, summary, directory, cache_dir, read_story, is_own_promise=slo is None)
    return summary


def tell(
    run: Run,
    summary: Summary,
    directory: Path,
    cache_dir: Path | None,
    read_story: ReadStory | None = None,
    is_own_promise: bool = True,
) -> None:
    """What was made of a run, for programs and, as a page, for people. The numbers are written
    before anything that only the page needs is read."""
    store.write_summary(directory, summary.to_json())
    story = None if read_story is None else read_story(directory, run, is_own_promise)
    write_page(directory / "report.html", render(run, summary, cache_dir, story, directory))
