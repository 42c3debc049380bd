"""The verbs of the panel Decide: rescore, compare, nightly, capacity, size."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import (
    Confidence,
    Engine,
    FailOn,
    Goodput,
    Json,
    MinRequests,
    Model,
    Plugin,
    ScenarioChanges,
    ScenarioFlags,
    Slo,
    Target,
    TrafficFlags,
    WaitReady,
    WatchFlags,
    Workers,
    with_flags,
)
from loadgen.cli.terminal import print_json, print_summary, stdout
from loadgen.errors import TargetError, UsageError, nearest
from loadgen.units import format_duration, parse_rate_per_s

if TYPE_CHECKING:
    from loadgen.cells.cell import Cell
    from loadgen.nightly.night import FinishedNight
    from loadgen.run.run_options import RunOptions
    from loadgen.workload.scaling import Over
    from loadgen.workload.scenario import Scenario

PANEL = "Decide"
verbs = typer.Typer()
_WINDOW = {"duration": "20s"}
_FIRST_PROBE: Mapping[Over, Mapping[str, object]] = {
    "rate": {"rate": "2/s", **_WINDOW},
    "concurrency": {"concurrency": 1, **_WINDOW},
}
"""Load and window of the first capacity probe where the flags do not state them; the search finds
its own from there."""


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
    min_requests: MinRequests = None,
    json: Json = False,
) -> None:
    """Check a recorded run against another SLO, window, or another tool's definitions."""
    from loadgen.drive.store import read_run
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
    recorded = read_run(run)
    if window is not None:
        recorded = with_window(recorded, window)
    slos = parse.slo_flags(slo, goodput)
    level = parse.read_confidence(confidence)
    summary = summarize(recorded, slos, level, min_requests)
    names = DEFINITIONS if "all" in definitions else dict.fromkeys(["slobench", *definitions])
    rows = defined_values(recorded, tuple(names)) if definitions else []
    if json:
        print_json({**summary.to_json(), "definitions": plain_json([asdict(row) for row in rows])})
    else:
        print_summary(summary, as_json=False)
        if rows:
            stdout().print(definitions_table(rows))
    raise typer.Exit(summary.exit_code)


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench compare quickstart --target sim --target sim --engine mode=chunked "
    "--engine mode=static",
)
@with_flags
def compare(
    changes: ScenarioChanges,
    traffic: TrafficFlags,
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B",
            help="Two sides: each a run, runs separated by commas, or a folder of runs. With "
            "--target: the scenario.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure first: the target of A, then that of B (a URL, a target file, "
            "`reference`, `sim` or `mock`), in turns with the same requests."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="With --target: runs of each side.")
    ] = 3,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="With --target: engine settings of both sides, or of A and then of B."),
    ] = None,
    model: Model = "",
    workers: Workers = "auto",
    wait_ready: WaitReady = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --target: directory of the runs; finished runs in it are not repeated. "
            "Default: runs/compare-<scenario>-<time>."
        ),
    ] = None,
    aa: Annotated[
        bool, typer.Option("--aa", help="All runs are equal: measure how much they differ.")
    ] = False,
    fail_on: FailOn = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A measure that decides, e.g. 'p99(ttft)'; repeatable."),
    ] = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(
            help="Largest difference that counts as \"same\": 5% or 'p99(ttft)=10%'; repeatable."
        ),
    ] = None,
    confidence: Annotated[str, typer.Option(help="Of intervals and verdicts.")] = "95%",
    effect: Annotated[
        str | None, typer.Option(help="Plan the runs needed for a change this large, e.g. 5%.")
    ] = None,
    noise: Annotated[
        Path | None, typer.Option(help="The output of `compare --aa RUNS --json`.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key that may differ although it must agree, e.g. gpu; repeatable."),
    ] = None,
    within_run: Annotated[
        bool,
        typer.Option(
            "--within-run",
            help="Compare two single runs without allowing for run-to-run variation.",
        ),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the distributions.")] = None,
    json: Json = False,
) -> None:
    """Show whether B is better, worse or the same as A, and how sure that is: two sides of recorded
    runs, or two targets that are measured first."""
    from loadgen.cli.sides import read_margins, read_noise, read_side
    from loadgen.measure.comparison.compare import judge_sides
    from loadgen.measure.comparison.judgement import Options, exit_code
    from loadgen.measure.comparison.measures import measure
    from reports.compare.view import table

    sides = sides or []
    fail_on = _fail_on(fail_on) or "worse"
    size = None if effect is None else parse.read_share("--effect", effect)
    level = parse.read_confidence(confidence) or 0.95
    if aa:
        _print_noise(sides, metric or [], 0.05 if size is None else size, level, json)
        return
    if target is None and len(sides) != 2:
        raise UsageError(
            "expected two sides A and B, each a run, runs separated by commas, or a folder of "
            f"runs; got {len(sides)}. For equal runs: --aa. To measure two targets first: "
            "--target A --target B"
        )
    options = Options(
        metrics=metric or [],
        margins=read_margins(margin or []),
        confidence=level,
        effect=size,
        noise=read_noise(noise) if noise else {},
        vary=vary or [],
        within_run=within_run,
    )
    for text in options.metrics:  # before any run is read
        measure(text)
    if target is not None:
        scenario = _scenario_of_sides(sides, changes, traffic)
        options_of_runs = parse.base_options(
            changes.plugin,
            n_workers=parse.read_workers(workers),
            model=model,
            wait_ready_s=parse.read_wait_s(wait_ready),
        )
        cells = _cells_of_sides(scenario, target, engine or [], options_of_runs)
        directory = out or Path("runs") / f"compare-{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}"
        sides = _measured_sides(cells, directory, repeats)
        html = html or directory / "compare.html"
    a, b = (read_side(side) for side in sides)
    comparison = judge_sides(a, b, options)
    if html is not None:
        from reports.compare.page import render
        from reports.page import write_page

        write_page(html, render(comparison, a, b, options, parse.cache_dir(os.environ)))
        typer.echo(f"page: {html}", err=True)
    if json:
        print_json(comparison.to_json())
    else:
        stdout().print(table(comparison))
    code, verdict = exit_code(comparison.verdict, fail_on), comparison.verdict
    if code == 0 and verdict in ("inconclusive", "invalid") and "GITHUB_ACTIONS" in os.environ:
        typer.echo(f"::warning::slobench compare: {verdict}", err=True)
    raise typer.Exit(code)


