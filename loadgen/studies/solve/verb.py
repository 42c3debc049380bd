"""The verb solve, of the panel Engine lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import Json, ScenarioFlags, TrafficFlags, with_flags
from loadgen.cli.terminal import stderr
from loadgen.errors import UsageError

verbs = typer.Typer()


@verbs.command(
    epilog="Example: slobench solve --rate 1/s --input-len 512 --output-len 4 --hardware h200 "
    "--engine 'shape=8b,max_batch_size=32,pad_to=1 2 4 8 16 32'",
)
@with_flags
def solve(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    hardware: Annotated[
        str, typer.Option(help="Hardware of the model: h200, 4xh200, cpu, or a YAML file.")
    ],
    engine: Annotated[
        str, typer.Option(help="Further settings of the mode dynamic, e.g. shape=70b,pad_to=8 32.")
    ] = "",
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="Load as a share of what batches can serve; repeatable. Default: 10%, 30%, 50%, "
            "70% and 90%."
        ),
    ] = None,
    power_weight: Annotated[
        float, typer.Option(min=0, help="Cost of a watt, in seconds of mean response time.")
    ] = 0.0,
    watts: Annotated[
        float, typer.Option(min=0, help="Power of a running batch above that of an idle engine.")
    ] = 0.0,
    late_weight: Annotated[
        float,
        typer.Option(min=0, help="Cost of a second beyond the SLO on e2e, in seconds of response."),
    ] = 0.0,
    seeds: Annotated[
        int, typer.Option(min=0, help="Schedules simulated at each load; 0 simulates none.")
    ] = 10,
    requests: Annotated[
        int, typer.Option(min=10, help="Requests of each simulated schedule.")
    ] = 1000,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the study. Default: runs/solve-….")
    ] = None,
    json: Json = False,
) -> None:
    """Compute the best size of each batch for a queue length, and write it as a table for the mode
    `dynamic`.

    The optimum is exact for Poisson arrivals and batches that run to completion. It is simulated
    next to two rules: serve all that wait (greedy), and the best number of requests to wait for.
    """
    from loadgen.lab.sim_options import read_settings
    from loadgen.studies.solve.run import SOLVE, SolveSpec
    from loadgen.studies.solve.run import solve as solved
    from loadgen.studies.study import end

    settings = read_settings(engine)
    if "hardware" in settings:
        raise UsageError("--engine hardware: is given by --hardware")
    spec = SolveSpec(
        scenario=parse.choose_scenario(flags, traffic),
        engine={"hardware": hardware, **settings},
        loads=_loads(load or ["10%", "30%", "50%", "70%", "90%"]),
        power_weight=power_weight,
        late_weight=late_weight,
        watts=watts,
        n_seeds=seeds,
        n_requests=requests,
    )
    command = parse.base_options(flags.plugin).command
    with SOLVE.opened(spec.scenario.name, out, command=command) as place:
        result = solved(place, spec, stderr())
    end(
        result.to_json(),
        lambda: "\n".join(result.lines()),
        as_json=json,
        exit_code=0,
        files={"table": place.directory / "table.json", "result": place.directory / SOLVE.file},
    )


def _loads(texts: list[str]) -> tuple[float, ...]:
    loads = sorted({parse.read_share("--load", text) for text in texts})
    if not all(0 < load < 1 for load in loads):
        raise UsageError(f"--load: expected shares between 0% and 100%, got {', '.join(texts)}")
    return tuple(loads)
