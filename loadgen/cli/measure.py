"""The verbs of the panel Measure: run, preview, validate, fit, doctor, init, report, export."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import (
    Confidence,
    Engine,
    Export,
    Force,
    Json,
    MinRequests,
    Model,
    Plugin,
    ReusePreflight,
    RunDirectory,
    ScenarioFlags,
    Set,
    Slo,
    Target,
    TrafficFlags,
    WaitReady,
    WatchFlags,
    Workers,
    with_flags,
)
from loadgen.cli.terminal import print_json, print_summary, stdout
from loadgen.errors import UsageError

if TYPE_CHECKING:
    from loadgen.run.run_options import RunOptions
    from loadgen.workload.scenario import Scenario

PANEL = "Measure"
verbs = typer.Typer()
FIRST_SLO = "interactive-chat"
"""The preset of a first look."""
_DOCTOR_TRAFFIC: Mapping[str, object] = {"input_len": 512, "output_len": 128, "duration": "10s"}
"""Lengths and window of doctor's traffic where the flags do not state them."""

Exports = Sequence[tuple[str, Path | None]]
"""Formats of exports with their files; None: in the run's directory."""


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench run scenarios/quickstart.yaml --target reference",
)
@with_flags
def run(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    watch: WatchFlags,
    target: Target = None,
    model: Model = "",
    engine: Engine = "",
    out: RunDirectory = None,
    force: Force = False,
    workers: Workers = "auto",
    transport: Annotated[
        str, typer.Option(help="fast, or aiohttp: slower, to check the fast transport against.")
    ] = "fast",
    confidence: Confidence = None,
    min_requests: MinRequests = None,
    print_scenario: Annotated[
        bool, typer.Option("--print-scenario", help="Print the scenario as YAML and stop.")
    ] = False,
    print_launch: Annotated[
        bool,
        typer.Option("--print-launch", help="Print the target file's server command and stop."),
    ] = False,
    wait_ready: WaitReady = None,
    reuse_preflight: ReusePreflight = None,
    scrape: Annotated[
        bool, typer.Option("--scrape/--no-scrape", help="Read the server's own metrics at 1 Hz.")
    ] = True,
    export: Export = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write the verdict as JUnit XML: a test case per SLO.")
    ] = None,
    json: Json = False,
) -> None:
    """Send a scenario's traffic to a server, time every token, and check the SLO. With --target
    alone: a sweep over five rates up to what the server can take, in about three minutes."""
    if print_launch:
        from loadgen.run.target import launch_line

        if target is None:
            raise UsageError("--print-launch: no target file: add --target FILE")
        typer.echo(launch_line(target, os.environ))
        return
    if _is_first_look(flags, traffic) and target is not None and not print_scenario:
        options = parse.base_options(
            flags.plugin,
            n_workers=parse.read_workers(workers),
            engine=engine,
            model=model,
            wait_ready_s=parse.read_wait_s(wait_ready),
        )
        raise typer.Exit(_first_look(target, options, flags, traffic, out, as_json=json))
    scenario = parse.choose_scenario(flags, traffic)
    if print_scenario:
        typer.echo(scenario.to_yaml(), nl=False)
        return
    exports = read_exports(export or [])
    options = parse.base_options(
        flags.plugin,
        out_dir=out,
        force=force,
        n_workers=parse.read_workers(workers),
        transport=parse.read_transport(transport),
        engine=engine,
        model=model,
        confidence=parse.read_confidence(confidence),
        min_requests=min_requests or 0,
        scrape=scrape,
        watch=parse.read_watch(watch, os.environ),
        wait_ready_s=parse.read_wait_s(wait_ready),
        reuse_preflight_s=parse.read_reuse_s(reuse_preflight),
    )
    raise typer.Exit(
        run_scenario(
            scenario, parse.read_target(target), options, exports, as_json=json, junit=junit
        )
    )


def _is_first_look(flags: ScenarioFlags, traffic: TrafficFlags) -> bool:
    """Whether the flags state no traffic, apart from lengths."""
    others = {**asdict(traffic), **asdict(flags), "slo": None, "goodput": None, "plugin": None}
    lengths = {"input_len": None, "output_len": None}
    return all(value is None for value in {**others, **lengths}.values())


