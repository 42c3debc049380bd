"""What `slobench nightly` does: a night, and everything a CI system reads of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from loadgen.cli.parse import cache_dir, watched_together
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError, nearest
from loadgen.measure.comparison.judgement import FAIL_ON
from loadgen.plugins import load_plugin

if TYPE_CHECKING:
    from loadgen.nightly.night import FinishedNight
    from loadgen.run.run_options import Watch

_INTERRUPTED = 130


def nightly(
    file: Path,
    out: Path | None,
    baseline: Path | None,
    engine: str,
    repeats: int | None,
    fail_on: str | None,
    accepts: bool,
    plugins: Sequence[Path],
    watch: Watch,
    as_json: bool,
) -> int:
    """Measure and judge a night, or accept the last one's level; the exit code."""
    from loadgen.nightly.night import Nightly, NightOptions
    from loadgen.nightly.outputs import write_night
    from loadgen.run.run_options import RunOptions

    if fail_on is not None and fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{fail_on}'; {nearest(fail_on, FAIL_ON)}")
    for plugin in plugins:
        load_plugin(plugin)
    environ = dict(os.environ)
    run = RunOptions(
        command=["slobench", *sys.argv[1:]],
        environ=environ,
        cache_dir=cache_dir(environ),
        plugins=plugins,
    )
    options = NightOptions(baseline, engine, repeats, fail_on or "", job_link(environ), run)
    asked, now = Nightly(file, options), datetime.now().astimezone()
    if accepts:
        return _accept(asked.accept(now), as_json)
    directory = out or Path("runs") / f"nightly-{now:%Y%m%d-%H%M%S}"
    try:
        # Those of controls say nothing new: a control is simulated where its cell is.
        targets = [cell.cell.target for cell in asked.cells]
        with watched_together(watch, targets) as each:
            night = asked.run(Console(stderr=True, highlight=False), now, directory, each)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted: nothing was judged; what was measured stays, and goes on with: slobench "
            f"nightly {file} --out {directory}",
            err=True,
        )
        return _INTERRUPTED
    write_night(night, cache_dir(environ))
    _tell_github(night, environ)
    if as_json:
        print_json(night.facts)
    else:
        from reports.nightly.view import tables

        stdout().print(tables(night.verdict, night.cells, night.facts))
    typer.echo(f"report: {night.directory / 'index.html'}", err=True)
    return night.exit_code


def job_link(environ: Mapping[str, str]) -> str:
    """Where GitHub shows the job this runs in; "" elsewhere."""
    keys = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run_id = (environ.get(key, "") for key in keys)
    return f"{server}/{repository}/actions/runs/{run_id}" if server and run_id else ""


def _accept(accepted: Mapping[str, Sequence[str]], as_json: bool) -> int:
    if as_json:
        print_json({"schema": 1, "kind": "accepted", "cells": accepted})
        return 0
    for cell, nights in accepted.items():
        said = f"a new level, from night {nights[0]} on" if nights else "nothing to accept"
        typer.echo(f"{cell}: {said}")
    return 0


def _tell_github(night: FinishedNight, environ: Mapping[str, str]) -> None:
    """The summary and the annotations, where GitHub Actions reads them."""
    from reports.nightly.view import github_lines

    if path := environ.get("GITHUB_STEP_SUMMARY"):
        summary = night.directory / "summary.md"
        text = summary.read_text(encoding="utf-8")
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # the verdict stands, wherever it cannot be shown
            typer.echo(
                f"slobench: GITHUB_STEP_SUMMARY: {path}: {error.strerror}; the summary is in "
                f"{summary}",
                err=True,
            )
    if "GITHUB_ACTIONS" in environ:
        for line in github_lines(night.cells):
            typer.echo(line, err=True)
