"""A run told on one HTML page that needs nothing but a browser: no network, no other file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from loadgen.measure.attainment import due_rows
from loadgen.measure.catalog import METRICS
from loadgen.measure.drivers import interference
from loadgen.measure.per_request import per_request
from loadgen.measure.server_load import describe_server
from loadgen.measure.summary import Summary
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run
from reports.charts import spectra
from reports.page import render_page
from reports.redaction import redact
from reports.run import tables, verdict_rows
from reports.run.advice import next_steps
from reports.run.causes_view import whys
from reports.run.embedded_rows import embedded_rows
from reports.run.engine_section import (
    EngineSection,
    blocker_rows,
    engine_figures,
    simulated_section,
)
from reports.run.frames import Frames, frames, kept_rows
from reports.run.heat_maps import attainment_cells, heat_figures
from reports.run.place import run_word
from reports.run.searched import Searched
from reports.run.slowest import HEAD as SLOWEST_HEAD
from reports.run.slowest import gantt, slowest
from reports.run.timeline import timeline

_CAPTIONS = {
    "spectrum-ttft": "Time to first token at every percentile",
    "spectrum-tpot": "Time per output token at every percentile",
    "spectrum-itl": "Inter-token latency at every percentile",
    "spectrum-e2e": "End-to-end latency at every percentile",
}


def render(
    run: Run,
    summary: Summary,
    cache_dir: Path | None = None,
    story: EngineSection | None = None,
    directory: Path | None = None,
    search: Searched | None = None,
) -> str:
    """The whole page. `cache_dir` keeps the plotting bundle, which takes seconds to make; `story`
    is what the bundled engine told of the run, where it served it; `directory` is where the run
    lies, for the commands on the page that read it; `search` is the one it was a probe of."""
    summary = _redacted(summary)
    story = story or simulated_section(run.manifest.engine)
    place = run_word(directory)
    columns = per_request(run)
    seen = frames(run, summary, columns)
    reasons = whys(run, summary, columns)
    waited = {} if story is None else story.why
    worst, rows = slowest(run, columns, waited), embedded_rows(run, summary, columns, waited)
    due = due_rows(run)
    heat = heat_figures(
        attainment_cells(run, due, kept_rows(run, summary, columns, due)),
        interference(run, columns),
    )
    drawn = {
        **spectra(seen),
        "timeline": timeline(seen),
        **{why.name: why.spec for why in reasons},
        **heat,
    }
    if story is not None:
        drawn |= engine_figures(story, seen.end_s)
    if worst.order:
        drawn["slowest"] = gantt(worst)
    return render_page(
        "report.html.j2",
        drawn,
        cache_dir,
        data={"summary": summary.to_json(), **({"rows": rows} if rows else {})},
        scripts=("static/rows.js", "static/rescore.js", "static/lookup.js"),
        rescoring=rows,
        next_steps=next_steps(summary, *_again(run, search), place),
        search=search,
        title=f"{summary.run or 'run'} · slobench",
        run=summary.run,
        place=place,
        summary=summary,
        banner=verdict_rows.banner(summary),
        promises=verdict_rows,
        tables=tables,
        subject=_subject(run),
        window=_window(summary),
        captions={name: text for name, text in _CAPTIONS.items() if name in drawn},
        whys=reasons,
        story=story,
        blockers=[] if story is None else blocker_rows(story),
        slowest=worst,
        slowest_head=(*SLOWEST_HEAD, *(["why it waited in the engine"] if waited else [])),
        points_note=_points_note(seen),
        end_s=seen.end_s,
        failures=seen.failures,
        level=f"{100 * summary.confidence:g} %",
        format_value=format_value,
        format_count=format_count,
        describe_server=describe_server,
        metrics=METRICS,
        provenance=_provenance(run),
        scenario_text=redact(run.manifest.scenario.text),
        preflight=[
            structs.replace(line, detail=redact(line.detail)) for line in run.manifest.preflight
        ],
    )


def _redacted(summary: Summary) -> Summary:
    """The summary with its sentences free of secrets: some quote how a run or a worker ended."""
    checks = tuple(replace(c, detail=redact(c.detail)) for c in summary.validity.checks)
    return replace(
        summary,
        reasons=tuple(map(redact, summary.reasons)),
        findings=tuple(map(redact, summary.findings)),
        validity=replace(summary.validity, checks=checks),
    )


def _subject(run: Run) -> str:
    """What was measured, for the line under the title."""
    manifest, target = run.manifest, run.manifest.target
    parts = (manifest.scenario.name, target.model, target.url, manifest.started_utc)
    return " · ".join(redact(part) for part in parts if part)


def _again(run: Run, search: Searched | None) -> tuple[str, str]:
    """Words that ask for the same scenario and the same target on a command line; a scenario made
    of flags has none, and one that is being searched need not be searched again."""
    if search is not None:
        return "", ""
    command = run.manifest.command
    if command[1:2] != ("run",) or len(command) < 3 or command[2].startswith("-"):
        return "", ""
    words = [command[2]]
    for setting in _flags(command, "--set"):
        words += ["--set", setting]
    where = [word for flag in ("--target", "--engine") for value in _flags(command, flag)[-1:]
             for word in (flag, value)]  # fmt: skip
    scenario, target = (
        " ".join(shlex.quote(redact(word)) for word in some) for some in (words, where)
    )
    return scenario, target


def _flags(command: Sequence[str], flag: str) -> list[str]:
    """The values of a flag on a command line."""
    found: list[str] = []
    for number, word in enumerate(command, start=1):
        if word == flag:
            found += command[number : number + 1]
        elif word.startswith(f"{flag}="):
            found.append(word.partition("=")[2])
    return found


def _window(summary: Summary) -> str:
    window = summary.window
    return (
        f"Measured from {window.start_s:g} s to {window.end_s:g} s of the run:"
        f" {format_value(window.length_s, 's')}."
    )


def _points_note(seen: Frames) -> str:
    n_failed = sum(p["status"] != "ok" for p in seen.points)
    n_ok = len(seen.points) - n_failed
    n_gaps = sum(p["status"] == "ok" for p in seen.itl)
    if n_ok == seen.n_points and n_failed == seen.n_failed_points and n_gaps == seen.n_itl:
        return "Every request is a point, and so is every gap between its tokens."
    return (
        f"Points: {format_count(n_ok)} of {format_count(seen.n_points)} answers, "
        f"{format_count(n_failed)} of"
        f" {format_count(seen.n_failed_points)} failures, {format_count(n_gaps)} of"
        f" {format_count(seen.n_itl)} gaps between tokens; the longest always."
    )


def _provenance(run: Run) -> list[tuple[str, str]]:
    """How this run came about and how to repeat it; values are text, never a secret."""
    manifest, scenario = run.manifest, run.manifest.scenario
    target = manifest.target.to_json()
    labels = target.pop("labels")
    entries: list[tuple[str, object]] = [
        ("command", shlex.join(manifest.command)),
        ("scenario", scenario.source or scenario.name),
        ("scenario sha256", scenario.sha256),
        ("seed", manifest.seed),
        ("prompt salt", manifest.salt),
        ("schedule sha256", manifest.schedule_sha256),
        *((f"target {key}", value) for key, value in target.items()),
        *((f"label {key}", value) for key, value in labels.items()),
        ("slobench", manifest.slobench),
        ("git", manifest.git),
        *((f"version {key}", value) for key, value in manifest.versions.items()),
        *((f"host {key}", value) for key, value in manifest.host.to_json().items()),
        ("started", manifest.started_utc),
        ("ended", f"{manifest.ended} {manifest.end_reason}".strip()),
    ]
    return [(name, redact(_text(value))) for name, value in entries if value not in (None, "", {})]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
