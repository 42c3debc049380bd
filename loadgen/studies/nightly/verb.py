"""The verb nightly, of the panel Decide."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import (
    FailOn,
    Json,
    Plugin,
    WaitReady,
    WatchFlags,
    with_flags,
)
from loadgen.cli.terminal import print_json, stdout

if TYPE_CHECKING:
    from loadgen.studies.nightly.run import FinishedNight

PANEL = "Decide"
verbs = typer.Typer()


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
    from loadgen.archive.directory import reserved
    from loadgen.studies.compare.sides import read_fail_on
    from loadgen.studies.nightly.run import Nightly, NightOptions

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
        from loadgen.studies.nightly.view import tables

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
