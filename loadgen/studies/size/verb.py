"""The verb size, of the panel Decide."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import ScenarioFlags, StudyFlags, TrafficFlags, with_flags
from loadgen.cli.terminal import stderr
from loadgen.errors import UsageError
from loadgen.units import parse_rate_per_s

verbs = typer.Typer()


@verbs.command(
    epilog="Example: slobench size capacity_search --hardware h200 --peak 40/s --attainment 90%",
)
@with_flags
def size(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    study: StudyFlags,
    peak: Annotated[str, typer.Option(help="The highest load to serve, e.g. 40/s.")],
    capacity: Annotated[
        Path | None, typer.Option(help="Directory of a capacity search on one replica.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Hardware of a simulated replica: h200, 4xh200, or a YAML file."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Further settings of it, e.g. mode=chunked,shape=70b.")
    ] = "",
    router: Annotated[
        str, typer.Option(help="The router of the replicas, as for simulate.")
    ] = "power_of_two",
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="Find the best goodput per GPU over settings of the replica, e.g. "
            "tensor_parallel=1,2,4, pipeline=1,2 or token_budget=512,2048; repeatable."
        ),
    ] = None,
    gpus_per_replica: Annotated[
        int | None,
        typer.Option(min=1, help="Default: the target's label gpus, or the number in 4xh200."),
    ] = None,
    headroom: Annotated[str, typer.Option(help="Spare capacity, as a share of the peak.")] = "20%",
    survive: Annotated[int, typer.Option(min=0, help="Replicas that may fail at the peak.")] = 1,
    attainment: Annotated[
        str | None,
        typer.Option(
            help="The share of requests that must meet the SLO. Default: the scenario's, or 99%."
        ),
    ] = None,
    schedules: Annotated[
        int, typer.Option(min=1, help="Simulated schedules that must all meet the SLO.")
    ] = 3,
    budget: Annotated[
        str, typer.Option(help="Virtual time of the simulated capacity search.")
    ] = "30m",
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU hour, in any currency.")
    ] = None,
    watts: Annotated[
        float | None,
        typer.Option(min=0, help="Power of a GPU under load. Default: as measured by --capacity."),
    ] = None,
) -> None:
    """Turn a capacity, measured or simulated, into replicas and GPUs."""
    from loadgen.studies.size.configurations import read_axes
    from loadgen.studies.size.demand import Demand
    from loadgen.studies.size.result import sentences
    from loadgen.studies.size.run import SIZE, SizeSpec, gpus_of
    from loadgen.studies.size.run import size as sized
    from loadgen.studies.study import end

    settings = _settings(capacity, hardware, engine)
    axes = read_axes(search or ())
    if axes and (capacity is not None or gpus_per_replica is not None):
        raise UsageError(
            "--search simulates replicas of its own: leave out --capacity and --gpus-per-replica"
        )
    scenario = parse.choose_scenario(flags, traffic)
    share = None if attainment is None else parse.read_share("--attainment", attainment)
    scenario, share = parse.with_limits(scenario, share)
    spec = SizeSpec(
        scenario=scenario,
        demand=Demand(
            _peak_per_s(peak),
            parse.read_share("--headroom", headroom),
            survive,
            gpus_per_replica or gpus_of(capacity, hardware or "", settings),
        ),
        capacity=capacity,
        engine=settings,
        router=router,
        attainment=share,
        n_schedules=schedules,
        budget_s=parse.read_duration_s("--budget", budget),
        axes=axes,
        price_per_gpu_hour=price,
        watts_per_gpu=watts,
        cache_dir=parse.cache_dir(os.environ),
    )
    command = parse.base_options(flags.plugin).command
    with SIZE.opened(scenario.name, study.out, resume=study.resume, command=command) as place:
        result = sized(place, spec, stderr())
    end(
        result.to_json(),
        lambda: "\n".join(sentences(result)),
        as_json=study.json,
        exit_code=result.exit_code,
        files={
            "result": place.directory / SIZE.file,
            "report": place.directory / "report.html",
        },
    )


def _settings(capacity: Path | None, hardware: str | None, engine: str) -> str:
    """The settings of the simulated replica, "" for none."""
    if capacity is None and hardware is None:
        raise UsageError(
            "size needs the capacity of a replica: --capacity DIR of a search, or --hardware h200 "
            "to simulate it"
        )
    if engine and hardware is None:
        raise UsageError("--engine describes a simulated replica: add --hardware")
    return ",".join([*([f"hardware={hardware}"] if hardware else []), *([engine] * bool(engine))])


def _peak_per_s(text: str) -> float:
    try:
        return parse_rate_per_s(text)
    except ValueError as error:
        raise UsageError(f"--peak {error}; write e.g. 40/s") from None