def _first_look(
    target: str,
    options: RunOptions,
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    out: Path | None,
    *,
    as_json: bool,
) -> int:
    """Finds five rates, prints the command of a sweep over them, and runs it; the exit code."""
    from loadgen.cli.lazy_verbs import command
    from loadgen.sweep.first_rates import LEAST_S, MOST_S, find_rates
    from loadgen.units import format_duration, write_rate
    from loadgen.workload.presets import PRESETS

    slos = parse.slo_flags(flags.slo, flags.goodput) or [FIRST_SLO]
    input_len, output_len = traffic.input_len or 256, traffic.output_len or 64
    limits = f" ({', '.join(PRESETS[FIRST_SLO])})" if slos == [FIRST_SLO] else ""
    least_s, most_s = 5 * 23.0 + LEAST_S, 5 * 33.0 + MOST_S
    typer.echo(
        f"no traffic given: short runs find the rates, then a sweep over five rates of "
        f"{input_len}-token prompts and {output_len}-token answers, SLO {', '.join(slos)}{limits}: "
        f"about {format_duration(least_s)}, at most {format_duration(most_s)} and the starts of "
        "servers. Ctrl-C keeps the finished runs.",
        err=True,
    )
    console = Console(stderr=True, highlight=False, markup=False)
    try:
        rates = find_rates(target, options, console, input_len=input_len, output_len=output_len)
    except KeyboardInterrupt:
        return INTERRUPTED
    words = [
        *("--target", target, "--input-len", str(input_len), "--output-len", str(output_len)),
        *("--warmup", "3s", "--duration", "20s", "--set", "phases.drain=10s", "--repeats", "1"),
        *(word for slo in slos for word in ("--slo", slo)),
        *("--over", f"rate={','.join(write_rate(rate) for rate in rates)}"),
        *(word for path in flags.plugin or () for word in ("--plugin", str(path))),
        *(("--model", options.model) if options.model else ()),
        *(("--engine", options.engine) if options.engine else ()),
        *(("--out", str(out)) if out is not None else ()),
    ]
    typer.echo(f"running: {shlex.join(['slobench', 'sweep', *words])}", err=True)
    code = command("sweep").main(
        args=[*words, *(["--json"] if as_json else [])],
        prog_name="slobench sweep",
        standalone_mode=False,
    )
    typer.echo(
        "next: slobench capacity with the same --target, lengths and --slo finds the highest rate "
        "that meets the SLO, with its interval",
        err=True,
    )
    return int(code or 0)


def run_scenario(
    scenario: Scenario,
    target: str,
    options: RunOptions,
    exports: Exports = (),
    *,
    as_json: bool = False,
    junit: Path | None = None,
) -> int:
    """Runs, prints the table and the verdict, and returns the exit code."""
    from loadgen.drive.shard_process import PreforkedShard
    from loadgen.run.execute import SIMULATED, execute, local_fleet

    has_processes = target != SIMULATED
    with PreforkedShard(is_enabled=has_processes, forks=True) as preforked:
        open_fleet = partial(local_fleet, preforked=preforked) if has_processes else None
        console = Console(stderr=True, highlight=False, markup=False)
        finished = execute(scenario, target, options, console, open_fleet=open_fleet)
    print_summary(finished.summary, as_json)
    typer.echo(f"report: {finished.directory / 'report.html'}", err=True)
    write_exports(finished.directory, exports)
    if junit is not None:
        from reports.page import write_page
        from reports.run.junit import junit_of_run

        write_page(junit, junit_of_run(finished.summary))
        typer.echo(f"junit: {junit}", err=True)
    return INTERRUPTED if finished.was_interrupted else finished.summary.exit_code


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench preview quickstart")
@with_flags
def preview(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the arrivals and the lengths.")
    ] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the schedule as a table.")] = None,
    json: Json = False,
) -> None:
    """Show a scenario's requests, and how many its SLOs need for a sure verdict. No network."""
    from loadgen.workload.preview import preview as planned_facts
    from loadgen.workload.schedule import make_plan

    scenario = parse.choose_scenario(flags, traffic)
    plan = make_plan(scenario)
    facts = planned_facts(scenario, *plan)
    for note in _trace_notes(scenario):
        typer.echo(f"note: {note}", err=True)
    if html is not None:
        from reports.page import write_page
        from reports.preview.page import render

        classes = scenario.names().classes
        text = render(
            facts, plan.schedule, classes, scenario.to_yaml(), parse.cache_dir(os.environ)
        )
        write_page(html, text)
        typer.echo(f"page: {html}", err=True)
    if parquet is not None:
        from loadgen.drive.store import write_schedule_file

        write_schedule_file(parquet, plan.schedule, scenario.names())
        typer.echo(f"schedule: {parquet}", err=True)
    if json:
        print_json(facts)
        return
    from reports.preview.view import tables

    stdout().print(tables(facts))


