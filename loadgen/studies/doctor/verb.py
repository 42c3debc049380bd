"""The verb doctor, of the panel Measure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import (
    ScenarioFlags,
    StudyFlags,
    TrafficFlags,
    WaitReady,
    with_flags,
)
from loadgen.cli.terminal import stderr
from loadgen.errors import UsageError
from loadgen.workload.traffic_flags import LENGTHS, LOADS, flag_of

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.studies.doctor.result import Checkup
    from loadgen.studies.study import Place

verbs = typer.Typer()
_DOCTOR_TRAFFIC: Mapping[str, object] = {"input_len": 512, "output_len": 128, "duration": "10s"}
"""Lengths and window of doctor's traffic where the flags do not state them."""


@dataclass(frozen=True)
class _Directory(StudyFlags):
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the trials and the result in this directory. Default: not kept."),
    ] = None


@verbs.command(
    epilog="Example: slobench doctor --rate 20 --input-len 512 --output-len 128",
)
@with_flags
def doctor(
    traffic: TrafficFlags,
    study: _Directory,
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
    from loadgen.studies.study import end

    console, cc = stderr(), os.environ.get("CC", "")
    given = {name for name, value in asdict(traffic).items() if value is not None}
    _check_flags(given, target, prove, bool(model or engine or wait_ready))
    scenario, longest = None, None
    if given:
        load = {} if target is None else {"rate": "1/s"}
        scenario = parse.choose_scenario(
            ScenarioFlags(), traffic, defaults={**_DOCTOR_TRAFFIC, **load}
        )
        longest = longest_lengths(scenario)
    cache_dir = parse.cache_dir(os.environ)
    sent = None if scenario is None else scenario.resolved()
    definition = {"target": target, "prove": prove, "traffic": sent}
    with _directory(study, definition, console) as place:
        folder = None if place is None else place.directory / "trials"
        if target is not None:
            options = RunOptions(
                engine=engine,
                model=model,
                environ=dict(os.environ),
                wait_ready_s=parse.read_wait_s(wait_ready),
            )
            checkup = check_server(target, options, console, longest, folder)
        elif scenario is not None:
            budget_s = parse.read_budget_s(budget)
            checkup = check_traffic(scenario, budget_s, cache_dir, cc, folder)
        else:
            check = check_accuracy if prove else check_machine
            checkup = check(parse.read_budget_s(budget), cache_dir, cc, console, folder)
        if place is not None:
            place.write(checkup)
    end(
        checkup.to_json(),
        lambda: tables(checkup),
        as_json=study.json,
        exit_code=checkup.exit_code,
        files={} if place is None else {"result": place.directory / place.study.file},
    )


@contextmanager
def _directory(
    study: _Directory, definition: Mapping[str, object], console: Console
) -> Iterator[Place[Checkup] | None]:
    """The directory of a check; None without --out."""
    from loadgen.studies.doctor.run import DOCTOR

    if study.out is None and not study.resume:
        yield None
        return
    command = parse.base_options(None).command
    with DOCTOR.opened(
        "", study.out, resume=study.resume, definition=definition, command=command
    ) as place:
        try:
            yield place
        except KeyboardInterrupt:
            place.print_interrupted(console, "the finished trials are kept")
            raise


def _check_flags(given: set[str], target: str | None, prove: bool, has_server: bool) -> None:
    """Raises UsageError for flags that exclude each other; `given` are those of the traffic."""
    if given and prove:
        raise UsageError("--prove has rates and lengths of its own: leave the traffic out")
    if target is None:
        if given and given.isdisjoint(LOADS):
            raise UsageError("the traffic has no load: add --rate N or --concurrency N")
        if has_server:
            raise UsageError("--model, --engine and --wait-ready need --target")
        return
    if prove:
        raise UsageError("--prove checks this machine, --target a server: choose one")
    if loads := given.difference(LENGTHS):
        flags = ", ".join(sorted(map(flag_of, loads)))
        raise UsageError(
            f"{flags}: with --target, doctor sends single requests and needs only --input-len and "
            "--output-len; without --target it checks that this machine can send the traffic"
        )
