"""What is made of a recorded run: its tables where they are missing, its summary, its page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.drive import store
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.capacity.capacity_result import read_answer
from loadgen.measure.summary import Summary
from loadgen.records import Run
from reports.page import write_page
from reports.run.engine_section import EngineSection
from reports.run.page import render
from reports.run.searched import Searched

ReadEngineSection = Callable[[Path, Run, bool], EngineSection | None]
"""Reads what the bundled engine left beside a run, if it did: `loadgen.lab.engine_report`; whether
the run is judged by its own promises is the third."""


def conclude(
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
    read_story: ReadEngineSection | None = None,
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
    read_story: ReadEngineSection | None = None,
) -> Summary:
    """The summary of a run, written beside it."""
    summary = summarize(run, slo=slo, confidence=confidence)
    write_results(run, summary, directory, cache_dir, read_story, is_own_promise=slo is None)
    return summary


def write_results(
    run: Run,
    summary: Summary,
    directory: Path,
    cache_dir: Path | None,
    read_story: ReadEngineSection | None = None,
    is_own_promise: bool = True,
) -> None:
    """What was made of a run, for programs and, as a page, for people. The numbers are written
    before anything that only the page needs is read."""
    store.write_summary(directory, summary.to_json())
    story = None if read_story is None else read_story(directory, run, is_own_promise)
    page = render(run, summary, cache_dir, story, directory, searched(directory))
    write_page(directory / "report.html", page)


def searched(directory: Path) -> Searched | None:
    """The capacity search that a run was a probe of; None where it was none, or where the search's
    file cannot be read: the page of a probe does without."""
    home = directory.absolute().parent.parent
    if directory.absolute().parent.name != "probes" or not (home / "capacity.json").is_file():
        return None
    try:
        content = json.loads((home / "capacity.json").read_text(encoding="utf-8"))
        answer = read_answer(content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Searched(directory.name, "../../report.html", answer)
