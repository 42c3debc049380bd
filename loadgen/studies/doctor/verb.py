"""The verb doctor, of the panel Measure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadgen.cli import parse
from loadgen.cli.flags import (
    Json,
    ScenarioFlags,
    TrafficFlags,
    WaitReady,
    with_flags,
)
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError
from loadgen.workload.traffic_flags import LENGTHS, LOADS, flag_of

if TYPE_CHECKING:
    pass

PANEL = "Measure"
verbs = typer.Typer()
_DOCTOR_TRAFFIC: Mapping[str, object] = {"input_len": 512, "output_len": 128, "duration": "10s"}
"""Lengths and window of doctor's traffic where the flags do not state them."""


@verbs.command(
    rich_help_panel=PANEL,
    epilog="Example: slobench doctor --rate 20 --input-len 512 --output-len 128",
)
@with_flags
def doctor(
    traffic: TrafficFlags,
    target: Annotated[
        str | None,
        typer.Option(help="Check a server: a URL, a target file, `reference` or `mock`."),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Check our timestamps against a C server that logs its own (needs cc)."
        ),
    ] = False,
    budget: Annotated[str, typer.Option(help="Time for the search or the proof.")] = "60s",
    model: Annotated[
        str, typer.Option(help="With --target: the API's model field. Default: from /v1/models.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="With --target reference or mock: its settings.")
    ] = "",
    wait_ready: WaitReady = None,
    json: Json = False,
) -> None:
    """Check how much load this machine can measure accurately, whether it can measure the traffic
    of the flags (--rate 20 --output-len 128), or whether a server can be measured."""
    from loadgen.run.run_options import RunOptions
    from loadgen.studies.doctor.run import (
        check_accuracy,
        check_machine,
        check_server,
        check_traffic,
        longest_lengths,
    )
    from loadgen.studies.doctor.view import tables

    console = Console(stderr=True, highlight=False, markup=False)
    given = {name for name, value in asdict(traffic).items() if value is not None}
    longest = None
    if given:
        if prove:
            raise UsageError("--prove has rates and lengths of its own: leave the traffic out")
        if target is None and given.isdisjoint(LOADS):
            raise UsageError("the traffic has no load: add --rate N or --concurrency N")
        load = {} if target is None else {"rate": "1/s"}
        scenario = parse.choose_scenario(
            ScenarioFlags(), traffic, defaults={**_DOCTOR_TRAFFIC, **load}
        )
        longest = longest_lengths(scenario)
    if target is not None:
        if prove:
            raise UsageError("--prove checks this machine, --target a server: choose one")
        if loads := given.difference(LENGTHS):
            flags = ", ".join(sorted(map(flag_of, loads)))
            raise UsageError(
                f"{flags}: with --target, doctor sends single requests and needs only --input-len "
                "and --output-len; without --target it checks that this machine can send the "
                "traffic"
            )
        options = RunOptions(
            engine=engine,
            model=model,
            environ=dict(os.environ),
            wait_ready_s=parse.read_wait_s(wait_ready),
        )
        facts = check_server(target, options, console, longest)
    elif model or engine or wait_ready:
        raise UsageError("--model, --engine and --wait-ready need --target")
    elif given:
        budget_s, cc = parse.read_budget_s(budget), os.environ.get("CC", "")
        facts = check_traffic(scenario, budget_s, parse.cache_dir(os.environ), cc)
    else:
        check = check_accuracy if prove else check_machine
        cc = os.environ.get("CC", "")
        facts = check(parse.read_budget_s(budget), parse.cache_dir(os.environ), cc, console)
    if json:
        print_json(facts.to_json())
    else:
        stdout().print(tables(facts.to_json()))
    raise typer.Exit(facts.exit_code)
