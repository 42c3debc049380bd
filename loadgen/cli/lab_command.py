"""What the verbs of the engine lab do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.parse import cache_dir, read_confidence, read_duration_s, read_workers
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError
from loadgen.plugins import load_plugin

if TYPE_CHECKING:
    from loadgen.workload.scenario import Scenario


def modes(
    scenario: Scenario,
    modes_text: str,
    rates_text: str | None,
    n_seeds: int,
    target: str,
    engine: str,
    out: Path | None,
    workers: str,
    confidence: float | None,
    plugins: Sequence[Path],
    as_json: bool,
) -> int:
    """Run the same requests against each mode and put the results side by side."""
    from loadgen.lab.mode_spec import read_modes, read_rates
    from loadgen.lab.modes import ModesSpec, check_directory, check_target, compare
    from loadgen.lab.simulated_engine import read_settings

    check_target(target)
    asked = ModesSpec(
        scenario,
        read_modes(modes_text),
        target,
        read_settings(engine),
        None if rates_text is None else read_rates(rates_text),
        n_seeds,
        read_confidence(confidence) or 0.95,
        read_workers(workers),
        plugins,
        ["slobench", *sys.argv[1:]],
        cache_dir(os.environ),
    )
    directory = out or Path("runs") / f"modes-{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}"
    check_directory(directory)
    compared = compare(asked, directory, Console(stderr=True, highlight=False))
    if compared.facts["n_done"]:
        from loadgen.lab.modes_files import write_all

        write_all(compared.facts, directory, cache_dir(os.environ))
        if as_json:
            print_json(compared.facts)
        else:
            from reports.modes.view import tables

            stdout().print(tables(compared.facts))
        typer.echo(f"report: {directory / 'modes.html'}", err=True)
    return INTERRUPTED if compared.was_interrupted else 0


def serve(
    options: Mapping[str, Any],
    drain: str | None,
    knobs: Sequence[str],
    plugins: Sequence[Path],
    as_json: bool,
) -> int:
    """The bundled engine in the foreground."""
    from reference_engine.serve import run as serve_until_stopped
    from reference_engine.serving.serve_options import choose

    for plugin in plugins:
        load_plugin(plugin)
    drain_s = {} if drain is None else {"drain_s": read_duration_s("--drain", drain)}
    try:
        chosen = choose({**options, **drain_s}, knobs)
    except UsageError as error:  # the server's options are this command's flags
        where, _, problem = str(error).partition(": ")
        key, _, rest = problem.partition(": ")
        if where != "options":
            raise
        raise UsageError(f"--{key.replace('_', '-')}: {rest}") from None
    if as_json:
        typer.echo(json.dumps({"options": chosen.model_dump(mode="json")}))
    return serve_until_stopped(chosen)
