"""Flags of the verbs that measure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import measure_command as command
from loadgen.cli.export_command import export as export_runs
from loadgen.cli.export_command import read_exports
from loadgen.cli.flags import (
    Concurrency,
    Confidence,
    Duration,
    Export,
    Goodput,
    InputLen,
    Json,
    MetricsHost,
    MetricsPort,
    Otlp,
    OutputLen,
    Plugin,
    Rate,
    Scenario,
    Seed,
    Set,
    Slo,
    Warmup,
)
from loadgen.cli.parse import choose_scenario, read_watch, slo_flags

PANEL = "Measure"
verbs = typer.Typer()


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench run scenarios/quickstart.yaml --target reference",
)
def run(
    scenario: Scenario = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="A URL, a target file, `reference` (the bundled engine), `sim` (the same in "
            "virtual time) or `mock`. "
            "Default: the environment's OPENAI_BASE_URL."
        ),
    ] = None,
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    goodput: Goodput = None,
    seed: Seed = None,
    set_: Set = None,
    model: Annotated[
        str, typer.Option(help="The API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            help="Settings of `reference`, `sim` or `mock`, e.g. mode=chunked,shape=tiny."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<scenario>-<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    workers: Annotated[
        str, typer.Option(help="Load-generating processes, or auto: by the asked token rate.")
    ] = "auto",
    transport: Annotated[
        str, typer.Option(help="fast, or aiohttp: plain, slower, to check the fast one by.")
    ] = "fast",
    confidence: Confidence = None,
    plugin: Plugin = None,
    print_scenario: Annotated[
        bool, typer.Option("--print-scenario", help="Print the scenario as YAML and stop.")
    ] = False,
    print_launch: Annotated[
        bool,
        typer.Option("--print-launch", help="Print the target file's server command and stop."),
    ] = False,
    scrape: Annotated[
        bool, typer.Option("--scrape/--no-scrape", help="Read the server's own metrics at 1 Hz.")
    ] = True,
    export: Export = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    otlp: Otlp = None,
    json: Json = False,
) -> None:
    """Fire a scenario at a target, measure every token, and say whether the promise was kept."""
    if print_launch:
        command.print_launch(target)
        return
    chosen = choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, seed=seed,
        slo=slo_flags(slo, goodput),
    )  # fmt: skip
    if print_scenario:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    exit_code = command.run(
        chosen, target, model, engine, out, force, workers, transport, confidence, plugin or [],
        json, scrape, read_exports(export or []),
        read_watch(metrics_port, metrics_host, otlp, os.environ),
    )  # fmt: skip
    raise typer.Exit(exit_code)


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench preview quickstart")
def preview(
    scenario: Scenario = None,
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    plugin: Plugin = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the arrivals and the lengths.")
    ] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the schedule as a table.")] = None,
    json: Json = False,
) -> None:
    """Show what a scenario would send, and what its promises need to be proven. No network."""
    chosen = choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, slo=slo, seed=seed,
    )  # fmt: skip
    command.preview(chosen, json, html, parquet)


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench validate scenarios/*.yaml")
def validate(
    scenarios: Annotated[
        list[str] | None, typer.Argument(help="Scenario files or names of shipped ones.")
    ] = None,
    set_: Set = None,
    plugin: Plugin = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the format's JSON schema, for editors.")
    ] = False,
) -> None:
    """Check scenarios without running them: every mistake with file, line and key."""
    if schema:
        command.schema(plugin or [])
        return
    raise typer.Exit(command.validate(scenarios or [], set_ or [], plugin or []))


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
    """Propose a scenario that looks like a recorded trace, and show how well it does."""
    command.fit(trace, format_, json)


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench doctor --target http://localhost:8000",
)
def doctor(
    target: Annotated[
        str | None,
        typer.Option(help="Examine a server: a URL, a target file, `reference` or `mock`."),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Hold our numbers against a truth server in C (needs cc)."),
    ] = False,
    budget: Annotated[str, typer.Option(help="Time for the search or the proof.")] = "60s",
    model: Annotated[
        str, typer.Option(help="With --target: the API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="With --target reference or mock: its settings.")
    ] = "",
    json: Json = False,
) -> None:
    """Tell how much load this machine can measure truly, or whether a server is fit for it."""
    raise typer.Exit(command.doctor(target, prove, budget, model, engine, json))


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench init my-load-test")
def init(
    directory: Annotated[Path, typer.Argument(help="Where the files go.")] = Path(),
) -> None:
    """Write a scenario, a target, a nightly file and CI workflows; overwrites nothing."""
    command.init(directory)


@verbs.command(rich_help_panel=PANEL, epilog="Example: slobench report runs/latest")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    slo: Slo = None,
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
    """Compute the numbers of recorded runs again and write their report.html anew."""
    copies = [name for name, asked in (("png", png), ("pdf", pdf), ("svg", svg)) if asked]
    command.report(runs, slo, confidence, json, read_exports(export or []), copies)


@verbs.command(
    "export",
    rich_help_panel=PANEL,
    epilog="Example: slobench export runs/* --format csv -o runs.csv",
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
    export_runs(runs or [], format_, rows, output)
