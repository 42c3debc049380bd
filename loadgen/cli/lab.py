"""The verbs serve and simulate, of the panel Engine lab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import parse
from loadgen.cli.flags import (
    Clear,
    Confidence,
    Force,
    Full,
    Json,
    Plugin,
    RunDirectory,
    ScenarioFlags,
    TrafficFlags,
    with_flags,
)
from loadgen.cli.measure import run_scenario
from loadgen.cli.terminal import print_json
from loadgen.errors import UsageError

if TYPE_CHECKING:
    pass

verbs = typer.Typer()
_DIFFERENT = 1
_N_NAMED, _N_PRINTED = 3, 10


@verbs.command(epilog="Example: slobench serve --mode chunked --shape tiny --port 8000")
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
        "mode": mode,
        "shape": shape,
        "device": device,
        "host": host,
        "port": port,
        "threads": threads,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "token_budget": token_budget,
        "kv_blocks": kv_blocks,
        "max_queue": max_queue,
        "seed": seed,
        "model_name": model_name,
        "api_key_env": api_key_env,
        "cors": cors,
        "log_dir": log_dir,
        "operator": operator,
        "operator_token_env": operator_token_env,
        "allowed_host": tuple(allowed_host) if allowed_host else None,
        "drain_s": None if drain is None else parse.read_duration_s("--drain", drain),
    }
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
    clear: Clear = False,
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
    full: Full = False,
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
        clear=clear,
    )
    scenario = parse.choose_scenario(flags, traffic)
    raise typer.Exit(run_scenario(scenario, "sim", options, as_json=json, is_full=full))


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
