"""Flags of `slobench sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.flags import (
    Concurrency,
    Duration,
    InputLen,
    Json,
    MetricsHost,
    MetricsPort,
    Otlp,
    OutputLen,
    Plugin,
    Rate,
    Seed,
    Set,
    Slo,
    Warmup,
)
from loadgen.cli.parse import watch_flags
from loadgen.cli.sweep_command import sweep as run_sweep

PANEL = "Decide"
verbs = typer.Typer()


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench sweep quickstart --target sim --over rate=2/s,4/s,8/s "
    "--over engine.mode=chunked,static",
)
def sweep(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario, or a sweep file (one that says `over:`).")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What varies: a scenario key, engine.…, target, or a key of a target file such "
            "as launch.args; values with commas, or from:to:step; repeatable.",
        ),
    ] = None,
    grid: Annotated[
        bool | None,
        typer.Option("--grid/--zip", help="All combinations, or the k-th values together."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A URL, a target file, `reference`, `sim` or `mock`."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Settings of `reference`, `sim` or `mock` in every cell.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The API's model field.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each cell, with seeds of their own. Default: 3.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="The latency to trade off. Default: 'p99(ttft)'.")
    ] = None,
    throughput: Annotated[
        str | None,
        typer.Option(help="The throughput, per GPU. Default: output_tokens_per_s; or goodput, …"),
    ] = None,
    along: Annotated[
        str | None, typer.Option(help="The swept key that lines follow. Default: the load.")
    ] = None,
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the results go; what is there already is not run again."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the sweep in this directory.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show cells, order and duration; run nothing.")
    ] = False,
    drain: Annotated[
        str | None,
        typer.Option(help="What a server gets to finish before the next cell. Default: 30s."),
    ] = None,
    reset_cache: Annotated[
        bool | None,
        typer.Option("--reset-cache/--keep-cache", help="Empty its prefix cache before each run."),
    ] = None,
    order_seed: Annotated[
        int | None, typer.Option(help="Another seed runs the cells in another order.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Of the intervals. Default: 0.95.")
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(help="`missed`: exit code 1 for a missed promise; `no_verdict`: also 3."),
    ] = None,
    workers: Annotated[str, typer.Option(help="Load-generating processes, or auto.")] = "auto",
    plugin: Plugin = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    otlp: Otlp = None,
    json: Json = False,
) -> None:
    """Run many cells in turns and show which trade latency for throughput best."""
    asked_keys = {
        "target": target, "engine": engine, "model": model, "repeats": repeats, "metric": metric,
        "throughput": throughput, "along": along, "drain": drain, "reset_cache": reset_cache,
        "order_seed": order_seed, "confidence": confidence,
        "how": None if grid is None else "grid" if grid else "zip",
    }  # fmt: skip
    scenario_flags = {
        "rate": rate, "input_len": input_len, "output_len": output_len, "duration": duration,
        "warmup": warmup, "max_concurrency": max_concurrency, "slo": slo, "seed": seed,
    }  # fmt: skip
    exit_code = run_sweep(
        scenario, over or [], asked_keys, scenario_flags, set_ or [], out, resume, dry_run,
        fail_on, workers, plugin or [], watch_flags(metrics_port, metrics_host, otlp), json,
    )  # fmt: skip
    raise typer.Exit(exit_code)
