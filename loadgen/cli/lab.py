"""The verbs of the panel Engine lab: serve, simulate, modes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED
from loadgen.cli.flags import (
    Confidence,
    Force,
    Json,
    Plugin,
    RunDirectory,
    ScenarioFlags,
    TrafficFlags,
    with_flags,
)
from loadgen.cli.measure import run_scenario
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError

if TYPE_CHECKING:
    from loadgen.lab.modes import ModesResult, ModesSpec

PANEL = "Engine lab"
verbs = typer.Typer()
_DIFFERENT = 1
_N_NAMED, _N_PRINTED = 3, 10
_CAPACITY_SEEDS = 8


@verbs.command(
    rich_help_panel=PANEL, epilog="Example: slobench serve --mode chunked --shape tiny --port 8000"
)
def serve(
    mode: Annotated[
        str, typer.Option(help="The batching mode; `slobench list modes` shows all.")
    ] = "chunked",
    shape: Annotated[
        str, typer.Option(help="A random-weight shape, or a local model directory.")
    ] = "tiny",
    device: Annotated[
        str, typer.Option(help="cpu (torch), cuda, sim (steps only take time), or toy (for tests).")
    ] = "cpu",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    replicas: Annotated[
        int,
        typer.Option(min=1, help="Servers to start, on this port and the next; for a router."),
    ] = 1,
    threads: Annotated[int, typer.Option(help="torch threads.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens per sequence at most.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences per step at most.")] = None,
    token_budget: Annotated[
        str | None, typer.Option(help="Tokens per step at most, or slo (chunked); else the mode's.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of 16 tokens.")] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Waiting requests at most; further requests get 429.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random weights.")] = None,
    model_name: Annotated[str | None, typer.Option(help="The model id in the API.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key that clients need.")
    ] = None,
    cors: Annotated[
        str | None,
        typer.Option(help="Origin whose pages may use the server in a browser, or *.", metavar="X"),
    ] = None,
    operator: Annotated[
        str, typer.Option(help="token: requests that change the server need a token; open: none.")
    ] = "token",
    operator_token_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with that token; without it, one is printed."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name of the server for /debug; repeatable.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory of the step and event logs (Parquet).")
    ] = None,
    drain: Annotated[
        str | None, typer.Option(help="Time for running requests after SIGTERM, e.g. 10s.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the mode or the device, key=value; repeatable."),
    ] = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Serve the bundled engine on the OpenAI API. With --replicas, several equal servers, each on
    a port of its own, for a router in front of them; Ctrl-C ends all."""
    from reference_engine.serve import run as serve_until_stopped
    from reference_engine.serve_replicas import run_replicas
    from reference_engine.serving.serve_options import choose

    settings: dict[str, object] = {
        "mode": mode, "shape": shape, "device": device, "host": host, "port": port,
        "threads": threads, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
        "token_budget": token_budget, "kv_blocks": kv_blocks, "max_queue": max_queue,
        "seed": seed, "model_name": model_name, "api_key_env": api_key_env, "cors": cors,
        "log_dir": log_dir, "operator": operator, "operator_token_env": operator_token_env,
        "allowed_host": tuple(allowed_host) if allowed_host else None,
        "drain_s": None if drain is None else parse.read_duration_s("--drain", drain),
    }  # fmt: skip
    parse.load_plugins(plugin)
    try:
        options = choose({k: v for k, v in settings.items() if v is not None}, set_ or [])
    except UsageError as error:  # the server's options are this verb's flags
        source, _, problem = str(error).partition(": ")
        key, _, rest = problem.partition(": ")
        if source != "options":
            raise
        raise UsageError(f"--{key.replace('_', '-')}: {rest}") from None
    if json:
        print_json({"options": options.model_dump(mode="json")}, indent=None)
    raise typer.Exit(
        serve_until_stopped(options) if replicas == 1 else run_replicas(options, replicas)
    )


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench simulate chat_poisson --mode chunked --shape 8b --hardware h200. "
    "Cluster: slobench simulate chat_poisson --rate 60/s --replicas 8 --router jsq --engine "
    "fail=2@30s:20s,retries=2",
)
@with_flags
def simulate(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    mode: Annotated[str, typer.Option(help="The batching mode.")] = "chunked",
    shape: Annotated[str, typer.Option(help="A shape, or a local model directory.")] = "8b",
    hardware: Annotated[
        str, typer.Option(help="h200, h100, a100, several (4xh200), or cpu for a small shape.")
    ] = "h200",
    replicas: Annotated[
        str,
        typer.Option(
            help="Engines: 8, or groups: 4+4:hardware=a100;mode=static, or "
            "3:role=prefill+5:role=decode."
        ),
    ] = "1",
    router: Annotated[
        str,
        typer.Option(
            help="round_robin, random, central_queue, join_shortest_queue (jsq), power_of_two "
            "(p2c), least_kv, predicted_load or prefix_aware; parameters follow: jsq:stale=1s."
        ),
    ] = "round_robin",
    engine: Annotated[
        str,
        typer.Option(
            help="Further settings, e.g. token_budget=512,max_num_seqs=64; of clusters: "
            "docs/clusters.md."
        ),
    ] = "",
    out: RunDirectory = None,
    force: Force = False,
    confidence: Confidence = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Repeat the decisions of a run of the bundled engine from its log, and compare."
        ),
    ] = None,
    misses: Annotated[
        Path | None,
        typer.Option(help="Explain why each SLO of such a run was missed."),
    ] = None,
    json: Json = False,
) -> None:
    """Run a scenario in virtual time on a simulated engine: shorthand for `run --target sim`.

    With --replay RUN instead: give the scheduler the requests that the bundled engine received in
    that run (measured with --engine log_level=full), at the same instants, and compare its
    decisions: exit code 0 if they are identical, else 1 with the first difference. With --misses
    RUN: name the cause of each missed SLO: the request, the capacity, the policy (another mode,
    simulated with the same requests, meets the SLO) or interference.
    """
    others = {"the scenario": flags.scenario, "--engine": engine, "--out": out, "--slo": flags.slo}
    if misses is not None:
        _check_alone("--misses", {**others, "--replay": replay})
        parse.load_plugins(flags.plugin)
        _print_misses(misses, json)
        return
    if replay is not None:
        _check_alone("--replay", others)
        parse.load_plugins(flags.plugin)
        raise typer.Exit(_print_replay(replay, json))
    is_routed = replicas != "1" or router != "round_robin"  # replicas may be set by --engine
    cluster = f"replicas={replicas}," if replicas != "1" else ""
    cluster += f"router={router}," if is_routed else ""
    options = parse.base_options(
        flags.plugin,
        out_dir=out,
        force=force,
        engine=f"mode={mode},shape={shape},hardware={hardware},{cluster}{engine}",
        confidence=parse.read_confidence(confidence),
    )
    scenario = parse.choose_scenario(flags, traffic)
    raise typer.Exit(run_scenario(scenario, "sim", options, as_json=json))


