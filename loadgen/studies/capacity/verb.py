"""The verb capacity, of the panel Decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import (
    CaCert,
    Engine,
    Full,
    Model,
    ScenarioFlags,
    StudyFlags,
    Target,
    TrafficFlags,
    WaitReady,
    WatchFlags,
    Workers,
    with_flags,
)
from loadgen.cli.terminal import stderr
from loadgen.errors import UsageError
from loadgen.units import parse_rate_per_s

if TYPE_CHECKING:
    from loadgen.workload.scaling import LoadUnit, Over

verbs = typer.Typer()
_WINDOW = {"duration": "20s"}
_FIRST_PROBE: Mapping[Over, Mapping[str, object]] = {
    "rate": {"rate": "2/s", **_WINDOW},
    "concurrency": {"concurrency": 1, **_WINDOW},
    "agents": {},
}
"""Load and window of the first capacity probe where the flags do not state them; the search finds
its own from there."""


@verbs.command(
    epilog="Example: slobench capacity capacity_search --target sim --attainment 90%",
)
@with_flags
def capacity(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    watch: WatchFlags,
    study: StudyFlags,
    target: Target = None,
    attainment: Annotated[
        str | None,
        typer.Option(
            help="The share of requests, or of trees of agents, that must meet the SLO. Default: "
            "the scenario's, or 99%."
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="The load that varies: rate, concurrency (closed-loop users), or agents (live, or "
            "per minute). Default: rate; concurrency with --users or --concurrency."
        ),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            help="Bounds of the search: 1/s:40/s, 2/min:40/min or 1:64. Default: found by the "
            "search."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Time for all probes, e.g. 10m; the search prints its best estimate."),
    ] = None,
    confidence: Annotated[str, typer.Option(help="Of the interval of the capacity.")] = "95%",
    precision: Annotated[
        str, typer.Option(help="The search ends when half the interval is this share of the value.")
    ] = "15%",
    model: Model = "",
    engine: Engine = "",
    ca_cert: CaCert = None,
    workers: Workers = "auto",
    wait_ready: WaitReady = None,
    full: Full = False,
) -> None:
    """Find the highest load that meets the SLO, with a confidence interval."""
    from loadgen.studies.capacity.files import request_slos
    from loadgen.studies.capacity.run import opened, search_in
    from loadgen.studies.capacity.spec import CapacitySpec
    from loadgen.studies.capacity.view import table
    from loadgen.studies.study import end
    from loadgen.workload.scaling import offered_load

    loads: tuple[Over, ...] = ("rate", "concurrency", "agents")
    is_closed = traffic.users is not None or traffic.concurrency is not None
    load = parse.read_choice("--over", over or loads[is_closed], loads)
    scenario = parse.choose_scenario(flags, traffic, defaults=_FIRST_PROBE[load])
    share = None if attainment is None else parse.read_share("--attainment", attainment)
    scenario, share = parse.with_limits(scenario, share)
    target = parse.read_target(target)
    options = parse.base_options(
        flags.plugin,
        n_workers=parse.read_workers(workers),
        engine=engine,
        model=model,
        target_settings=parse.target_settings(ca_cert),
        wait_ready_s=parse.read_wait_s(wait_ready),
    )
    spec = CapacitySpec(
        scenario=scenario,
        target=target,
        options=options,
        over=load,
        attainment=share,
        between=None if between is None else _between(between, offered_load(scenario, load).unit),
        budget_s=math.inf if budget is None else parse.read_duration_s("--budget", budget),
        confidence=_inside("--confidence", confidence, 0.5, 0.999),
        precision=_inside("--precision", precision, 0.002, 0.5),
    )
    with (
        parse.shared_watch(watch, [target]) as each,
        opened(spec, study.out, resume=study.resume) as place,
    ):
        spec = replace(spec, options=replace(options, watch=each))
        found = search_in(place, spec, stderr())
    end(
        found.to_json(),
        lambda: table(found, request_slos(scenario), is_full=full),
        as_json=study.json,
        exit_code=found.exit_code,
        files={"report": place.directory / "report.html"},
    )


def _between(text: str, unit: LoadUnit) -> tuple[float, float]:
    """`1/s:40/s`, `2/min:40/min` agents, or `1:64` users or live agents."""
    low, colon, high = text.partition(":")
    example = {"req/s": "1/s:40/s", "agents/min": "2/min:40/min"}.get(unit, "1:64")
    try:
        if not colon:
            raise ValueError("expected two loads")
        read = {"req/s": _rate_per_s, "agents/min": _rate_per_min}.get(unit, _users)
        bounds = read(low), read(high)
    except ValueError as error:
        raise UsageError(f"--between {text}: {error}; write e.g. {example}") from None
    if not bounds[0] < bounds[1]:
        raise UsageError(f"--between {text}: the first must be lower than the second: {example}")
    return bounds


def _rate_per_s(text: str) -> float:
    return parse_rate_per_s(parse.with_unit(text, "/s"))


def _rate_per_min(text: str) -> float:
    return 60.0 * parse_rate_per_s(parse.with_unit(text, "/min"))


def _users(text: str) -> float:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no whole number of users or agents")
    return float(text)


def _inside(flag: str, text: str, least: float, most: float) -> float:
    share = parse.read_share(flag, text)
    if not least <= share <= most:
        raise UsageError(f"{flag} {text}: expected {100 * least:g} % to {100 * most:g} %")
    return share
