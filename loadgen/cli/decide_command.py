"""What the verbs under Decide do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from loadgen.cli.parse import cache_dir, read_confidence, read_share
from loadgen.cli.terminal import print_json, print_summary, stdout
from loadgen.errors import UsageError, nearest


def rescore(
    directory: Path,
    slo: Sequence[str] | None,
    definitions: Sequence[str],
    window: str | None,
    confidence: float | None,
    as_json: bool,
) -> int:
    """A recorded run under other promises, another window or other tools' definitions; files stay
    as they are."""
    from dataclasses import asdict

    from loadgen.drive.store import read_run
    from loadgen.measure.aggregate import summarize
    from loadgen.measure.comparison.judgement import plain
    from loadgen.measure.definitions import DEFINITIONS
    from loadgen.measure.definitions import rescore as under
    from loadgen.measure.window import with_window
    from reports.run.definitions_view import table

    known = [*DEFINITIONS, "all"]
    for name in definitions:
        if name not in known:
            raise UsageError(f"--definition: unknown tool '{name}'; {nearest(name, known)}")
    found = read_run(directory)
    if window is not None:
        found = with_window(found, window)
    summary = summarize(found, slo=slo, confidence=read_confidence(confidence))
    names = (
        tuple(DEFINITIONS)
        if "all" in definitions
        else tuple(dict.fromkeys(["slobench", *definitions]))
    )
    rows = under(found, names) if definitions else []
    if as_json:
        print_json({**summary.to_json(), "definitions": plain([asdict(row) for row in rows])})
    else:
        print_summary(summary, as_json)
        if rows:
            stdout().print(table(rows))
    return summary.exit_code


def compare(
    sides: Sequence[str],
    is_aa: bool,
    fail_on: str,
    metrics: Sequence[str],
    margins: Sequence[str],
    confidence: float,
    effect: str | None,
    noise: Path | None,
    vary: Sequence[str],
    within_run: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """Compare sets of runs, or measure what equal ones differ by; the exit code."""
    from loadgen.cli.sides import read_margins, read_noise, read_side
    from loadgen.measure.comparison.compare import judge_sides
    from loadgen.measure.comparison.judgement import FAIL_ON, Options, exit_code
    from loadgen.measure.comparison.measures import measure
    from reports.compare.view import table

    if fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{fail_on}'; {nearest(fail_on, FAIL_ON)}")
    size = None if effect is None else read_share("--effect", effect)
    if is_aa:
        return _noise(sides, metrics, 0.05 if size is None else size, confidence, as_json)
    if len(sides) != 2:
        raise UsageError(
            f"which two sides? Name A and B, each a run, runs separated by commas, or a folder of "
            f"runs; got {len(sides)}. For equal runs: --aa"
        )
    options = Options(
        metrics=metrics,
        margins=read_margins(margins),
        confidence=confidence,
        effect=size,
        noise=read_noise(noise) if noise else {},
        vary=vary,
        within_run=within_run,
    )
    for text in metrics:  # before any run is read
        measure(text)
    a, b = (read_side(side) for side in sides)
    found = judge_sides(a, b, options)
    if html is not None:
        from reports.compare.page import render
        from reports.page import write_page

        write_page(html, render(found, a, b, options, cache_dir(os.environ)))
        typer.echo(f"page: {html}", err=True)
    if as_json:
        print_json(found.to_json())
    else:
        stdout().print(table(found))
    code = exit_code(found.verdict, fail_on)
    if (
        code == 0
        and found.verdict in ("inconclusive", "invalid")
        and "GITHUB_ACTIONS" in os.environ
    ):
        typer.echo(f"::warning::slobench compare: {found.verdict}", err=True)
    return code


def _noise(
    sides: Sequence[str], metrics: Sequence[str], effect: float, confidence: float, as_json: bool
) -> int:
    """What equal runs differ by, as a table or as `--noise` reads it."""
    from loadgen.cli.sides import noise_json, read_side
    from loadgen.measure.comparison.compare import GATED, noise_of_sides
    from loadgen.measure.comparison.measures import measure
    from reports.compare.view import noise_rows, noise_table

    runs = [run for side in sides for run in read_side(side)]
    if not runs:
        raise UsageError("--aa: which runs? Name three or more equal ones")
    found = noise_of_sides(runs, metrics)
    units = {text: measure(text).metric.unit for text in found}
    alpha = 2 * (1 - confidence) / max(1, len(metrics or GATED))  # as a two-sided test takes it
    if as_json:
        rows = noise_rows(found, units, effect, alpha)
        print_json({**noise_json(runs, found), "effect": effect, "planning": rows})
    else:
        stdout().print(noise_table(noise_rows(found, units, effect, alpha), effect))
    return 0
