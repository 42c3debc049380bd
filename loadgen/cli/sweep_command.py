"""What `slobench sweep` does: from flags or a sweep file to cells, runs and a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from loadgen.cli.exit_codes import INTERRUPTED, NO_VERDICT
from loadgen.cli.parse import cache_dir, choose_scenario, read_workers, watched_together
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError, nearest

if TYPE_CHECKING:
    from loadgen.run.run_options import Watch
    from loadgen.sweep.points import Base
    from loadgen.sweep.sweep import Swept
    from loadgen.sweep.sweep_spec import SweepFile, SweepSpec

FAIL_ON = ("missed", "no_verdict")
_MISSED = 1


def sweep(
    source: str | None,
    over: Sequence[str],
    asked_keys: Mapping[str, Any],
    scenario_flags: Mapping[str, Any],
    settings: Sequence[str],
    out: Path | None,
    resume: Path | None,
    is_dry_run: bool,
    fail_on: str | None,
    workers: str,
    plugins: Sequence[Path],
    watch: Watch,
    as_json: bool,
) -> int:
    """Run what is not there yet, tell of all of it, and return the exit code. `asked_keys` are
    those of a sweep file, None where not given."""
    from loadgen.sweep.api import default_directory
    from loadgen.sweep.sweep import prepare, run_sweep
    from loadgen.sweep.sweep_files import write_all
    from loadgen.sweep.sweep_spec import sweep_spec

    if fail_on is not None and fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{fail_on}'; {nearest(fail_on, FAIL_ON)}")
    file = _file(source, resume, over, asked_keys)
    base = _base(source, file, scenario_flags, settings, workers, plugins)
    asked = sweep_spec(file, base)
    _check_engines(asked)
    directory = resume or out or default_directory(base.scenario)
    if is_dry_run:
        return _forecast(asked, directory, as_json)
    prepare(directory, file, base, asked)
    console = Console(stderr=True, highlight=False)
    with watched_together(watch, [cell.target for cell in asked.cells]) as each:
        asked = replace(asked, cells=[cell.watched(each) for cell in asked.cells])
        swept = run_sweep(asked, base.scenario, directory, console, base.options.command)
    write_all(swept, base.options.cache_dir)
    if as_json:
        print_json(swept.facts)
    else:
        from reports.sweep.view import tables

        stdout().print(tables(swept.facts))
    typer.echo(f"report: {directory / 'report.html'}", err=True)
    return INTERRUPTED if swept.was_interrupted else _exit_code(swept, fail_on)


def _file(
    source: str | None, resume: Path | None, over: Sequence[str], asked_keys: Mapping[str, Any]
) -> SweepFile:
    from loadgen.sweep.axes import read_axis
    from loadgen.sweep.sweep_spec import FILE, is_sweep_file, read_sweep_file, sweep_from_flags

    given = {key: value for key, value in asked_keys.items() if value is not None}
    axes = [read_axis(text) for text in over]
    if axes:
        given["over"] = {axis.key: list(axis.values) for axis in axes}
        if len(given["over"]) < len(axes):
            raise UsageError("--over: a key stands twice; name all its values at once")
    if resume is None:
        if source is not None and is_sweep_file(source):
            return read_sweep_file(Path(source), given)
        return sweep_from_flags(given)
    if source is not None:
        raise UsageError("--resume: the directory says which scenario; leave it out")
    if not (resume / FILE).is_file():
        raise UsageError(f"--resume {resume}: is no directory of a sweep (no {FILE})")
    return read_sweep_file(resume / FILE, given)


def _base(
    source: str | None,
    file: SweepFile,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    workers: str,
    plugins: Sequence[Path],
) -> Base:
    from loadgen.run.run_options import RunOptions
    from loadgen.sweep.points import Base
    from loadgen.sweep.sweep_spec import is_sweep_file

    named = file.scenario or (None if is_sweep_file(source) else source)
    scenario = choose_scenario(named, [*file.settings(), *settings], plugins, **flags)
    target = file.target or os.environ.get("OPENAI_BASE_URL", "")
    if not target and "target" not in file.over:
        raise UsageError(
            "which server? Add --target URL, a target file, reference, sim or mock, or vary it: "
            "--over target=… (OPENAI_BASE_URL is not set either)"
        )
    options = RunOptions(
        n_workers=read_workers(workers),
        engine=file.engine,
        model=file.model,
        command=["slobench", *sys.argv[1:]],
        environ=dict(os.environ),
        cache_dir=cache_dir(os.environ),
        plugins=plugins,
    )
    return Base(scenario, target, options)


def _check_engines(asked: SweepSpec) -> None:
    """Raises UsageError for settings that the bundled engine would refuse, before any cell runs."""
    from reference_engine.serving.serve_options import choose

    for cell in asked.cells:
        if cell.target == "reference":
            words = cell.options.engine.split(",")
            choose({}, [word for word in words if word])


def _forecast(asked: SweepSpec, directory: Path, as_json: bool) -> int:
    """What would be done, in which order and for how long."""
    from loadgen.cells.cell import check_cells
    from loadgen.sweep.sweep import forecast
    from reports.sweep.view import forecast_table

    check_cells(asked.cells, directory)
    found = forecast(asked, directory)
    facts = {
        "directory": str(directory),
        "turns": [
            {
                "cell": turn.cell.name,
                "repeat": turn.repeat,
                "factors": dict(turn.cell.factors),
                "is_done": turn.is_done,
            }
            for turn in found.turns
        ],
        "arrivals_s": found.arrivals_s,
        "drain_s": found.drain_s,
        "n_starts": found.n_starts,
    }
    if as_json:
        print_json(facts)
    else:
        stdout().print(forecast_table(facts))
    return 0


def _exit_code(swept: Swept, fail_on: str | None) -> int:
    """A cell that could not be measured leaves the sweep without an answer; a missed promise or a
    verdict that is none counts only where it was asked for."""
    codes = {run["exit_code"] for run in swept.runs}
    if swept.facts["n_failed"] or (fail_on == "no_verdict" and NO_VERDICT in codes):
        return NO_VERDICT
    return _MISSED if fail_on is not None and _MISSED in codes else 0
