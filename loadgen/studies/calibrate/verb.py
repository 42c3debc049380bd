"""The verb calibrate, of the panel Engine lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import Json, Model, Plugin, WaitReady
from loadgen.cli.terminal import print_json
from loadgen.errors import UsageError

PANEL = "Engine lab"
verbs = typer.Typer()
_REFUSED = 1


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench calibrate --target http://localhost:8000 --shape tiny --out my.yaml",
)
def calibrate(
    shape: Annotated[
        str, typer.Option(help="The shape, or local model directory, that the server serves.")
    ],
    steps: Annotated[
        Path | None,
        typer.Option(help="The bundled engine's step log: a --log-dir, or the directory of a run."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="A recorded run of any server under load.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A URL or target file of an idle server, measured for some minutes."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The hardware file. With --target, its runs stay next to it.")
    ] = Path("calibrated.yaml"),
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens of KV memory of the server. Default: as in the log."),
    ] = None,
    max_input_len: Annotated[
        int, typer.Option(min=16, help="With --target: the longest prompt, tokens.")
    ] = 1024,
    max_batch: Annotated[
        int, typer.Option(min=1, max=1024, help="With --target: requests at once at most.")
    ] = 32,
    model: Model = "",
    wait_ready: WaitReady = None,
    engine: Annotated[
        str, typer.Option(help="With --target reference: settings of the bundled engine.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Let the simulator use costs with an error above 10 %.")
    ] = False,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Fit the costs of a server's steps, as a hardware file for `simulate`, `modes` and `serve`.

    The steps come from the engine's own log (--steps), from a recorded run (--run), or from small
    runs against an idle server (--target). The same command continues an interrupted calibration.
    Exit code 1: the error on steps outside the fit is above 10 %, so the simulator refuses the
    file.
    """
    from loadgen.studies.calibrate.calibration_file import (
        Measured,
        calibrated,
        check_place,
        measured_log,
        measured_run,
    )

    given = [
        flag
        for flag, value in (("--steps", steps), ("--run", run), ("--target", target))
        if value is not None
    ]
    if len(given) != 1:
        shown = " and ".join(given) or "none"
        raise UsageError(f"calibrate takes one of --steps, --run and --target, got {shown}")
    check_place(out, shape)
    if steps is not None:
        measured = measured_log(steps)
    elif run is not None:
        measured = measured_run(run)
    else:
        from loadgen.studies.calibrate.black_box import cells, measure

        assert target is not None, "one of three is given"
        console = Console(stderr=True, highlight=False, markup=False)
        options = parse.base_options(
            plugin, engine=engine, model=model, wait_ready_s=parse.read_wait_s(wait_ready)
        )
        runs = out.with_name(f"{out.stem}_runs")
        measured_cells = measure(cells(target, options, max_input_len, max_batch), runs, console)
        if measured_cells.n_missing:
            typer.echo(
                f"interrupted: {measured_cells.n_missing} of {measured_cells.n_cells} cells are "
                f"missing; {runs} keeps the others, the same command continues there",
                err=True,
            )
            raise typer.Exit(INTERRUPTED)
        source = f"{target}, measured from outside"
        measured = Measured(measured_cells.samples, source, answers=measured_cells.answers)
    result = calibrated(measured, out, shape, kv_tokens, is_forced=force)
    if json:
        print_json(result.facts())
    else:
        typer.echo("\n".join(result.lines()))
    typer.echo(f"hardware file: {out}", err=True)
    raise typer.Exit(0 if result.is_accepted else _REFUSED)
