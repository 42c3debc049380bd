"""The verbs on recorded runs: report, rescore, export, verify."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import (
    Clear,
    Confidence,
    Export,
    Full,
    Goodput,
    Json,
    MinRequests,
    Slo,
)
from loadgen.cli.terminal import print_json, print_summary, stdout
from loadgen.errors import UsageError, nearest

if TYPE_CHECKING:
    pass

verbs = typer.Typer()
Exports = Sequence[tuple[str, Path | None]]
"""Formats of exports with their files; None: in the run's directory."""


@verbs.command(epilog="Example: slobench report runs/latest")
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs, searches or studies: paths, or names in runs/.")
    ],
    slo: Slo = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --slo: replace the verdict of the run.")
    ] = False,
    confidence: Confidence = None,
    clear: Clear = False,
    export: Export = None,
    png: Annotated[
        bool, typer.Option("--png", help="Also the whole page as report.png (needs Chromium).")
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also the page as report.pdf (needs Chromium).")
    ] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Also each figure as figures/*.svg.")] = False,
    full: Full = False,
    json: Json = False,
) -> None:
    """Compute the numbers of recorded runs again and rewrite their report.html; of a search or
    another study, print the result that it has. To check other SLOs without changing the run:
    slobench rescore."""
    from loadgen.archive.names import directory_of
    from loadgen.cli.study_files import stored_result
    from loadgen.run.conclude import check_replacement, conclude
    from loadgen.run.execute import engine_reader
    from reports.printed import find_browser

    exports = read_exports(export or [])
    slo = parse.slo_flags(slo, None)
    if len(runs) > 1 and any(path is not None for _, path in exports):
        raise UsageError(
            "--export FORMAT=PATH: each of the runs would overwrite the file; leave the path out, "
            "or write one table with slobench export"
        )
    browser = find_browser(os.environ.get("PATH", "")) if png or pdf else ""
    directories = [directory_of(name) for name in runs]
    studies = {directory: stored_result(directory) for directory in directories}
    if slo is not None:
        _refuse_studies([path for path, study in studies.items() if study is not None])
        for directory in () if overwrite else directories:  # before any of them is written
            check_replacement(directory, slo)
    summaries = []
    for directory in directories:
        if (study := studies[directory]) is not None:
            summaries.append(study.content)
            if not json:
                study.print(is_full=full)
            typer.echo(f"report: {study.page}", err=True)
            write_copies(study.page, browser, png=png, pdf=pdf, svg=svg)
            continue
        summary = conclude(
            directory,
            slo,
            parse.read_confidence(confidence),
            parse.cache_dir(os.environ),
            engine_reader(directory),
            clear=clear,
        )
        summaries.append(summary.to_json())
        if not json:
            print_summary(summary, as_json=False, is_full=full, directory=directory)
        typer.echo(f"report: {directory / 'report.html'}", err=True)
        write_copies(directory / "report.html", browser, png=png, pdf=pdf, svg=svg)
        write_exports(directory, exports, slo)
    if json:  # an object for one run, a list for several
        print_json(summaries[0] if len(summaries) == 1 else summaries)


def _refuse_studies(directories: Sequence[Path]) -> None:
    """Raises UsageError: the SLOs of a study are a part of it."""
    for directory in directories:
        raise UsageError(
            f"{directory}: --slo changes a run, and this is a search or another study; to check "
            f"its runs against other SLOs: slobench rescore {directory} --slo …"
        )


def write_copies(page: Path, browser: str, *, png: bool, pdf: bool, svg: bool) -> None:
    """A report as a picture, as a PDF, and its figures as SVG files."""
    from loadgen.archive import checksums
    from loadgen.measure.wording import format_count
    from reports.printed import pdf as write_pdf
    from reports.printed import picture, write_figures

    written: list[Path] = []
    if png:
        n_lost_px = picture(page, page.with_suffix(".png"), browser)
        written.append(page.with_suffix(".png"))
        typer.echo(f"png: {page.with_suffix('.png')}", err=True)
        if n_lost_px:
            typer.echo(
                f"png: the last {format_count(n_lost_px)} px of the page are missing (the size "
                "limit of a picture); --pdf holds the whole page",
                err=True,
            )
    if pdf:
        write_pdf(page, page.with_suffix(".pdf"), browser)
        written.append(page.with_suffix(".pdf"))
        typer.echo(f"pdf: {page.with_suffix('.pdf')}", err=True)
    if svg:
        figures = write_figures(page, page.with_name("figures"))
        written += figures
        typer.echo(f"svg: {len(figures)} figures in {page.with_name('figures')}", err=True)
    checksums.cover(page.parent, *written)


@verbs.command(
    epilog="Example: slobench rescore runs/latest --slo 'ttft<=300ms' --definition all",
)
def rescore(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run, or a search or folder with several: a path, or a name in runs/; its files "
            "stay as they are."
        ),
    ],
    slo: Slo = None,
    goodput: Goodput = None,
    definition: Annotated[
        list[str] | None,
        typer.Option(help="vllm, guidellm, aiperf, inference-perf, mlperf or all; repeatable."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="Another measured window: 30s:90s, steady (MSER-5), or all, which counts the "
            "start of a closed loop, too."
        ),
    ] = None,
    confidence: Confidence = None,
    clear: Clear = False,
    min_requests: MinRequests = None,
    full: Full = False,
    json: Json = False,
) -> None:
    """Check a recorded run against another SLO, window, or another tool's definitions."""
    from loadgen.archive.names import runs_of
    from loadgen.archive.store import read_run
    from loadgen.measure.aggregate import summarize
    from loadgen.measure.attainment import with_window
    from loadgen.measure.definitions import DEFINITIONS
    from loadgen.measure.definitions import rescore as defined_values
    from loadgen.measure.summary import plain_json
    from reports.run.console import definitions_table

    definitions, tools = definition or [], [*DEFINITIONS, "all"]
    for name in definitions:
        if name not in tools:
            raise UsageError(f"--definition: unknown tool '{name}'; {nearest(name, tools)}")
    slos = parse.slo_flags(slo, goodput)
    level = parse.read_confidence(confidence)
    names = DEFINITIONS if "all" in definitions else dict.fromkeys(["slobench", *definitions])
    directories, contents, codes = runs_of([run]), [], []
    for directory in directories:
        recorded = read_run(directory)
        if window is not None:
            recorded = with_window(recorded, window)
        summary = summarize(recorded, slos, level, min_requests, clear)
        rows = defined_values(recorded, tuple(names)) if definitions else []
        codes.append(summary.exit_code)
        if json:
            values = plain_json([asdict(row) for row in rows])
            contents.append({**summary.to_json(), "definitions": values})
            continue
        if len(directories) > 1:
            typer.echo(f"{directory}")
        print_summary(summary, as_json=False, is_full=full, directory=directory)
        if rows:
            stdout().print(definitions_table(rows))
    if json:  # an object for one run, a list for several
        print_json(contents[0] if len(contents) == 1 else contents)
    raise typer.Exit(max(codes))


@verbs.command(
    "export",
    epilog="Example: slobench export runs/quickstart-* --format csv -o runs.csv",
)
def export_(
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="csv or json (a row per run and class), jsonl or parquet (a row per request); a "
            "file of another tool: vllm-bench, vllm-bench-text (the block that it prints), aiperf, "
            "aiperf-records, guidellm, llm-d, inferencex, mlperf-endpoints, otlp-json; or grafana, "
            "a dashboard for --metrics-port, which needs no run.",
        ),
    ],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs and searches: paths, or names in runs/; they share one table."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file. Default: standard output.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="runs or requests, where not the format's own choice.")
    ] = None,
) -> None:
    """Write recorded runs in a format for spreadsheets, notebooks or existing dashboards."""
    from loadgen.archive.names import runs_of
    from loadgen.archive.store import read_run
    from loadgen.exports.formats import check_format, export, export_path

    if format_ == "grafana":
        _export_dashboard(runs or [], output)
        return
    check_format(format_, rows)
    if output is None and format_ == "parquet" and sys.stdout.isatty():
        raise UsageError("parquet is binary: name a file with -o, e.g. -o runs.parquet")
    directories = runs_of(runs or [])  # each once: runs/* has runs/latest
    content = export([read_run(directory) for directory in directories], format_, output, rows)
    if output is None:
        sys.stdout.buffer.write(content)
    else:
        typer.echo(f"export: {export_path(format_, output)}", err=True)


def _export_dashboard(runs: Sequence[Path], output: Path | None) -> None:
    """The Grafana dashboard of the live series."""
    from loadgen.live.grafana import dashboard

    if runs:
        raise UsageError("the grafana dashboard is the same for every run: leave the runs out")
    text = json.dumps(dashboard(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text)
    typer.echo(f"dashboard: {output}", err=True)


def read_exports(texts: Sequence[str]) -> list[tuple[str, Path | None]]:
    """`FORMAT` or `FORMAT=PATH` as (format, path). Raises UsageError for an unknown format or
    directory."""
    if not texts:  # nothing is imported before the first request
        return []
    from loadgen.exports.formats import check_format

    exports = []
    for text in texts:
        format_, has_path, path = text.partition("=")
        if has_path and not path:
            raise UsageError(f"--export {text}: no file: write {format_}=PATH, or just {format_}")
        try:
            check_format(format_)
        except UsageError as error:
            raise UsageError(f"--export: {error}") from None
        if has_path and not Path(path).parent.is_dir():
            raise UsageError(f"--export {text}: there is no directory {Path(path).parent}")
        exports.append((format_, Path(path) if has_path else None))
    return exports


def write_exports(directory: Path, exports: Exports, slo: Sequence[str] | None = None) -> None:
    """Writes a finished run in each format; without a path into the run's directory."""
    if not exports:
        return
    from loadgen.archive.store import read_run
    from loadgen.exports.formats import export, export_path

    recorded = read_run(directory)
    for format_, path in exports:
        destination = export_path(format_, directory if path is None else path)
        export(recorded, format_, destination, slo=slo)
        typer.echo(f"export: {destination}", err=True)


@verbs.command(epilog="Example: slobench verify runs/latest")
def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Runs, studies, baselines, or folders of them: paths, or names in runs/.",
        ),
    ],
    json: Json = False,
) -> None:
    """Compare recorded files with their checksums and with each other; changes nothing. Exit code 0
    if all are intact, 3 if any is damaged or unfinished."""
    from loadgen.archive.names import directory_of
    from loadgen.archive.verify import exit_code
    from loadgen.archive.verify import verify as verified
    from loadgen.cli.study_files import check_store

    results = [
        result for path in map(directory_of, paths) for result in verified(path, check_store)
    ]
    for result in () if json else results:
        typer.echo(f"{result.state:<10}  {result.path} ({result.kind}, {result.n_files} files)")
        for problem in result.problems:
            typer.echo(f"            {problem}")
    if json:
        print_json([result.to_json() for result in results])
    raise typer.Exit(exit_code(results))
