"""What the verbs under Measure do: wiring between arguments, functions and the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.export_command import write_exports
from loadgen.cli.parse import (
    cache_dir,
    read_budget_s,
    read_confidence,
    read_transport,
    read_workers,
)
from loadgen.cli.terminal import print_json, print_summary, stdout
from loadgen.errors import UsageError
from loadgen.plugins import load_plugin
from loadgen.run.run_options import NOBODY, RunOptions, Watch

if TYPE_CHECKING:
    from loadgen.workload.scenario import Scenario

Exports = Sequence[tuple[str, Path | None]]


def run(
    scenario: Scenario,
    target: str | None,
    model: str,
    engine: str,
    out: Path | None,
    force: bool,
    workers: str,
    transport: str,
    confidence: float | None,
    plugins: Sequence[Path],
    as_json: bool,
    scrape: bool = True,
    exports: Exports = (),
    watch: Watch = NOBODY,
) -> int:
    """Run, print the table and the verdict, and return the exit code."""
    from loadgen.drive.shard_process import PreforkedShard

    chosen = target or os.environ.get("OPENAI_BASE_URL")
    if not chosen:
        raise UsageError(
            "which server? Add --target URL, a target file, or `reference` for the bundled engine "
            "(OPENAI_BASE_URL is not set either)"
        )
    options = RunOptions(
        out_dir=out,
        force=force,
        n_workers=read_workers(workers),
        transport=read_transport(transport),
        engine=engine,
        model=model,
        confidence=read_confidence(confidence),
        command=["slobench", *sys.argv[1:]],
        environ=dict(os.environ),
        cache_dir=cache_dir(os.environ),
        plugins=plugins,
        scrape=scrape,
        watch=watch,
    )
    from loadgen.run.execute import execute  # its modules are what an early process needs, too

    with PreforkedShard(is_wanted=chosen != "sim") as early:
        console = Console(stderr=True, highlight=False)
        finished = execute(scenario, chosen, options, console, early=early)
    print_summary(finished.summary, as_json)
    typer.echo(f"report: {finished.directory / 'report.html'}", err=True)
    write_exports(finished.directory, exports)
    return INTERRUPTED if finished.was_interrupted else finished.summary.exit_code


def print_launch(target: str | None) -> None:
    """The command a target file starts its server with, and nothing is started."""
    from loadgen.run.target import launch_line

    if target is None:
        raise UsageError("--print-launch: which target file? Add --target FILE")
    typer.echo(launch_line(target, os.environ))


def report(
    runs: Sequence[Path],
    slo: Sequence[str] | None,
    confidence: float | None,
    as_json: bool,
    exports: Exports = (),
    copies: Sequence[str] = (),
) -> None:
    """Recompute and re-render recorded runs; `copies` are png, pdf and svg of their pages."""
    from loadgen.run.conclude import conclude
    from loadgen.run.execute import read_story

    if len(runs) > 1 and any(path is not None for _, path in exports):
        raise UsageError(
            "--export FORMAT=PATH of several runs would overwrite itself: leave the path out, or "
            "put them into one table with slobench export"
        )

    browser = _browser(copies)
    told = []
    for directory in runs:
        summary = conclude(
            directory,
            slo,
            read_confidence(confidence),
            cache_dir(os.environ),
            read_story(directory),
        )
        told.append(summary.to_json())
        if not as_json:
            print_summary(summary, as_json)
        typer.echo(f"report: {directory / 'report.html'}", err=True)
        write_copies(directory, copies, browser)
        write_exports(directory, exports, slo)
    if as_json:  # one object for one run, a list for several
        print_json(told[0] if len(told) == 1 else told)


def _browser(copies: Sequence[str]) -> str:
    """The browser that copies need, "" where they need none: looked for before any work is done."""
    from reports.printed import find_browser

    return find_browser(os.environ.get("PATH", "")) if {"png", "pdf"} & set(copies) else ""


def write_copies(directory: Path, copies: Sequence[str], browser: str) -> None:
    """A run's page as a picture, for print, and its figures as files, beside it."""
    from loadgen.measure.wording import format_count
    from reports.printed import pdf, picture, write_figures

    page = directory / "report.html"
    if "png" in copies:
        n_lost_px = picture(page, page.with_suffix(".png"), browser)
        typer.echo(f"png: {page.with_suffix('.png')}", err=True)
        if n_lost_px:
            typer.echo(
                f"png: the page's last {format_count(n_lost_px)} px are not on it, a picture can "
                "hold"
                " no more; --pdf holds all of it",
                err=True,
            )
    if "pdf" in copies:
        pdf(page, page.with_suffix(".pdf"), browser)
        typer.echo(f"pdf: {page.with_suffix('.pdf')}", err=True)
    if "svg" in copies:
        written = write_figures(page, directory / "figures")
        typer.echo(f"svg: {len(written)} figures in {directory / 'figures'}", err=True)


