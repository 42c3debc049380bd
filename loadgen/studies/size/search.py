"""The capacity of each configuration of a replica, for the same draws of simulated traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from loadgen.errors import UsageError
from loadgen.lab.sim_options import SimOptions, sim_options
from loadgen.lab.simulate import record
from loadgen.lab.simulated_engine import build
from loadgen.measure.attainment import due_rows, meets_own, slos_by_class
from loadgen.measure.per_request import per_request
from loadgen.measure.slo import parse_slo
from loadgen.records import Run
from loadgen.studies.capacity.next_probe import Question
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.studies.modes.capacity import at_rate, outcome_text
from loadgen.studies.modes.seed_capacity import (
    FIRST_STEP,
    NEXT_STEP,
    SeedCapacity,
    Tried,
    capacity_of,
    next_level,
)
from loadgen.studies.modes.spec import seeds_from
from loadgen.studies.size.configurations import Axes, Configuration, combinations, ranked
from loadgen.studies.size.demand import Demand
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

_CONFIDENCE = 0.95


def best_engine(
    scenario: Scenario,
    engine: Mapping[str, str],
    axes: Axes,
    target: float,
    demand: Demand,
    n_draws: int,
    console: Console,
) -> tuple[str, list[Configuration]]:
    """The settings of the configuration with the highest goodput per GPU, and all configurations,
    the best first. `target` is the share of the requests that must meet the SLO.

    For each configuration and draw the highest rate is searched as `modes --capacity` does, with
    windows of equally many requests. Raises UsageError if no configuration meets the SLO.
    """
    question = question_of(CapacitySpec(scenario, "sim", attainment=target))
    seeds = seeds_from(scenario, n_draws)
    engines: dict[str, str] = {}
    gpus: dict[str, int] = {}
    capacities: dict[str, dict[int, float]] = {}
    reasons: dict[str, str] = {}
    listed = list(combinations(engine, axes))
    for number, (settings, own) in enumerate(listed, 1):
        options = sim_options(own)
        engines[settings] = ",".join(f"{key}={value}" for key, value in own.items())
        gpus[settings] = options.n_gpus
        try:
            build(options, is_sharing=False)
        except UsageError as error:
            reasons[settings] = str(error)
        else:
            draws, last = _capacities(scenario, options, question, seeds)
            if draws:
                capacities[settings] = draws
            else:
                reasons[settings] = outcome_text(last)
        said = reasons.get(settings) or outcome_text(last)
        _print(console, f"[{number}/{len(listed)}] {settings}: {said}")
    if not capacities:
        raise UsageError(
            "--search: no configuration meets the SLO; "
            + "; ".join(f"{settings}: {reason}" for settings, reason in reasons.items())
        )
    order = ranked(gpus, capacities, reasons, demand, _CONFIDENCE)
    return engines[order[0].settings], order


def _capacities(
    scenario: Scenario, options: SimOptions, question: Question, seeds: Sequence[int]
) -> tuple[dict[int, float], SeedCapacity]:
    """The capacity by draw, and that of the last draw; no draw if the first has no capacity."""
    found = _capacity(scenario, options, question, seeds[0], question.start, FIRST_STEP)
    if found.outcome != "found":
        return {}, found
    draws = {seeds[0]: found.value}
    for seed in seeds[1:]:
        found = _capacity(scenario, options, question, seed, draws[seeds[0]], NEXT_STEP)
        if found.outcome == "found":
            draws[seed] = found.value
    return draws, found


def _capacity(
    scenario: Scenario,
    options: SimOptions,
    question: Question,
    seed: int,
    start: float,
    step: float,
) -> SeedCapacity:
    tried: list[Tried] = []
    quiet = Console(quiet=True)
    while (level := next_level(tried, question.target, start, step)) is not None:
        traffic = at_rate(scenario, question, level, seed)
        run = record(traffic, make_plan(traffic), options, quiet)
        tried.append(Tried(level, *due_and_met(run)))
    return capacity_of(tried, question.target)


def due_and_met(run: Run) -> tuple[int, int]:
    """The requests due in the window, and those of them that met all their SLOs."""
    due = due_rows(run)
    shared = [parse_slo(text) for text in run.manifest.slo]
    met = due & meets_own(run, per_request(run), shared, slos_by_class(run))
    return int(due.sum()), int(met.sum())


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)
