"""The verb modes, of the panel Engine lab."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED, NO_VERDICT
from loadgen.cli.flags import (
    Confidence,
    Full,
    ScenarioFlags,
    StudyFlags,
    TrafficFlags,
    with_flags,
)
from loadgen.cli.terminal import print_json, stderr
from loadgen.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, Group

    from loadgen.studies.modes.capacity import ComparedCapacities
    from loadgen.studies.modes.run import ComparedModes, ModesSpec
    from loadgen.studies.study import Place, Study
    from reports.ending import Ending

verbs = typer.Typer()
_CAPACITY_SEEDS = 8


@verbs.command(
    epilog="Example: slobench modes long_prompt_interference --modes chunked,bucketed",
)
@with_flags
def modes(
    flags: ScenarioFlags,
    traffic: TrafficFlags,
    study: StudyFlags,
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
    workers: Annotated[
        str, typer.Option(help="Simulating processes, or auto: one per core.")
    ] = "auto",
    confidence: Confidence = None,
    check_policy: Annotated[
        Path | None,
        typer.Option(
            "--check-policy",
            metavar="FILE",
            help="Compare nothing: check the batching policies in a Python file on random "
            "workloads. Exit code 1 if one breaks a rule.",
        ),
    ] = None,
    full: Full = False,
) -> None:
    """Run the same requests against several batching modes and compare them; with --capacity, the
    highest rate of each that meets the SLO, and the ratios to the best."""
    if check_policy is not None:
        if not flags.states_no_traffic(traffic):
            raise UsageError("--check-policy has workloads of its own: leave out the scenario")
        raise typer.Exit(_check_policies(check_policy, flags.plugin, study.json))
    from loadgen.lab.sim_options import read_settings
    from loadgen.run.manifest import recorded_command
    from loadgen.studies.modes.run import ModesSpec, check_target
    from loadgen.studies.modes.spec import read_modes, read_rates
    from loadgen.studies.study import end

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
    kind = _search_modes(spec, share) if capacity else _compare_modes(spec)
    with kind.study.opened(
        scenario.name,
        study.out,
        resume=study.resume,
        definition={"capacity": capacity},
        command=spec.command,
    ) as place:
        compared = kind.compare(place.directory, stderr())
        code = exit_code(compared)
        if compared.was_interrupted:
            place.print_interrupted(stderr(), compared.result.progress)
        if not compared.result.n_done:
            raise typer.Exit(code)
        kind.write(place, compared.result, spec.cache_dir)
    end(
        compared.result.to_json(),
        lambda: kind.tables(compared.result),
        as_json=study.json,
        exit_code=code,
        files={"report": place.directory / "modes.html"},
        ending=lambda: kind.ending(compared.result),
        is_full=full,
    )


def exit_code(compared: ComparedModes | ComparedCapacities) -> int:
    """130 after an interrupt, 3 where a mode has no valid run."""
    if compared.was_interrupted:
        return INTERRUPTED
    return NO_VERDICT if compared.result.without_valid_run else 0


@dataclass(frozen=True)
class _Kind:
    """A kind of comparison: how it is run, written and shown."""

    study: Study[Any]
    compare: Callable[[Path, Console], ComparedModes | ComparedCapacities]
    write: Callable[[Place[Any], Any, Path | None], None]
    tables: Callable[[Any], Group]
    ending: Callable[[Any], Ending]


def _check_policies(path: Path, plugins: Sequence[Path] | None, as_json: bool) -> int:
    """Checks the policies in a file and prints the answers; the exit code."""
    from loadgen.studies.modes.policy_file import check_file

    parse.load_plugins(plugins)
    checked = check_file(path)
    passes = all(policy.passes for policy in checked)
    if as_json:
        policies = [policy.to_json() for policy in checked]
        print_json({"schema": 1, "kind": "policy_check", "passes": passes, "policies": policies})
    else:
        typer.echo("\n".join(line for policy in checked for line in policy.lines()))
    return 0 if passes else 1


def _compare_modes(spec: ModesSpec) -> _Kind:
    from loadgen.studies.modes.run import MODES, compare
    from loadgen.studies.modes.table import write_all
    from loadgen.studies.modes.view import ending, tables

    return _Kind(MODES, partial(compare, spec), write_all, tables, ending)


def _search_modes(spec: ModesSpec, attainment: float | None) -> _Kind:
    from loadgen.studies.capacity.spec import CapacitySpec, question_of
    from loadgen.studies.modes.capacity import MODE_CAPACITIES, compare_capacity, write_capacity
    from loadgen.studies.modes.capacity_view import ending, tables

    scenario, share = parse.with_limits(spec.scenario, attainment)
    question = question_of(CapacitySpec(scenario, spec.target, attainment=share))
    limited = replace(spec, scenario=scenario)
    return _Kind(
        MODE_CAPACITIES,
        partial(compare_capacity, limited, question),
        write_capacity,
        tables,
        ending,
    )