def preview(scenario: Scenario, as_json: bool, html: Path | None, parquet: Path | None) -> None:
    """The planned schedule in numbers, as a page, and as a table."""
    from loadgen.workload.preview import preview as describe
    from loadgen.workload.schedule import make_plan

    plan = make_plan(scenario)
    facts = describe(scenario, *plan)
    for note in trace_notes(scenario):
        typer.echo(f"note: {note}", err=True)
    if html is not None:
        from reports.page import write_page
        from reports.preview.page import render

        classes = scenario.names().classes
        text = render(facts, plan.schedule, classes, scenario.to_yaml(), cache_dir(os.environ))
        write_page(html, text)
        typer.echo(f"page: {html}", err=True)
    if parquet is not None:
        from loadgen.drive.store import write_schedule_file

        write_schedule_file(parquet, plan.schedule, scenario.names())
        typer.echo(f"schedule: {parquet}", err=True)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    from reports.preview.view import tables

    stdout().print(tables(facts))


def trace_notes(scenario: Scenario) -> list[str]:
    """What reading the scenario's traces dropped, reordered or approximated."""
    from loadgen.workload.trace_arrivals import TraceArrivals

    kinds = [scenario.arrivals, *(asked.arrivals for asked in scenario.classes.values())]
    replays = [kind for kind in kinds if isinstance(kind, TraceArrivals)]
    return [f"{kind.path}: {note}" for kind in replays for note in kind.notes()]


def fit(trace: Path, format_text: str, as_json: bool) -> None:
    """A scenario that looks like a trace on stdout, and how well it does on stderr."""
    from pydantic import ValidationError

    from loadgen.workload.fit import fit_file
    from loadgen.workload.traces.trace import TRACES
    from loadgen.yaml_document import parse_document
    from reports.fit_view import tables

    asked = parse_document(f"format: {format_text}", "--format", UsageError)
    try:
        reader = TRACES.build(asked.values["format"])
    except ValidationError as error:
        asked.note_validation(error)
        asked.raise_mistakes()
        raise
    except ValueError as error:
        raise UsageError(f"--format: {error}") from None
    text, facts = fit_file(trace, reader)
    if as_json:
        typer.echo(json.dumps({"scenario": text, **facts}, indent=2))
        return
    typer.echo(text, nl=False)
    Console(stderr=True, highlight=False).print(tables(facts))


def validate(sources: Sequence[str], settings: Sequence[str], plugins: Sequence[Path]) -> int:
    """Read and plan every scenario, and check every nightly file with all it names; all mistakes
    are told, and any makes the exit code 2."""
    for plugin in plugins:
        load_plugin(plugin)
    if not sources:
        raise UsageError("which scenarios? Name one or more files, or ask for --schema")
    exit_code = 0
    for source in sources:
        try:
            found = _checked(source, settings)
        except UsageError as error:
            exit_code = error.exit_code
            for line in str(error).splitlines():
                where = "" if line.startswith(source) else f"{source}: "
                typer.echo(f"{where}{line}", err=True)
        else:
            typer.echo(f"{source}: ok ({found})")
    return exit_code


def _checked(source: str, settings: Sequence[str]) -> str:
    """What a file that is all right holds, in words. Raises UsageError."""
    from loadgen.nightly.night import Nightly, NightOptions
    from loadgen.nightly.nightly_file import is_nightly
    from loadgen.workload.scenario import load_scenario
    from loadgen.workload.schedule import make_schedule

    path = Path(source)
    if not is_nightly(path):
        return f"{len(make_schedule(load_scenario(source, settings)))} requests"
    if settings:
        raise UsageError(f"{source}: --set changes a scenario, and this is a nightly file")
    cells = Nightly(path, NightOptions(run=RunOptions(environ=dict(os.environ)))).cells
    controls = ", each with a control" if any(cell.control for cell in cells) else ""
    return f"{len(cells)} cells a night{controls}"


def schema(plugins: Sequence[Path]) -> None:
    """The JSON schema of the scenario format."""
    from loadgen.cli.schema import scenario_schema

    for plugin in plugins:
        load_plugin(plugin)
    typer.echo(json.dumps(scenario_schema(), indent=2, ensure_ascii=False))


def doctor(
    target: str | None, prove: bool, budget: str, model: str, engine: str, as_json: bool
) -> int:
    """Examine this machine, the numbers made on it, or a server; the exit code."""
    from loadgen.doctor.checkup import visit_machine, visit_target, visit_truth
    from loadgen.run.target import Choice
    from reports.doctor_view import tables

    console, cache = Console(stderr=True, highlight=False), cache_dir(os.environ)
    cc = os.environ.get("CC", "")
    if target is not None:
        if prove:
            raise UsageError("--prove is about this machine, --target about a server: choose one")
        facts = visit_target(Choice(target, engine, model, dict(os.environ)), console)
    elif model or engine:
        raise UsageError("--model and --engine belong to --target: which server?")
    else:
        visit = visit_truth if prove else visit_machine
        facts = visit(read_budget_s(budget), cache, cc, console)
    if as_json:
        print_json(facts.to_json())
    else:
        stdout().print(tables(facts.to_json()))
    return facts.exit_code


def init(directory: Path) -> None:
    """Write the files a new project begins with."""
    from loadgen.cli.starter import write_starter

    for path in write_starter(directory):
        typer.echo(f"wrote {path}")
    where = "" if directory == Path() else f"cd {directory} && "
    typer.echo(f"next: {where}slobench run slobench/chat.yaml --target reference", err=True)
