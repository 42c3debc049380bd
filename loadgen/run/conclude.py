"""Computes the summary of a recorded run and writes it, with the page, into its directory."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from loadgen.archive import checksums, store
from loadgen.archive.directory_lock import held
from loadgen.archive.part_decoder import decode_left, wait_for_writers
from loadgen.errors import UsageError
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.summary import Summary
from loadgen.records import Run
from loadgen.system.whole_file import read_result
from reports.page import write_page
from reports.run.engine_section import EngineSection
from reports.run.page import Searched, render

_WRITERS_S = 10.0

ReadEngineSection = Callable[[Path, Run, bool], EngineSection | None]
"""Reads the log that the bundled engine left in a run directory (`loadgen.lab.engine_report`); the
third argument is whether the run is judged by the SLOs that it was made under."""


def conclude(
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
    read_section: ReadEngineSection | None = None,
    clear: bool = False,
) -> Summary:
    """Computes a recorded run's numbers again, under other SLOs if given, and writes its page. The
    parts of a run that ended without merging them are merged first."""
    if not (directory / "manifest.json").is_file():
        raise UsageError(f"{directory}: not a run directory (no manifest.json in it)")
    with held(directory, str(directory), "slobench report"):
        return _concluded(directory, slo, confidence, cache_dir, read_section, clear)


def _concluded(
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
    read_section: ReadEngineSection | None,
    clear: bool,
) -> Summary:
    is_from_parts = store.has_parts(directory)
    if is_from_parts:
        _decode_parts(directory)
    run = store.read_run(directory)
    if is_from_parts:
        manifest = msgspec.structs.replace(
            run.manifest, ended="interrupted", end_reason="slobench was ended from outside"
        )
        run = replace(run, manifest=manifest)
        store.write_run(directory, run, derived(run))
        shutil.rmtree(directory / "parts")
    return summarized(run, directory, slo, confidence, cache_dir, read_section, clear)


def _decode_parts(directory: Path) -> None:
    """Raises UsageError while workers of the run, which live on for some seconds, write rows."""
    if not wait_for_writers(directory / "parts", _WRITERS_S):
        raise UsageError(
            f"{directory}: workers of this run still write their rows; repeat the command in a few "
            "seconds, or kill them (they end by themselves 30 s after slobench)"
        )
    decode_left(directory / "parts")


def check_replacement(directory: Path, slo: Sequence[str]) -> None:
    """Raises UsageError where other SLOs would replace the verdict in a run directory."""
    before = _judged_by(directory)
    if before is None or set(before) == set(slo):
        return
    flags = " ".join(f"--slo {shlex.quote(text)}" for text in slo)
    raise UsageError(
        f"{directory}: its verdict was reached by {_listed(before)}; --slo would replace it by one "
        f"for {_listed(slo)}. To check other SLOs and keep the run's verdict: slobench rescore "
        f"{shlex.quote(str(directory))} {flags}. To replace it: add --overwrite"
    )


def _judged_by(directory: Path) -> tuple[str, ...] | None:
    """The SLOs behind the verdict in summary.json; None without a verdict that can be read."""
    try:
        return tuple(store.read_summary(directory)["judged_by"])
    except FileNotFoundError:
        return None


def _listed(slos: Sequence[str]) -> str:
    return ", ".join(f"'{text}'" for text in slos) or "no SLO"


def summarized(
    run: Run,
    directory: Path,
    slo: Sequence[str] | None,
    confidence: float | None,
    cache_dir: Path | None,
    read_section: ReadEngineSection | None = None,
    clear: bool = False,
    on_summary: Callable[[Summary, Path], object] | None = None,
) -> Summary:
    """The summary of a run; also written into its directory, with the page. `on_summary` is called
    before the page is made."""
    summary = summarize(run, slo=slo, confidence=confidence, clear=clear)
    store.write_summary(directory, summary.to_json())
    if on_summary is not None:
        on_summary(summary, directory)
    _write_page(run, summary, directory, cache_dir, read_section, is_own_slo=slo is None)
    return summary


def write_results(
    run: Run,
    summary: Summary,
    directory: Path,
    cache_dir: Path | None,
    read_section: ReadEngineSection | None = None,
    is_own_slo: bool = True,
) -> None:
    """Writes summary.json and report.html. The numbers are written before anything that only the
    page needs is read, so that a page that fails loses none of them."""
    store.write_summary(directory, summary.to_json())
    _write_page(run, summary, directory, cache_dir, read_section, is_own_slo)


def _write_page(
    run: Run,
    summary: Summary,
    directory: Path,
    cache_dir: Path | None,
    read_section: ReadEngineSection | None,
    is_own_slo: bool,
) -> None:
    section = None if read_section is None else read_section(directory, run, is_own_slo)
    page = render(run, summary, cache_dir, section, directory, parent_search(directory))
    write_page(directory / "report.html", page)
    checksums.cover(directory, directory / "report.html")


def parent_search(directory: Path) -> Searched | None:
    """The capacity search that a run was a probe of; None where there is none, or where its file
    cannot be read: the page of a probe does without it. Raises RunInvalid for a file that was
    changed."""
    home = directory.absolute().parent.parent
    if directory.absolute().parent.name != "probes" or not (home / "capacity.json").is_file():
        return None
    if (listed := checksums.read(home)) is None:
        return None
    checksums.check(home, listed, ["capacity.json"])
    try:
        content = json.loads(read_result(home / "capacity.json"))
        answer = content["answer"]
        return Searched(
            directory.name,
            "../../report.html",
            len(content["probes"]),
            str(answer["result"]),
            answer["value_text"],
            answer["interval_text"],
            float(answer["attainment"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
