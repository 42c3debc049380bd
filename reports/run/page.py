"""A run as an HTML page that needs nothing but a browser: no network, no other file."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from loadgen.measure.attainment import due_rows
from loadgen.measure.catalog import METRICS, NEEDS_TOKENS, Metric
from loadgen.measure.drivers import interference
from loadgen.measure.per_request import per_request
from loadgen.measure.server_load import describe_server
from loadgen.measure.summary import Summary
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run
from reports.page import render_page
from reports.redaction import redact
from reports.run import agents_section, tables, verdict_section
from reports.run.causes import cause_figures
from reports.run.embedded_rows import embedded_rows
from reports.run.ending import ending
from reports.run.engine_section import (
    EngineSection,
    blocker_rows,
    engine_figures,
    simulated_section,
)
from reports.run.frames import Frames, frames, rows_met
from reports.run.heat_maps import attainment_cells, heat_figures
from reports.run.slowest import HEAD as SLOWEST_HEAD
from reports.run.slowest import gantt, slowest
from reports.run.spectra import spectra
from reports.run.tables import TableCell
from reports.run.timeline import timeline
from reports.run.verdict_section import next_steps

_CAPTIONS = {
    "spectrum-ttft": "Time to first token at every percentile",
    "spectrum-tpot": "Time per output token at every percentile",
    "spectrum-itl": "Inter-token latency at every percentile",
    "spectrum-e2e": "End-to-end latency at every percentile",
}
_OF_TREES = {name for name, metric in METRICS.items() if metric.scope == "tree"} | {
    "tree_attainment"
}


def render(
    run: Run,
    summary: Summary,
    cache_dir: Path | None = None,
    engine: EngineSection | None = None,
    directory: Path | None = None,
    search: Searched | None = None,
) -> str:
    """The whole page. `cache_dir` caches the plotting bundle, which takes seconds to make; `engine`
    is the section on the bundled engine, if that served the run; `directory` holds the run, for the
    commands on the page that read it; `search` is the capacity search that the run is a probe of.
    """
    summary = _redacted(summary)
    engine = engine or simulated_section(run.manifest.engine)
    place = run_word(directory)
    columns, due = per_request(run), due_rows(run)
    tables_of_run = frames(run, summary, columns)
    causes = cause_figures(run, summary, columns)
    waited = {} if engine is None else engine.why
    worst, rows = slowest(run, columns, waited), embedded_rows(run, summary, columns, waited)
    cells = attainment_cells(run, due, rows_met(run, summary, columns, due))
    if summary.attainment.reason:
        cells = []
    drawn = {
        **spectra(tables_of_run),
        "timeline": timeline(tables_of_run),
        **{cause.name: cause.spec for cause in causes},
        **heat_figures(cells, interference(run, columns)),
    }
    if engine is not None:
        drawn |= engine_figures(engine, tables_of_run.end_s)
    if worst.order:
        drawn["slowest"] = gantt(worst)
    return render_page(
        "report.html.j2",
        drawn,
        cache_dir,
        data={"summary": summary.to_json(), **({"rows": rows} if rows else {})},
        scripts=("static/rows.js", "static/rescore.js", "static/lookup.js"),
        rescoring=rows,
        next_steps=next_steps(summary, place, is_probe=search is not None),
        search=search,
        title=f"{summary.run or 'run'} · slobench",
        run=summary.run,
        place=place,
        summary=summary,
        banner=verdict_section.banner(summary),
        ending=ending(summary, place),
        verdict_section=verdict_section,
        tables=tables,
        agents_section=agents_section,
        subject=_subject(run),
        window=_window(summary),
        captions={name: text for name, text in _CAPTIONS.items() if name in drawn},
        causes=causes,
        engine=engine,
        blockers=[] if engine is None else blocker_rows(engine),
        slowest=worst,
        slowest_head=(*SLOWEST_HEAD, *(["reason for waiting in the engine"] if waited else [])),
        points_note=_points_note(tables_of_run, summary.counts["unfinished"]),
        end_s=tables_of_run.end_s,
        failures=tables_of_run.failures,
        level=f"{100 * summary.confidence:g} %",
        format_value=format_value,
        format_count=format_count,
        describe_server=describe_server,
        metrics=_explained(summary, has_canaries=run.manifest.canary is not None),
        provenance=_provenance(run),
        scenario_text=redact(run.manifest.scenario.text),
        preflight=[
            structs.replace(line, detail=redact(line.detail)) for line in run.manifest.preflight
        ],
    )


_RATES_OF_TOKENS = ("output_tokens_per_s", "goodput_output_tokens_per_s")


def _explained(summary: Summary, *, has_canaries: bool) -> dict[str, Metric]:
    """The metrics that the page has: of tokens or of other results, of trees with agents."""
    absent = {*NEEDS_TOKENS, *_RATES_OF_TOKENS} if summary.results else {"results_per_s"}
    if not summary.agents:
        absent |= _OF_TREES
    if not has_canaries:
        absent.add("canary_match")
    return {name: metric for name, metric in METRICS.items() if name not in absent}


def _redacted(summary: Summary) -> Summary:
    """The summary without secrets: some of its sentences quote error messages."""
    checks = tuple(replace(c, detail=redact(c.detail)) for c in summary.validity.checks)
    cause = summary.cause
    if cause is not None:
        sentence, message = redact(cause.sentence), redact(cause.message)
        cause = replace(cause, sentence=sentence, message=message)
    return replace(
        summary,
        reasons=tuple(map(redact, summary.reasons)),
        findings=tuple(map(redact, summary.findings)),
        capacity_command=redact(summary.capacity_command),
        made_under=tuple(map(redact, summary.made_under)),
        judged_by=tuple(map(redact, summary.judged_by)),
        validity=replace(summary.validity, checks=checks),
        cause=cause,
    )


def _subject(run: Run) -> str:
    """The line under the title: scenario, model, URL and start of the run."""
    manifest, target = run.manifest, run.manifest.target
    parts = (
        manifest.scenario.name,
        target.model,
        target.url,
        f"{manifest.started_utc[:16].replace('T', ' ')} UTC",
    )
    return " · ".join(redact(part) for part in parts if part)


def _window(summary: Summary) -> str:
    window, loop = summary.window, summary.closed_loop
    text = (
        f"Measured from {window.start_s:g} s to {window.end_s:g} s of the run:"
        f" {format_value(window.length_s, 's')}."
    )
    if loop is not None:
        text += f" Start: {loop.text}."
    flight = tables.in_flight_text(summary)
    return f"{text} {flight[:1].upper()}{flight[1:]}." if flight else text


def _points_note(shown: Frames, n_unfinished: int) -> str:
    """How many of the points the timeline shows."""
    if not n_unfinished:
        return _points_shown(shown, "request")
    left_out = f"{format_count(n_unfinished)} unfinished requests have no point."
    return f"{_points_shown(shown, 'request that ended')} {left_out}"


def _points_shown(shown: Frames, each: str) -> str:
    n_failed = sum(p["status"] != "ok" for p in shown.points)
    n_ok = len(shown.points) - n_failed
    n_gaps = sum(p["status"] == "ok" for p in shown.itl)
    counts = ((n_ok, shown.n_points), (n_failed, shown.n_failed_points), (n_gaps, shown.n_itl))
    if all(n == total for n, total in counts):
        gaps = ", and so is every gap between its tokens" if shown.n_itl else ""
        return f"Every {each} is a point{gaps}."
    ok, failed, gaps = (f"{format_count(n)} of {format_count(total)}" for n, total in counts)
    return (
        f"Points: {ok} successful requests, {failed} failed requests, {gaps} gaps between tokens,"
        " the longest always among them."
    )


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Origin of the run and how to repeat it: (name, text without secrets)."""
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