def _scenario_of_sides(
    sources: Sequence[str], changes: ScenarioChanges, traffic: TrafficFlags
) -> Scenario:
    """The scenario that both targets receive."""
    if len(sources) > 1:
        raise UsageError(
            f"--target measures first: name one scenario, or none, not {len(sources)} runs"
        )
    flags = {field.name: getattr(changes, field.name) for field in fields(changes)}
    scenario = sources[0] if sources else None
    return parse.choose_scenario(ScenarioFlags(scenario=scenario, **flags), traffic)


def _cells_of_sides(
    scenario: Scenario, targets: Sequence[str], engines: Sequence[str], options: RunOptions
) -> list[Cell]:
    """Side A and side B."""
    from loadgen.cells.cell import Cell

    if len(targets) != 2:
        raise UsageError(
            f"--target: expected two, that of A and that of B, got {len(targets)}; for one "
            "target: slobench run"
        )
    if len(engines) > 2:
        raise UsageError(f"--engine: expected one for both sides or two, got {len(engines)}")
    settings = [*engines, *engines][:2] if engines else ["", ""]
    return [
        Cell(name, scenario, target, replace(options, engine=engine))
        for name, target, engine in zip(("A", "B"), targets, settings, strict=True)
    ]


def _measured_sides(cells: Sequence[Cell], directory: Path, repeats: int) -> list[str]:
    """Measures two cells in turns; the directories of their runs. Raises TargetError for a side
    without any run."""
    from loadgen.cells.order import run_cells
    from loadgen.cells.runner import CellFailure

    console = Console(stderr=True, highlight=False, markup=False)
    seconds = 2 * repeats * cells[0].scenario.horizon_s
    runs = "1 run" if repeats == 1 else f"{repeats} runs"
    typer.echo(
        f"measuring A and B in turns, {runs} each: {format_duration(seconds)} of traffic, and the "
        f"drains; Ctrl-C keeps the finished runs in {directory}",
        err=True,
    )
    failed: dict[str, str] = {}
    measured: set[str] = set()
    try:
        for result in run_cells(cells, directory, repeats=repeats, console=console):
            if isinstance(result, CellFailure):
                failed[result.cell.name] = result.reason
            else:
                measured.add(result.cell.name)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted: the same command with --out {directory} measures the missing runs",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    for cell in cells:
        if cell.name not in measured:
            raise TargetError(f"{cell.name} ({cell.target}): no run: {failed[cell.name]}")
    return [str(directory / cell.name) for cell in cells]