def _check_alone(flag: str, others: Mapping[str, Any]) -> None:
    extra = [name for name, value in others.items() if value]
    if extra:
        raise UsageError(f"{flag} reads a recorded run as it is: leave out {', '.join(extra)}")


def _print_replay(directory: Path, as_json: bool) -> int:
    """Replays a recorded run of the bundled engine; the exit code."""
    from loadgen.lab.engine_log import replay

    result = replay(directory)
    if as_json:
        numbers = {name: getattr(result, name) for name in ("n_steps", "n_decisions", "n_open")}
        difference = None if result.difference is None else asdict(result.difference)
        print_json({"identical": result.is_identical, **numbers, "difference": difference})
    else:
        typer.echo(result.sentence())
    if result.n_open:
        typer.echo(f"note: {result.n_open} requests have no end in the log", err=True)
    return 0 if result.is_identical else _DIFFERENT


def _print_misses(directory: Path, as_json: bool) -> None:
    """Prints the causes of the SLOs that a recorded run of the bundled engine missed."""
    from loadgen.lab.engine_log import misses

    result = misses(directory)
    if as_json:
        rows = [miss.as_json() for miss in result.missed]
        print_json({"n_requests": result.n_requests, "misses": rows})
        return
    n_missed = len({miss.request_id for miss in result.missed})
    typer.echo(f"{n_missed} of {result.n_requests} requests missed an SLO")
    for cause, named in result.by_cause().items():
        if named:
            most = ", ".join(f"{name} {n}" for name, n in named.most_common(_N_NAMED) if name)
            typer.echo(f"  {cause:12} {named.total():5}" + (f"   {most}" if most else ""))
    for miss in result.missed[:_N_PRINTED]:
        typer.echo(f"  {miss.request_id}: {miss.cause}: {miss.sentence()}")
    if len(result.missed) > _N_PRINTED:
        typer.echo(f"  … and {len(result.missed) - _N_PRINTED} more (--json has all)")


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench modes long_prompt_interference --modes chunked,bucketed",
)
@with_flags
def modes(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    modes: Annotated[
        str,
        typer.Option(help="The modes, e.g. static,continuous,chunked:token_budget=512."),
    ] = "static,continuous,prefill_first,chunked",
    rates: Annotated[
        str | None,
        typer.Option(help="Offered rates per second, from:to:step or a list: 2:20:2 or 2,4,8."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Schedules per rate: the scenario's seed and the next ones. Default: 1, with "
            "--capacity 8.",
        ),
    ] = None,
    capacity: Annotated[
        bool,
        typer.Option(
            "--capacity", help="Compare the highest rates that meet the SLO, seed by seed."
        ),
    ] = False,
    attainment: Annotated[
        str | None,
        typer.Option(
            help="With --capacity: the share of requests that must meet the SLO. Default: the "
            "scenario's, or 99%."
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="sim (virtual time), or reference: the real engine, mode by mode.")
    ] = "sim",
    engine: Annotated[
        str, typer.Option(help="Settings for every mode, e.g. shape=8b,hardware=h200.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the results; interrupted work continues there."),
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Simulating processes, or auto: one per core.")
    ] = "auto",
    confidence: Confidence = None,
    json: Json = False,
) -> None:
    """Run the same requests against several batching modes and compare them; with --capacity, the
    highest rate of each that meets the SLO, and the ratios to the best."""
    from loadgen.lab.mode_spec import read_modes, read_rates
    from loadgen.lab.modes import ModesSpec, check_target, held_directory
    from loadgen.lab.simulated_engine import read_settings
    from loadgen.run.manifest import recorded_command

    if capacity and rates is not None:
        raise UsageError("--capacity finds the rates itself: leave out --rates")
    if attainment is not None and not capacity:
        raise UsageError("--attainment belongs to --capacity")
    scenario = parse.choose_scenario(flags, traffic)
    check_target(target)
    spec = ModesSpec(
        scenario,
        read_modes(modes),
        target,
        read_settings(engine),
        None if rates is None else read_rates(rates),
        seeds or (_CAPACITY_SEEDS if capacity else 1),
        parse.read_confidence(confidence) or 0.95,
        parse.read_workers(workers),
        flags.plugin or [],
        recorded_command(["slobench", *sys.argv[1:]]),
        parse.cache_dir(os.environ),
    )
    share = None if attainment is None else parse.read_share("--attainment", attainment)
    compare, write, tables = _search_modes(spec, share) if capacity else _compare_modes(spec)
    directory = out or Path("runs") / f"modes-{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}"
    with held_directory(directory, scenario):
        result = compare(directory, Console(stderr=True, highlight=False, markup=False))
        if result.facts["n_done"]:
            write(result.facts, directory, parse.cache_dir(os.environ))
    if result.facts["n_done"]:
        if json:
            print_json(result.facts)
        else:
            stdout().print(tables(result.facts))
        typer.echo(f"report: {directory / 'modes.html'}", err=True)
    raise typer.Exit(INTERRUPTED if result.was_interrupted else 0)


_Steps = tuple[
    Callable[[Path, Console], "ModesResult"],
    Callable[[dict[str, Any], Path, Path | None], None],
    Callable[[dict[str, Any]], Group],
]
"""Running a comparison of modes, writing its files, and its tables."""


def _compare_modes(spec: ModesSpec) -> _Steps:
    from loadgen.lab.mode_table import write_all
    from loadgen.lab.modes import compare
    from reports.modes.view import tables

    return partial(compare, spec), write_all, tables


def _search_modes(spec: ModesSpec, attainment: float | None) -> _Steps:
    from loadgen.capacity.capacity_spec import CapacitySpec, question_of
    from loadgen.lab.mode_capacity import compare_capacity, write_capacity
    from reports.modes.capacity_view import tables

    scenario, share = parse.with_limits(spec.scenario, attainment)
    question = question_of(CapacitySpec(scenario, spec.target, attainment=share))
    limited = replace(spec, scenario=scenario)
    return partial(compare_capacity, limited, question), write_capacity, tables