UNKNOWN = "RUN"  # the word of --help


def run_word(directory: Path | None) -> str:
    """A run's directory as a single word of a shell, relative if it was given as relative or lies
    below the current directory. A link is followed: `runs/latest` will soon point elsewhere.
    `UNKNOWN` for no directory."""
    if directory is None:
        return UNKNOWN
    if directory.is_symlink():
        directory = directory.parent / directory.readlink()
    here = Path.cwd()
    if directory.is_absolute() and directory.is_relative_to(here):
        directory = directory.relative_to(here)
    return shlex.quote(redact(str(directory)))


@dataclass(frozen=True, slots=True)
class Searched:
    """The capacity search that a run is a probe of, and its `result` when the page was written:
    `value` (`12.3 req/s`) and `interval` (`[11.9, 12.7], 95 %`) are None without an interval;
    `page`: link to its own page."""

    probe: str
    page: str
    n_probes: int
    result: str
    value: str | None
    interval: str | None
    attainment: float

    def sentence(self) -> str:
        """The number of the probe, and the result of the search so far."""
        if not self.n_probes:
            return f"Probe {self.probe} of a capacity search, its first."
        probes = f"{self.n_probes} {'probe' if self.n_probes == 1 else 'probes'}"
        return (
            f"Probe {self.probe} of a capacity search. Result when this page was written, after"
            f" {probes}: {self.result}."
        )

    def tile(self) -> tuple[str, TableCell]:
        """The capacity as a headline number."""
        share = f"{100 * self.attainment:g} % of requests meet the SLO"
        if self.value is None:
            return "Capacity", TableCell("–", small=f"not yet known; {share}")
        return "Capacity", TableCell(self.value, small=f"{self.interval}; {share}")