def _fail_on(verdict: str | None) -> str | None:
    from loadgen.measure.comparison.judgement import FAIL_ON

    if verdict is not None and verdict not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{verdict}'; {nearest(verdict, FAIL_ON)}")
    return verdict


def _print_noise(
    sides: Sequence[str], metrics: Sequence[str], effect: float, confidence: float, as_json: bool
) -> None:
    """Prints by how much equal runs differ, as a table or as `--noise` reads it."""
    from loadgen.cli.sides import noise_json, read_side
    from loadgen.measure.comparison.compare import GATED, noise_of_sides
    from loadgen.measure.comparison.measures import measure
    from reports.compare.view import noise_rows, noise_table

    runs = [run for side in sides for run in read_side(side)]
    if not runs:
        raise UsageError("--aa: no run: name three or more equal runs")
    noise = noise_of_sides(runs, metrics)
    units = {text: measure(text).metric.unit for text in noise}
    alpha = 2 * (1 - confidence) / max(1, len(metrics or GATED))  # of a two-sided test
    rows = noise_rows(noise, units, effect, alpha)
    if as_json:
        print_json({**noise_json(runs, noise), "effect": effect, "planning": rows})
    else:
        stdout().print(noise_table(rows, effect))


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench nightly nightly.yaml --out runs/tonight",
)
@with_flags
def nightly(
    watch: WatchFlags,
    file: Annotated[Path, typer.Argument(help="A nightly file; `slobench init` writes one.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The night's directory; a night that was interrupted continues there. "
            "Default: runs/nightly-<time>."
        ),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Directory of earlier nights. Default: as the file says.")
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
    fail_on: FailOn = None,
    wait_ready: WaitReady = None,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Measure nothing: the last better or worse nights are the new level."
        ),
    ] = False,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Measure the same cells every night, and show changes since the nights before."""
    from loadgen.nightly.night import Nightly, NightOptions
    from loadgen.run.directory import reserved

    fail_on = _fail_on(fail_on)
    parse.load_plugins(plugin)
    environ = dict(os.environ)
    options = NightOptions(
        baseline,
        engine,
        repeats,
        fail_on or "",
        job_link(environ),
        parse.base_options(plugin, wait_ready_s=parse.read_wait_s(wait_ready)),
    )
    spec, now = Nightly(file, options), datetime.now().astimezone()
    if accept:
        _print_accepted(spec.accept(now), json)
        return
    directory = out or reserved(Path("runs") / f"nightly-{now:%Y%m%d-%H%M%S}")
    try:
        # Without the targets of controls: a control is simulated where its cell is.
        with parse.shared_watch(watch, [cell.cell.target for cell in spec.cells]) as each:
            night = spec.run(
                Console(stderr=True, highlight=False, markup=False), now, directory, each
            )
    except KeyboardInterrupt:
        typer.echo(
            "interrupted: there is no verdict; the measured runs are kept. Continue with: slobench "
            f"nightly {file} --out {directory}",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if out is None:  # nothing was measured
            with contextlib.suppress(OSError):
                directory.rmdir()
    _write_github_summary(night, environ)
    if json:
        print_json(night.facts)
    else:
        from reports.nightly.view import tables

        stdout().print(tables(night.verdict, night.cells, night.facts))
    typer.echo(f"report: {night.directory / 'index.html'}", err=True)
    raise typer.Exit(night.exit_code)


def job_link(environ: Mapping[str, str]) -> str:
    """The address of the GitHub job that runs this process; "" elsewhere."""
    keys = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run_id = (environ.get(key, "") for key in keys)
    return f"{server}/{repository}/actions/runs/{run_id}" if server and run_id else ""


def _print_accepted(accepted: Mapping[str, Sequence[str]], as_json: bool) -> None:
    if as_json:
        print_json({"schema": 1, "kind": "accepted", "cells": accepted})
        return
    for cell, nights in accepted.items():
        result = f"a new level, from night {nights[0]} on" if nights else "nothing to accept"
        typer.echo(f"{cell}: {result}")


def _write_github_summary(night: FinishedNight, environ: Mapping[str, str]) -> None:
    """The summary and the annotations, in the places that GitHub Actions reads."""
    from reports.nightly.view import github_lines

    if path := environ.get("GITHUB_STEP_SUMMARY"):
        summary = night.directory / "summary.md"
        text = summary.read_text(encoding="utf-8")
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # the verdict does not depend on it
            typer.echo(
                f"slobench: GITHUB_STEP_SUMMARY: {path}: {error.strerror}; the summary is in "
                f"{summary}",
                err=True,
            )
    if "GITHUB_ACTIONS" in environ:
        for line in github_lines(night.cells):
            typer.echo(line, err=True)


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench capacity capacity_search --target sim --attainment 90%",
)
@with_flags
def capacity(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    watch: WatchFlags,
    target: Target = None,
    attainment: Annotated[
        str | None,
        typer.Option(
            help="The share of requests that must meet the SLO. Default: the scenario's, or 99%."
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="The load that varies: rate, or concurrency (closed-loop users). Default: rate; "
            "concurrency with --users or --concurrency."
        ),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(help="Bounds of the search, 1/s:40/s or 1:64. Default: found by the search."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Time for all probes, e.g. 10m; the search prints its best estimate."),
    ] = None,
    confidence: Annotated[str, typer.Option(help="Of the interval of the capacity.")] = "95%",
    precision: Annotated[
        str, typer.Option(help="The search ends when half the interval is this share of the value.")
    ] = "5%",
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the search. Default: runs/capacity-<scenario>-<time>."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the search in --out.")] = False,
    model: Model = "",
    engine: Engine = "",
    workers: Workers = "auto",
    wait_ready: WaitReady = None,
    json: Json = False,
) -> None:
    """Find the highest load that meets the SLO, with a confidence interval."""
    from loadgen.capacity.capacity_files import default_directory
    from loadgen.capacity.capacity_spec import CapacitySpec
    from loadgen.capacity.search import search
    from reports.capacity.view import table

    loads: tuple[Over, Over] = ("rate", "concurrency")
    is_closed = traffic.users is not None or traffic.concurrency is not None
    load = parse.read_choice("--over", over or loads[is_closed], loads)
    scenario = parse.choose_scenario(flags, traffic, defaults=_FIRST_PROBE[load])
    share = None if attainment is None else parse.read_share("--attainment", attainment)
    scenario, share = parse.with_limits(scenario, share)
    target = parse.read_target(target)
    if resume and out is None:
        raise UsageError("--resume: no search: name its directory with --out")
    options = parse.base_options(
        flags.plugin,
        n_workers=parse.read_workers(workers),
        engine=engine,
        model=model,
        wait_ready_s=parse.read_wait_s(wait_ready),
    )
    spec = CapacitySpec(
        scenario=scenario,
        target=target,
        options=options,
        over=load,
        attainment=share,
        between=None if between is None else _between(between, load),
        budget_s=math.inf if budget is None else parse.read_duration_s("--budget", budget),
        confidence=_inside("--confidence", confidence, 0.5, 0.999),
        precision=_inside("--precision", precision, 0.002, 0.5),
    )
    with parse.shared_watch(watch, [target]) as each:
        spec = replace(spec, options=replace(options, watch=each))
        directory = out or default_directory(scenario)
        console = Console(stderr=True, highlight=False, markup=False)
        result = search(spec, directory, console, resume=resume)
    if json:
        print_json(result.to_json())
    else:
        stdout().print(table(result))
    typer.echo(f"report: {directory / 'report.html'}", err=True)
    raise typer.Exit(result.exit_code)


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench size capacity_search --hardware h200 --peak 40/s --attainment 90%",
)
@with_flags
def size(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    peak: Annotated[str, typer.Option(help="The highest load to serve, e.g. 40/s.")],
    capacity: Annotated[
        Path | None, typer.Option(help="Directory of a capacity search on one replica.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Hardware of a simulated replica: h200, 4xh200, or a YAML file."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Further settings of it, e.g. mode=chunked,shape=70b.")
    ] = "",
    router: Annotated[
        str, typer.Option(help="The router of the replicas, as for simulate.")
    ] = "power_of_two",
    gpus_per_replica: Annotated[
        int | None,
        typer.Option(min=1, help="Default: the target's label gpus, or the number in 4xh200."),
    ] = None,
    headroom: Annotated[str, typer.Option(help="Spare capacity, as a share of the peak.")] = "20%",
    survive: Annotated[int, typer.Option(min=0, help="Replicas that may fail at the peak.")] = 1,
    attainment: Annotated[
        str | None,
        typer.Option(
            help="The share of requests that must meet the SLO. Default: the scenario's, or 99%."
        ),
    ] = None,
    schedules: Annotated[
        int, typer.Option(min=1, help="Simulated schedules that must all meet the SLO.")
    ] = 3,
    budget: Annotated[
        str, typer.Option(help="Virtual time of the simulated capacity search.")
    ] = "30m",
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU hour, in any currency.")
    ] = None,
    watts: Annotated[
        float | None,
        typer.Option(min=0, help="Power of a GPU under load. Default: as measured by --capacity."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the results. Default: runs/size-….")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a capacity, measured or simulated, into replicas and GPUs."""
    from loadgen.run.directory import reserved
    from loadgen.sizing.demand import Demand
    from loadgen.sizing.sentences import sentences
    from loadgen.sizing.size import SizeSpec, gpus_of
    from loadgen.sizing.size import size as sized

    if capacity is None and hardware is None:
        raise UsageError(
            "size needs the capacity of a replica: --capacity DIR of a search, or --hardware h200 "
            "to simulate it"
        )
    scenario = parse.choose_scenario(flags, traffic)
    share = None if attainment is None else parse.read_share("--attainment", attainment)
    scenario, share = parse.with_limits(scenario, share)
    try:
        peak_per_s = parse_rate_per_s(peak)
    except ValueError as error:
        raise UsageError(f"--peak {error}; write e.g. 40/s") from None
    settings = ",".join(
        [*([f"hardware={hardware}"] if hardware else []), *([engine] * bool(engine))]
    )
    if settings and hardware is None:
        raise UsageError("--engine describes a simulated replica: add --hardware")
    spec = SizeSpec(
        scenario=scenario,
        demand=Demand(
            peak_per_s,
            parse.read_share("--headroom", headroom),
            survive,
            gpus_per_replica or gpus_of(capacity, hardware or "", settings),
        ),
        capacity=capacity,
        engine=settings,
        router=router,
        attainment=share,
        n_schedules=schedules,
        budget_s=parse.read_duration_s("--budget", budget),
        price_per_gpu_hour=price,
        watts_per_gpu=watts,
    )
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = out or reserved(Path("runs") / f"size-{scenario.name}-{stamp}")
    result = sized(spec, directory, Console(stderr=True, highlight=False, markup=False))
    if json:
        print_json(result.to_json())
    else:
        for line in sentences(result):
            typer.echo(line)
    typer.echo(f"result: {directory / 'size.json'}", err=True)
    raise typer.Exit(result.exit_code)


def _between(text: str, over: Over) -> tuple[float, float]:
    """`1/s:40/s`, or `1:64` users."""
    low, colon, high = text.partition(":")
    example = "1/s:40/s" if over == "rate" else "1:64"
    try:
        if not colon:
            raise ValueError("expected two loads")
        read = _rate_per_s if over == "rate" else _users
        bounds = read(low), read(high)
    except ValueError as error:
        raise UsageError(f"--between {text}: {error}; write e.g. {example}") from None
    if not bounds[0] < bounds[1]:
        raise UsageError(f"--between {text}: the first must be lower than the second: {example}")
    return bounds


def _rate_per_s(text: str) -> float:
    return parse_rate_per_s(parse.with_unit(text, "/s"))


def _users(text: str) -> float:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no number of users")
    return float(text)


def _inside(flag: str, text: str, least: float, most: float) -> float:
    share = parse.read_share(flag, text)
    if not least <= share <= most:
        raise UsageError(f"{flag} {text}: expected {100 * least:g} % to {100 * most:g} %")
    return share
