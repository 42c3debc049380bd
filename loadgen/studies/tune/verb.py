"""The verb tune, of the panel Engine lab."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import Confidence, ScenarioFlags, StudyFlags, TrafficFlags, with_flags
from loadgen.cli.terminal import stderr

verbs = typer.Typer()
KNOBS = ("token_budget=256,512,1024,2048", "max_num_seqs=64,256")


@verbs.command(
    epilog="Example: slobench tune long_prompt_interference --modes chunked,bucketed "
    "--knob token_budget=256,512,1024",
)
@with_flags
def tune(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    study: StudyFlags,
    modes: Annotated[
        str, typer.Option(help="The modes to try, e.g. chunked,bucketed:order=oldest_first.")
    ] = "chunked,bucketed,prefill_first,continuous",
    knob: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting with the values to try, e.g. token_budget=256,512; repeatable. "
            f"Default: {' and '.join(KNOBS)}."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Schedules of the search, and as many to confirm.")
    ] = 8,
    target: Annotated[
        str, typer.Option(help="Where the best three are confirmed: sim, or reference.")
    ] = "sim",
    engine: Annotated[
        str, typer.Option(help="Settings for every candidate, e.g. shape=8b,hardware=h200.")
    ] = "",
    workers: Annotated[
        str, typer.Option(help="Simulating processes, or auto: one per core.")
    ] = "auto",
    confidence: Confidence = None,
) -> None:
    """Find the mode and settings with the most goodput under an SLO: search in simulations, confirm
    the best three on other schedules.

    Exit code 1 if no request met its SLOs with the choice.
    """
    from loadgen.lab.sim_options import read_settings
    from loadgen.run.cores import affine_cores
    from loadgen.studies.modes.run import check_target
    from loadgen.studies.modes.spec import read_modes
    from loadgen.studies.study import end
    from loadgen.studies.tune.run import TUNE
    from loadgen.studies.tune.run import tune as tuned
    from loadgen.studies.tune.spec import TuneSpec, read_knobs
    from loadgen.studies.tune.view import lines

    check_target(target)
    options = parse.base_options(flags.plugin)
    spec = TuneSpec(
        parse.choose_scenario(flags, traffic),
        read_modes(modes),
        read_knobs(KNOBS if knob is None else knob),
        target,
        read_settings(engine),
        seeds,
        parse.read_confidence(confidence) or 0.95,
        parse.read_workers(workers) or affine_cores(),
        options.plugins,
        options.command,
        options.cache_dir,
    )
    name = spec.scenario.name
    with TUNE.opened(name, study.out, resume=study.resume, command=spec.command) as place:
        try:
            result = tuned(spec, place.directory, stderr())
        except KeyboardInterrupt:
            place.print_interrupted(stderr(), "the finished runs are kept")
            raise
        place.write(result)
    end(
        result.to_json(),
        lambda: "\n".join(lines(result)),
        as_json=study.json,
        exit_code=0 if result.chosen.goodput.value else 1,
        files={"result": place.directory / TUNE.file},
    )
