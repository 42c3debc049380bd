"""Flags of the engine lab's verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen.cli import lab_command as command
from loadgen.cli import measure_command
from loadgen.cli import replay_command as replaying
from loadgen.cli.flags import (
    Concurrency,
    Confidence,
    Duration,
    InputLen,
    Json,
    OutputLen,
    Plugin,
    Rate,
    Scenario,
    Seed,
    Set,
    Slo,
    Warmup,
)
from loadgen.cli.parse import choose_scenario

PANEL = "Engine lab"
verbs = typer.Typer()


@verbs.command(
    rich_help_panel=PANEL, epilog="Example: slobench serve --mode chunked --shape tiny --port 8000"
)
def serve(
    mode: Annotated[
        str, typer.Option(help="The batching mode; `slobench list modes` has them all.")
    ] = "chunked",
    shape: Annotated[
        str, typer.Option(help="A random-weight shape, or a local model directory.")
    ] = "tiny",
    device: Annotated[
        str, typer.Option(help="cpu (torch), cuda, sim (steps only take time), or toy (for tests).")
    ] = "cpu",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    threads: Annotated[int, typer.Option(help="torch threads.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens per sequence at most.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences per step at most.")] = None,
    token_budget: Annotated[
        str | None, typer.Option(help="Tokens per step at most, or slo (chunked); else the mode's.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of 16 tokens.")] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Waiting requests at most; further ones get 429.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random weights.")] = None,
    model_name: Annotated[str | None, typer.Option(help="The model id to answer to.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key to ask for.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Where the step and event logs go (Parquet).")
    ] = None,
    drain: Annotated[
        str | None, typer.Option(help="What running requests get at SIGTERM, e.g. 10s.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A knob of the mode or the device, key=value; repeatable."),
    ] = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Serve the bundled engine on the OpenAI API."""
    options: dict[str, Any] = {
        "mode": mode, "shape": shape, "device": device, "host": host, "port": port,
        "threads": threads, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
        "token_budget": token_budget, "kv_blocks": kv_blocks, "max_queue": max_queue,
        "seed": seed, "model_name": model_name, "api_key_env": api_key_env, "log_dir": log_dir,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    raise typer.Exit(command.serve(given, drain, set_ or [], plugin or [], json))


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench simulate chat_poisson --mode chunked --shape 8b --hardware h200",
)
def simulate(
    scenario: Scenario = None,
    mode: Annotated[str, typer.Option(help="The batching mode.")] = "chunked",
    shape: Annotated[str, typer.Option(help="A shape, or a local model directory.")] = "8b",
    hardware: Annotated[
        str, typer.Option(help="h200, h100, a100, several (4xh200), or cpu for a small shape.")
    ] = "h200",
    engine: Annotated[
        str, typer.Option(help="Further settings, e.g. token_budget=512,max_num_seqs=64.")
    ] = "",
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's directory. Default: runs/<scenario>-<time>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    confidence: Confidence = None,
    plugin: Plugin = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Decide a run of the bundled engine again, from its log, and compare."),
    ] = None,
    misses: Annotated[
        Path | None,
        typer.Option(help="Say whose fault the missed promises of such a run are."),
    ] = None,
    json: Json = False,
) -> None:
    """Run a scenario in virtual time on a simulated engine: `run --target sim`, said shorter.

    With --replay RUN instead: put what the bundled engine was asked in that run (measured with
    --engine log_level=full) to the same scheduler again, at the same instants, and say whether it
    decides the same: exit code 0, or 1 and the first difference. With --misses RUN: blame each
    promise that the engine missed on the request, the capacity, the policy (another one, simulated
    with the same requests, keeps it) or interference.
    """
    others = {"the scenario": scenario, "--engine": engine, "--out": out, "--slo": slo}
    if misses is not None:
        others["--replay"] = replay
        replaying.misses(misses, plugin or [], json, others)
        return
    if replay is not None:
        raise typer.Exit(replaying.replay(replay, plugin or [], json, others))
    chosen = choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, slo=slo, seed=seed,
    )  # fmt: skip
    settings = f"mode={mode},shape={shape},hardware={hardware},{engine}"
    exit_code = measure_command.run(
        chosen, "sim", "", settings, out, force, "auto", "fast", confidence, plugin or [], json
    )
    raise typer.Exit(exit_code)


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench modes long_prompt_interference --modes chunked,bucketed",
)
def modes(
    scenario: Scenario = None,
    modes: Annotated[
        str,
        typer.Option(help="The modes, e.g. static,continuous,chunked:token_budget=512."),
    ] = "static,continuous,prefill_first,chunked",
    rates: Annotated[
        str | None,
        typer.Option(help="Offered rates per second, from:to:step or a list: 2:20:2 or 2,4,8."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Schedules per rate: the scenario's seed and the next ones.")
    ] = 1,
    target: Annotated[
        str, typer.Option(help="sim (virtual time), or reference: the real engine, mode by mode.")
    ] = "sim",
    engine: Annotated[
        str, typer.Option(help="Settings for every mode, e.g. shape=8b,hardware=h200.")
    ] = "",
    rate: Rate = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    duration: Duration = None,
    warmup: Warmup = None,
    max_concurrency: Concurrency = None,
    slo: Slo = None,
    seed: Seed = None,
    set_: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the results go; one that was interrupted goes on from there."),
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Simulating processes, or auto: one per core.")
    ] = "auto",
    confidence: Confidence = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Run the same requests against several batching modes and show them side by side."""
    chosen = choose_scenario(
        scenario, set_ or [], plugin or [], rate=rate, input_len=input_len, output_len=output_len,
        duration=duration, warmup=warmup, max_concurrency=max_concurrency, slo=slo, seed=seed,
    )  # fmt: skip
    raise typer.Exit(
        command.modes(
            chosen, modes, rates, seeds, target, engine, out, workers, confidence, plugin or [],
            json,
        )
    )  # fmt: skip
