"""The verb nightly, of the panel Decide."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import (
    FailOn,
    Full,
    Json,
    Plugin,
    StudyFlags,
    WaitReady,
    WatchFlags,
    with_flags,
)
from loadgen.cli.terminal import print_json, stderr

if TYPE_CHECKING:
    from loadgen.studies.nightly.run import FinishedNight

verbs = typer.Typer()


@verbs.command(
    epilog="Example: slobench nightly nightly.yaml --out runs/tonight",
)
@with_flags
def nightly(
    watch: WatchFlags,
    study: StudyFlags,
    file: Annotated[Path, typer.Argument(help="A nightly file; `slobench init` writes one.")],
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
    full: Full = False,
) -> None:
    """Measure the same cells every night, and show changes since the nights before."""
    from loadgen.studies.compare.sides import read_fail_on
    from loadgen.studies.nightly.run import Nightly, NightOptions
    from loadgen.studies.nightly.view import ending, tables
    from loadgen.studies.study import end

    fail_on = read_fail_on(fail_on)
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
    planned = Nightly(file, options)
    if accept:
        _print_accepted(planned.accept(datetime.now().astimezone()), study.json)
        return
    # Without the targets of controls: a control is simulated where its cell is.
    with parse.shared_watch(watch, [cell.cell.target for cell in planned.cells]) as each:
        night = planned.run(stderr(), study.out, each, resume=study.resume)
    _write_github_summary(night, environ)
    end(
        night.facts.to_json(),
        lambda: tables(night.facts),
        as_json=study.json,
        exit_code=night.exit_code,
        files={"report": night.directory / "index.html"},
        ending=lambda: ending(night.facts),
        is_full=full,
    )


@verbs.command(
    epilog="Example: slobench alarms results/ --threshold 2%",
)
def alarms(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A directory of nights, each a directory of results of vllm bench serve "
            "--save-result: one a file, repetitions as NAME-run-1.json, NAME-run-2.json, …",
        ),
    ],
    threshold: Annotated[
        str, typer.Option(help="The change of a median that raises an alarm in that pipeline.")
    ] = "2%",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A key of the files, as p99_ttft_ms; repeatable. Default: mean_ttft_ms, "
            "mean_tpot_ms and output_throughput."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show which alarms of a nightly pipeline stand, from the results of vllm bench serve that it
    keeps, as perf-benchmark and perf-eval do."""
    from dataclasses import asdict

    from loadgen.foreign.vllm_nights import read_nights
    from loadgen.studies.nightly.alarms import (
        METRICS,
        JudgedAlarms,
        exit_code,
        judge_alarms,
        lines,
    )

    share = parse.read_share("--threshold", threshold)
    metrics = tuple(dict.fromkeys(metric or METRICS))
    nights = read_nights(directory, metrics)
    rows = judge_alarms(nights, metrics, share)
    names, left_out = [night.name for night in nights], [n for x in nights for n in x.left_out]
    if json:
        print_json(asdict(JudgedAlarms(tuple(names), share, tuple(rows), tuple(left_out))))
    else:
        for line in lines(rows):
            typer.echo(line)
        typer.echo(f"night {names[-1]} against {', '.join(names[:-1])}")
        for sentence in left_out:
            typer.echo(f"left out: {sentence}")
    raise typer.Exit(exit_code(rows))


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
    from loadgen.studies.nightly.view import github_lines

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
