"""The verbs of the panel Measure that need no recorded run: run, preview, validate, fit, init."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import (
    CaCert,
    Canary,
    Clear,
    Confidence,
    Engine,
    Export,
    Force,
    Full,
    Json,
    MinRequests,
    Model,
    Plugin,
    ReusePreflight,
    RunDirectory,
    ScenarioFlags,
    Set,
    Target,
    TrafficFlags,
    WaitReady,
    WatchFlags,
    Workers,
    with_flags,
)
from loadgen.cli.recorded import Exports, read_exports, write_exports
from loadgen.cli.terminal import print_json, print_summary, stdout
from loadgen.errors import UsageError
from loadgen.workload.traffic_flags import LENGTHS

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary
    from loadgen.run.run_options import RunOptions
    from loadgen.workload.scenario import Scenario

verbs = typer.Typer()


@verbs.command(
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
    ca_cert: CaCert = None,
    out: RunDirectory = None,
    force: Force = False,
    workers: Workers = "auto",
    transport: Annotated[
        str, typer.Option(help="fast, or aiohttp: slower, to check the fast transport against.")
    ] = "fast",
    confidence: Confidence = None,
    clear: Clear = False,
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
    canary: Canary = None,
    scrape: Annotated[
        bool, typer.Option("--scrape/--no-scrape", help="Read the server's own metrics at 1 Hz.")
    ] = True,
    export: Export = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            help="Write the verdict as JUnit XML, a test case per SLO; also after an error."
        ),
    ] = None,
    full: Full = False,
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
    if flags.states_no_traffic(traffic) and target is not None and not print_scenario:
        given = {"model": model, "engine": engine, "workers": workers, "wait-ready": wait_ready}
        words = {**given, "ca-cert": ca_cert, "out": out}
        raise typer.Exit(_first_look(target, flags, traffic, words, as_json=json))
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
        target_settings=parse.target_settings(ca_cert),
        confidence=parse.read_confidence(confidence),
        clear=clear,
        min_requests=min_requests or 0,
        scrape=scrape,
        watch=parse.read_watch(watch, os.environ),
        wait_ready_s=parse.read_wait_s(wait_ready),
        reuse_preflight_s=parse.read_reuse_s(reuse_preflight),
        canary=parse.read_canary(canary),
    )
    raise typer.Exit(
        run_scenario(
            scenario,
            parse.read_target(target),
            options,
            exports,
            as_json=json,
            is_full=full,
            junit=junit,
        )
    )


def _first_look(
    target: str,
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    given: Mapping[str, object],
    *,
    as_json: bool,
) -> int:
    """Sweeps five rates that the sweep itself finds; the exit code. `given` holds further flags of
    the sweep."""
    from loadgen.cli.lazy_verbs import command

    values = {
        "target": target,
        **{name.replace("_", "-"): getattr(traffic, name) for name in LENGTHS},
        **given,
    }
    words = [word for name, value in values.items() if value for word in (f"--{name}", str(value))]
    for name, several in (("slo", flags.slo), ("goodput", flags.goodput), ("plugin", flags.plugin)):
        words += [word for value in several or () for word in (f"--{name}", str(value))]
    words += ["--json"] if as_json else []
    code = command("sweep").main(args=words, prog_name="slobench sweep", standalone_mode=False)
    return int(code or 0)


def run_scenario(
    scenario: Scenario,
    target: str,
    options: RunOptions,
    exports: Exports = (),
    *,
    as_json: bool = False,
    is_full: bool = False,
    junit: Path | None = None,
) -> int:
    """Runs, prints the ending before the page is made, and returns the exit code."""
    from loadgen.drive.shard_process import PreforkedShard
    from loadgen.run.execute import SIMULATED, execute, local_fleet

    def print_result(summary: Summary, directory: Path) -> None:
        print_summary(summary, as_json, is_full=is_full, directory=directory)
        sys.stdout.flush()

    has_processes = target != SIMULATED
    with PreforkedShard(is_enabled=has_processes, forks=True) as preforked:
        open_fleet = partial(local_fleet, preforked=preforked) if has_processes else None
        console = Console(stderr=True, highlight=False, markup=False)
        finished = execute(
            scenario, target, options, console, open_fleet=open_fleet, on_summary=print_result
        )
    typer.echo(f"report: {finished.directory / 'report.html'}", err=True)
    write_exports(finished.directory, exports)
    if junit is not None:
        from reports.page import write_page
        from reports.run.junit import junit_of_run

        junit.parent.mkdir(parents=True, exist_ok=True)
        write_page(junit, junit_of_run(finished.summary))
        typer.echo(f"junit: {junit}", err=True)
    return INTERRUPTED if finished.was_interrupted else finished.summary.exit_code


@verbs.command(epilog="Example: slobench preview quickstart")
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
    from loadgen.workload.planned_counts import missing_percentiles
    from loadgen.workload.preview import preview as planned_facts
    from loadgen.workload.schedule import make_plan

    scenario = parse.choose_scenario(flags, traffic)
    plan = make_plan(scenario)
    facts = planned_facts(scenario, *plan)
    for note in (*missing_percentiles(scenario, plan.schedule), *scenario.notes()):
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
        from loadgen.archive.store import write_schedule_file

        write_schedule_file(parquet, plan.schedule, scenario.names())
        typer.echo(f"schedule: {parquet}", err=True)
    if json:
        print_json(facts)
        return
    from reports.preview.view import tables

    stdout().print(tables(facts))


@verbs.command(epilog="Example: slobench validate scenarios/*.yaml")
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
    from loadgen.cli.study_files import check_file
    from loadgen.workload.scenario import load_scenario
    from loadgen.workload.schedule import make_schedule

    content = check_file(Path(source))
    if content is None:
        return f"{len(make_schedule(load_scenario(source, settings)))} requests"
    if settings:
        raise UsageError(f"{source}: --set changes a scenario, and this is a nightly file")
    return content


@verbs.command(epilog="Example: slobench fit trace.csv > scenario.yaml")
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


@verbs.command(epilog="Example: slobench init my-load-test --target http://host:8000")
def init(
    directory: Annotated[Path, typer.Argument(help="The directory for the files.")] = Path(),
    target: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The server that the files measure: its address, or an endpoint as pasted. "
            "Default: the bundled engine.",
        ),
    ] = None,
    install: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="What the CI workflows install: git+https://HOST/OWNER/REPOSITORY@COMMIT, or a "
            "wheel. Default: where this slobench is from, if that is one of the two.",
        ),
    ] = None,
) -> None:
    """Write a scenario, a target, a nightly file and CI workflows; overwrites nothing."""
    from loadgen.cli.starter import own_source, pinned, write_starter

    source = own_source() if install is None else pinned(install)
    for path in write_starter(directory, source, target or ""):
        typer.echo(f"wrote {path}")
    if not source:
        typer.echo(
            "note: the CI workflows install $SLOBENCH: set that repository variable to a wheel or "
            "to git+https://HOST/OWNER/REPOSITORY@COMMIT, or write it with --install",
            err=True,
        )
    change_directory = "" if directory == Path() else f"cd {directory} && "
    measured = "reference" if target is None else "slobench/target.yaml"
    typer.echo(
        f"next: {change_directory}slobench run slobench/chat.yaml --target {measured}", err=True
    )