def _trace_notes(scenario: Scenario) -> list[str]:
    """Notes of the scenario's traces: rows dropped, reordered or approximated while reading."""
    from loadgen.workload.trace_arrivals import TraceArrivals

    kinds = [scenario.arrivals, *(traffic.arrivals for traffic in scenario.classes.values())]
    replays = [kind for kind in kinds if isinstance(kind, TraceArrivals)]
    return [f"{kind.path}: {note}" for kind in replays for note in kind.notes()]


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench validate scenarios/*.yaml")
def validate(
    scenarios: Annotated[
        list[str] | None, typer.Argument(help="Scenario files or names of shipped scenarios.")
    ] = None,
    set_: Set = None,
    plugin: Plugin = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the format's JSON schema, for editors.")
    ] = False,
) -> None:
    """Check scenarios without running them: every mistake with file, line and key."""
    parse.load_plugins(plugin)
    if schema:
        from loadgen.cli.schema import scenario_schema

        typer.echo(json.dumps(scenario_schema(), indent=2, ensure_ascii=False))
        return
    if not scenarios:
        raise UsageError("no scenario: name one or more files, or add --schema")
    exit_code = 0
    for source in scenarios:
        try:
            content = _validated(source, set_ or [])
        except UsageError as error:
            exit_code = error.exit_code
            for line in str(error).splitlines():
                typer.echo(line if line.startswith(source) else f"{source}: {line}", err=True)
        else:
            typer.echo(f"{source}: ok ({content})")
    raise typer.Exit(exit_code)


def _validated(source: str, settings: Sequence[str]) -> str:
    """The content of a file without mistakes, in words. Raises UsageError."""
    from loadgen.nightly.night import Nightly, NightOptions
    from loadgen.nightly.nightly_file import is_nightly
    from loadgen.run.run_options import RunOptions
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


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench fit trace.csv > scenario.yaml")
def fit(
    trace: Annotated[Path, typer.Argument(help="A recorded trace; see `slobench list traces`.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="A format's name, or '{kind: columns, time: …, input_tokens: …, "
            "output_tokens: …}'.",
        ),
    ] = "auto",
    json: Json = False,
) -> None:
    """Propose a scenario that resembles a recorded trace, and show how close it is."""
    from pydantic import ValidationError

    from loadgen.workload.fit import fit_file
    from loadgen.workload.traces.trace import TRACES
    from loadgen.yaml_document import parse_document
    from reports.preview.view import fit_tables

    document = parse_document(f"format: {format_}", "--format", UsageError)
    try:
        reader = TRACES.build(document.values["format"])
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    except ValueError as error:
        raise UsageError(f"--format: {error}") from None
    text, facts = fit_file(trace, reader)
    if json:
        print_json({"scenario": text, **facts})
        return
    typer.echo(text, nl=False)
    Console(stderr=True, highlight=False, markup=False).print(fit_tables(facts))


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench doctor --rate 20 --input-len 512 --output-len 128",
)
@with_flags
def doctor(
    traffic: TrafficFlags,
    target: Annotated[
        str | None,
        typer.Option(help="Check a server: a URL, a target file, `reference` or `mock`."),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Check our timestamps against a C server that logs its own (needs cc)."
        ),
    ] = False,
    budget: Annotated[str, typer.Option(help="Time for the search or the proof.")] = "60s",
    model: Annotated[
        str, typer.Option(help="With --target: the API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="With --target reference or mock: its settings.")
    ] = "",
    wait_ready: WaitReady = None,
    json: Json = False,
) -> None:
    """Check how much load this machine can measure accurately, whether it can measure the traffic
    of the flags (--rate 20 --output-len 128), or whether a server can be measured."""
    from loadgen.doctor.checkup import (
        check_accuracy,
        check_machine,
        check_server,
        check_traffic,
        longest_lengths,
    )
    from loadgen.run.target import Choice
    from reports.doctor_view import tables

    console = Console(stderr=True, highlight=False, markup=False)
    given = {name for name, value in asdict(traffic).items() if value is not None}
    longest = None
    if given:
        if prove:
            raise UsageError("--prove has rates and lengths of its own: leave the traffic out")
        if target is None and not given & {"rate", "users", "concurrency"}:
            raise UsageError("the traffic has no load: add --rate N or --concurrency N")
        load = {} if target is None else {"rate": "1/s"}
        scenario = parse.choose_scenario(
            ScenarioFlags(), traffic, defaults={**_DOCTOR_TRAFFIC, **load}
        )
        longest = longest_lengths(scenario)
    if target is not None:
        if prove:
            raise UsageError("--prove checks this machine, --target a server: choose one")
        if loads := given - {"input_len", "output_len"}:
            flags = ", ".join(sorted("--" + name.replace("_", "-") for name in loads))
            raise UsageError(
                f"{flags}: with --target, doctor sends single requests and needs only --input-len "
                "and --output-len; without --target it checks that this machine can send the "
                "traffic"
            )
        wait_s = parse.read_wait_s(wait_ready)
        choice = Choice(target, engine, model, dict(os.environ), wait_ready_s=wait_s)
        facts = check_server(choice, console, longest)
    elif model or engine or wait_ready:
        raise UsageError("--model, --engine and --wait-ready need --target")
    elif given:
        budget_s, cc = parse.read_budget_s(budget), os.environ.get("CC", "")
        facts = check_traffic(scenario, budget_s, parse.cache_dir(os.environ), cc)
    else:
        check = check_accuracy if prove else check_machine
        cc = os.environ.get("CC", "")
        facts = check(parse.read_budget_s(budget), parse.cache_dir(os.environ), cc, console)
    if json:
        print_json(facts.to_json())
    else:
        stdout().print(tables(facts.to_json()))
    raise typer.Exit(facts.exit_code)


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench init my-load-test")
def init(
    directory: Annotated[Path, typer.Argument(help="The directory for the files.")] = Path(),
) -> None:
    """Write a scenario, a target, a nightly file and CI workflows; overwrites nothing."""
    from loadgen.cli.starter import write_starter

    for path in write_starter(directory):
        typer.echo(f"wrote {path}")
    change_directory = "" if directory == Path() else f"cd {directory} && "
    typer.echo(
        f"next: {change_directory}slobench run slobench/chat.yaml --target reference", err=True
    )


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench report runs/latest")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    slo: Slo = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --slo: replace the verdict of the run.")
    ] = False,
    confidence: Confidence = None,
    export: Export = None,
    png: Annotated[
        bool, typer.Option("--png", help="Also the whole page as report.png (needs Chromium).")
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also the page as report.pdf (needs Chromium).")
    ] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Also each figure as figures/*.svg.")] = False,
    json: Json = False,
) -> None:
    """Compute the numbers of recorded runs again and rewrite their report.html. To check other
    SLOs without changing the run: slobench rescore."""
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
    if slo is not None and not overwrite:
        for directory in runs:  # before any of them is written
            check_replacement(directory, slo)
    summaries = []
    for directory in runs:
        summary = conclude(
            directory,
            slo,
            parse.read_confidence(confidence),
            parse.cache_dir(os.environ),
            engine_reader(directory),
        )
        summaries.append(summary.to_json())
        if not json:
            print_summary(summary, as_json=False)
        typer.echo(f"report: {directory / 'report.html'}", err=True)
        write_copies(directory / "report.html", browser, png=png, pdf=pdf, svg=svg)
        write_exports(directory, exports, slo)
    if json:  # an object for one run, a list for several
        print_json(summaries[0] if len(summaries) == 1 else summaries)


def write_copies(page: Path, browser: str, *, png: bool, pdf: bool, svg: bool) -> None:
    """A report as a picture, as a PDF, and its figures as SVG files."""
    from loadgen.drive import checksums
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
    "export",
    rich_help_panel=PANEL,
    epilog="Example: slobench export runs/quickstart-* --format csv -o runs.csv",
)
def export_(
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="csv or json (a row per run and class), jsonl or parquet (a row per request), "
            "vllm-bench (the result file of vllm bench serve); or grafana, a dashboard for "
            "--metrics-port, which needs no run.",
        ),
    ],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories; they share one table.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file. Default: standard output.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="runs or requests, where not the format's own choice.")
    ] = None,
) -> None:
    """Write recorded runs in a format for spreadsheets, notebooks or existing dashboards."""
    from loadgen.drive.store import read_run
    from loadgen.exports.formats import check_format, export, export_path

    if format_ == "grafana":
        _export_dashboard(runs or [], output)
        return
    check_format(format_, rows)
    if output is None and format_ == "parquet" and sys.stdout.isatty():
        raise UsageError("parquet is binary: name a file with -o, e.g. -o runs.parquet")
    once = {directory.resolve(): directory for directory in runs or []}  # runs/* has runs/latest
    content = export([read_run(directory) for directory in once.values()], format_, output, rows)
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
    from loadgen.drive.store import read_run
    from loadgen.exports.formats import export, export_path

    recorded = read_run(directory)
    for format_, path in exports:
        destination = export_path(format_, directory if path is None else path)
        export(recorded, format_, destination, slo=slo)
        typer.echo(f"export: {destination}", err=True)


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench verify runs/latest")
def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run directories, nights, baselines, or folders of them."
        ),
    ],
    json: Json = False,
) -> None:
    """Compare recorded files with their checksums and with each other; changes nothing. Exit code 0
    if all are intact, 3 if any is damaged, unfinished, or of a version without checksums."""
    from loadgen.nightly.verify import exit_code
    from loadgen.nightly.verify import verify as verified

    results = [result for path in paths for result in verified(path)]
    for result in () if json else results:
        typer.echo(f"{result.state:<10}  {result.path} ({result.kind}, {result.n_files} files)")
        for problem in result.problems:
            typer.echo(f"            {problem}")
    if json:
        print_json([result.to_json() for result in results])
    raise typer.Exit(exit_code(results))
