"""The verb compare, of the panel Decide."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import (
    FailOn,
    Full,
    Model,
    ScenarioChanges,
    ScenarioFlags,
    StudyFlags,
    TrafficFlags,
    WaitReady,
    Workers,
    with_flags,
)
from loadgen.cli.terminal import print_json, stderr, stdout
from loadgen.errors import UsageError

if TYPE_CHECKING:
    from loadgen.run.run_options import RunOptions
    from loadgen.studies.cells.cell import Cell
    from loadgen.studies.compare.judgement import Options
    from loadgen.studies.compare.numbers import Comparison
    from loadgen.workload.scenario import Scenario

verbs = typer.Typer()


@verbs.command(
    epilog="Example: slobench compare quickstart --target sim --target sim --engine mode=chunked "
    "--engine mode=static",
)
@with_flags
def compare(
    changes: ScenarioChanges,
    traffic: TrafficFlags,
    study: StudyFlags,
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
    ] = 4,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="With --target: engine settings of both sides, or of A and then of B."),
    ] = None,
    model: Model = "",
    workers: Workers = "auto",
    wait_ready: WaitReady = None,
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
    full: Full = False,
) -> None:
    """Show whether B is better, worse or the same as A, and how sure that is: two sides of recorded
    runs, or two targets that are measured first (--target, --target, --out, --resume)."""
    from loadgen.measure.measures import measure
    from loadgen.studies.compare.judgement import Options, exit_code
    from loadgen.studies.compare.sides import read_fail_on, read_margins, read_noise
    from loadgen.studies.compare.view import ending, table
    from loadgen.studies.study import end

    sides = sides or []
    fail_on = read_fail_on(fail_on) or "worse"
    size = None if effect is None else parse.read_share("--effect", effect)
    level = parse.read_confidence(confidence) or 0.95
    _check_sides(sides, target, study, aa=aa)
    if aa:
        _print_noise(sides, metric or [], 0.05 if size is None else size, level, study.json)
        return
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
    if target is None:
        comparison = _judged(sides, options, html)
    else:
        scenario = _scenario_of_sides(sides, changes, traffic)
        options_of_runs = parse.base_options(
            changes.plugin,
            n_workers=parse.read_workers(workers),
            model=model,
            wait_ready_s=parse.read_wait_s(wait_ready),
        )
        cells = _cells_of_sides(scenario, target, engine or [], options_of_runs)
        comparison, html = _measured(cells, repeats, study, options, html)
    code = exit_code(comparison.verdict, fail_on)
    _warn_github(comparison, code)
    end(
        comparison.to_json(),
        lambda: table(comparison),
        as_json=study.json,
        exit_code=code,
        files={} if html is None else {"page": html},
        ending=lambda: ending(comparison, has_page=html is not None),
        is_full=full,
    )


def _check_sides(
    sides: Sequence[str], targets: Sequence[str] | None, study: StudyFlags, *, aa: bool
) -> None:
    if targets is None and (study.out is not None or study.resume):
        flag = "--resume" if study.out is None else "--out"
        raise UsageError(
            f"{flag}: is the directory of runs that --target A --target B measures first; recorded "
            "runs are compared with --html and --json alone"
        )
    if not aa and targets is None and len(sides) != 2:
        raise UsageError(
            "expected two sides A and B, each a run, runs separated by commas, or a folder of "
            f"runs; got {len(sides)}. For equal runs: --aa. To measure two targets first: "
            "--target A --target B"
        )


def _judged(sides: Sequence[str], options: Options, html: Path | None) -> Comparison:
    """The comparison of two sides; writes its page."""
    from loadgen.studies.compare.numbers import judge_sides
    from loadgen.studies.compare.sides import read_side

    a, b = (read_side(side) for side in sides)
    comparison = judge_sides(a, b, options)
    if html is not None:
        from loadgen.studies.compare.page import render
        from reports.page import write_page

        write_page(html, render(comparison, a, b, options, parse.cache_dir(os.environ)))
    return comparison


def _measured(
    cells: Sequence[Cell], repeats: int, study: StudyFlags, options: Options, html: Path | None
) -> tuple[Comparison, Path]:
    """Measures two cells in turns and compares them; the comparison and its page."""
    from loadgen.studies.compare.run import COMPARE, measure_sides

    with COMPARE.opened(
        cells[0].scenario.name, study.out, resume=study.resume, command=cells[0].options.command
    ) as place:
        try:
            sides = measure_sides(cells, place, repeats, stderr())
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        page = html or place.directory / "compare.html"
        comparison = _judged(sides, options, page)
        place.cover(page)
        place.write(comparison)
    return comparison, page


def _warn_github(comparison: Comparison, code: int) -> None:
    if code == 0 and comparison.verdict == "inconclusive" and "GITHUB_ACTIONS" in os.environ:
        typer.echo("::warning::slobench compare: inconclusive", err=True)


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
    from loadgen.studies.cells.cell import Cell

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


def _print_noise(
    sides: Sequence[str], metrics: Sequence[str], effect: float, confidence: float, as_json: bool
) -> None:
    """Prints by how much equal runs differ, as a table or as `--noise` reads it."""
    from loadgen.measure.measures import measure
    from loadgen.studies.compare.numbers import GATED, noise_of_sides
    from loadgen.studies.compare.sides import noise_json, read_side
    from loadgen.studies.compare.view import noise_rows, noise_table

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
