"""The verb calibrate, of the panel Engine lab."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import Json, Model, Plugin, WaitReady
from loadgen.cli.terminal import stderr
from loadgen.errors import UsageError

if TYPE_CHECKING:
    from loadgen.studies.calibrate.calibration_file import Measured

verbs = typer.Typer()
_REFUSED = 1


@verbs.command(
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
        int | None,
        typer.Option(
            min=16,
            help="With --target: the longest prompt, tokens. Default: as long as the server and "
            "the model admit (max_model_len), 32576 at most.",
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, max=1024, help="With --target: requests at once at most.")
    ] = 32,
    model: Model = "",
    wait_ready: WaitReady = None,
    engine: Annotated[
        str, typer.Option(help="With --target reference: settings of the bundled engine.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Let the simulator use costs with an error above 8 %.")
    ] = False,
    plugin: Plugin = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --target: continue the runs next to --out.")
    ] = False,
    json: Json = False,
) -> None:
    """Fit the costs of a server's steps, as a hardware file for `simulate`, `modes` and `serve`.

    The steps come from the engine's own log (--steps), from a recorded run (--run), or from small
    runs against an idle server (--target). Exit code 1: the error of the costs of a kind and size
    of step is above 8 %, so the simulator refuses the file.
    """
    from loadgen.studies.calibrate.black_box import (
        CALIBRATE,
        cells,
        longest_prompt,
        measure,
        stated_length,
    )
    from loadgen.studies.calibrate.calibration_file import calibrated, check_place
    from loadgen.studies.study import end

    _check_sources(steps, run, target)
    check_place(out, shape)
    if target is None:
        if resume:
            raise UsageError("--resume continues the runs of --target")
        result = calibrated(_recorded(steps, run), out, shape, kv_tokens, is_forced=force)
    else:
        options = parse.base_options(
            plugin, engine=engine, model=model, wait_ready_s=parse.read_wait_s(wait_ready)
        )
        longest = max_input_len or longest_prompt(shape, stated_length(target, options))
        planned = cells(target, options, longest, max_batch)
        runs, command = out.with_name(f"{out.stem}_runs"), options.command
        with CALIBRATE.opened("", runs, resume=resume, command=command) as place:
            measured = measure(replace(place, out=out), planned, target, stderr())
            result = calibrated(measured, out, shape, kv_tokens, is_forced=force)
            place.write(result)
    end(
        result.to_json(),
        lambda: "\n".join(result.lines()),
        as_json=json,
        exit_code=0 if result.accepted else _REFUSED,
        files={"hardware file": out},
    )


def _recorded(steps: Path | None, run: Path | None) -> Measured:
    from loadgen.studies.calibrate.calibration_file import measured_log, measured_run

    if steps is not None:
        return measured_log(steps)
    assert run is not None, "a source of three is given"
    return measured_run(run)


def _check_sources(steps: Path | None, run: Path | None, target: str | None) -> None:
    sources = {"--steps": steps, "--run": run, "--target": target}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) != 1:
        shown = " and ".join(given) or "none"
        raise UsageError(f"calibrate takes one of --steps, --run and --target, got {shown}")
