"""Flags of the verbs that decide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import capacity_command as capacity_command
from loadgen.cli import decide_command as command
from loadgen.cli.flags import (
    Confidence,
    Goodput,
    Json,
    MetricsHost,
    MetricsPort,
    Otlp,
    Plugin,
    Scenario,
    Seed,
    Set,
    Slo,
)
from loadgen.cli.parse import choose_scenario, slo_flags, watch_flags

PANEL = "Decide"
verbs = typer.Typer()


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench rescore runs/latest --slo 'ttft<=300ms' --definition all",
)
def rescore(
    run: Annotated[Path, typer.Argument(help="A run directory; its files stay as they are.")],
    slo: Slo = None,
    goodput: Goodput = None,
    definition: Annotated[
        list[str] | None,
        typer.Option(help="vllm, guidellm, aiperf, inference-perf, mlperf or all; repeatable."),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Another measured window: 30s:90s, or steady (MSER-5).")
    ] = None,
    confidence: Confidence = None,
    json: Json = False,
) -> None:
    """Judge a recorded run by other promises, another window or another tool's definitions."""
    judged_by = slo_flags(slo, goodput)
    raise typer.Exit(command.rescore(run, judged_by, definition or [], window, confidence, json))


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench compare runs/before runs/after --html comparison.html",
)
def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B",
            help="Two sides: each a run, runs separated by commas, or a folder of runs.",
        ),
    ],
    aa: Annotated[
        bool, typer.Option("--aa", help="All runs are equal: measure what they differ by.")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(help="Exit code 1 for worse; 3 for `inconclusive` (or invalid), `invalid`."),
    ] = "worse",
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A measure that decides, e.g. 'p99(ttft)'; repeatable."),
    ] = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(help="What difference is none: 5% or 'p99(ttft)=10%'; repeatable."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of intervals and verdicts.")] = 0.95,
    effect: Annotated[
        str | None, typer.Option(help="Plan the runs needed for a change this large, e.g. 5%.")
    ] = None,
    noise: Annotated[
        Path | None, typer.Option(help="What `compare --aa RUNS --json` wrote before.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key that may differ although it must agree, e.g. gpu; repeatable."),
    ] = None,
    within_run: Annotated[
        bool, typer.Option("--within-run", help="Take two single runs as all there is.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the distributions.")] = None,
    json: Json = False,
) -> None:
    """Say whether B is better, worse or the same as A, and how sure that is."""
    raise typer.Exit(
        command.compare(
            sides, aa, fail_on, metric or [], margin or [], confidence, effect, noise,
            vary or [], within_run, html, json,
        )
    )  # fmt: skip


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench nightly nightly.yaml --out runs/tonight",
)
def nightly(
    file: Annotated[Path, typer.Argument(help="A nightly file; `slobench init` writes one.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the night goes; one that was interrupted goes on from there. "
            "Default: runs/nightly-<time>."
        ),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Where earlier nights are kept. Default: as the file says.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Settings of `reference`, `sim` or `mock` under test tonight, e.g. "
            "step_delay=10%; the baseline and a control stay the same."
        ),
    ] = "",
    repeats: Annotated[
        int | None, typer.Option(min=2, max=100, help="Runs of each cell, instead of the file's.")
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Exit code 1 for worse; 3 for `inconclusive` (or invalid), `invalid`. "
            "Default: as the file says, or `worse`."
        ),
    ] = None,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Measure nothing: take the last better or worse nights as the level."
        ),
    ] = False,
    plugin: Plugin = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    otlp: Otlp = None,
    json: Json = False,
) -> None:
    """Measure what is measured every night, and say what changed since the nights before."""
    from loadgen.cli import nightly_command as command

    raise typer.Exit(
        command.nightly(
            file, out, baseline, engine, repeats, fail_on, accept, plugin or [],
            watch_flags(metrics_port, metrics_host, otlp), json,
        )
    )  # fmt: skip


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench capacity capacity_search --target sim --attainment 90%",
)
def capacity(
    scenario: Scenario = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="A URL, a target file, `reference`, `sim` (virtual time) or `mock`. Default: the "
            "environment's OPENAI_BASE_URL."
        ),
    ] = None,
    slo: Slo = None,
    goodput: Goodput = None,
    attainment: Annotated[
        str | None,
        typer.Option(
            help="The share that must keep the promises. Default: the scenario's, or 99%."
        ),
    ] = None,
    over: Annotated[
        str, typer.Option(help="What is searched: rate, or concurrency (users of a closed loop).")
    ] = "rate",
    between: Annotated[
        str | None, typer.Option(help="Bounds of the search, 1/s:40/s or 1:64. Default: found.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time for all probes, e.g. 10m: the best answer by then.")
    ] = None,
    confidence: Annotated[str, typer.Option(help="Of the answer's interval.")] = "95%",
    precision: Annotated[
        str, typer.Option(help="Enough when half the interval is this share of the answer.")
    ] = "5%",
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the search. Default: runs/capacity-<scenario>-<time>."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the search in --out.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="The API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="Settings of `reference`, `sim` or `mock`, e.g. mode=chunked.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Load-generating processes, or auto.")] = "auto",
    seed: Seed = None,
    set_: Set = None,
    plugin: Plugin = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    otlp: Otlp = None,
    json: Json = False,
) -> None:
    """Find the highest load at which the promises are kept, with an interval."""
    chosen = choose_scenario(
        scenario, set_ or [], plugin or [], slo=slo_flags(slo, goodput), seed=seed
    )
    raise typer.Exit(
        capacity_command.capacity(
            chosen, target, attainment, over, between, budget, confidence, precision, out,
            resume, model, engine, workers, plugin or [],
            watch_flags(metrics_port, metrics_host, otlp), json,
        )
    )  # fmt: skip
