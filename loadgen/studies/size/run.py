"""`slobench size`: from a capacity, measured or simulated, to replicas and GPUs.

The lower end of the capacity's interval is divided into the peak with its headroom. That many
replicas behind their router are then simulated with the scenario's own bursts, and replicas are
added until the SLO is met under every schedule. Replicas that may fail come on top. Of several
configurations, that with the highest goodput per GPU is sized.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from loadgen.archive.store import read_manifest_file, read_run
from loadgen.errors import RunInvalid, UsageError
from loadgen.lab.sim_options import read_settings, sim_options
from loadgen.lab.simulate import record
from loadgen.measure.attainment import measured_window
from loadgen.measure.server_load import points
from loadgen.records import Run
from loadgen.run.run_options import RunOptions
from loadgen.studies.capacity.files import CAPACITY
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import CapacityFile
from loadgen.studies.capacity.run import opened, search_in, seed_of
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.studies.size.configurations import Axes, Configuration, fewest
from loadgen.studies.size.demand import (
    Demand,
    Interval,
    Variant,
    by_division,
    costs,
    sensitivity,
)
from loadgen.studies.size.result import Size, Trial
from loadgen.studies.size.search import best_engine, due_and_met
from loadgen.studies.study import MARKER, Place, Study
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

SIZE = Study("size", "sizing", Size)
_ROUTERS = ("round_robin", "power_of_two", "join_shortest_queue")
SIMULATED = "sim"
_PRECISION = 0.05  # of the simulated capacity
_POWER = "gpu_power_w"  # of all GPUs of the server together


@dataclass(frozen=True)
class SizeSpec:
    """Settings of a sizing. `capacity` is the directory of a capacity search; `engine` the settings
    of the simulated replica ("" : none is simulated, unless the search was simulated). The
    simulated search has `budget_s` of virtual time; `axes` are settings to search over. Without
    `watts_per_gpu`, the power is that which the server reported during the search, if it did.
    `cache_dir` caches the plotting bundle of the page."""

    scenario: Scenario
    demand: Demand
    capacity: Path | None
    engine: str
    router: str = "power_of_two"
    attainment: float | None = None
    n_schedules: int = 3
    budget_s: float = 1800.0
    axes: Axes = field(default_factory=dict)
    price_per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    cache_dir: Path | None = None


def size(place: Place[Size], spec: SizeSpec, console: Console) -> Size:
    """The replicas and GPUs for a demand; writes size.json and report.html, and the files of a
    simulated capacity search to `capacity/`, where it continues an interrupted search.

    Raises UsageError for a capacity that cannot be used; KeyboardInterrupt when interrupted: the
    search stays.
    """
    demand, notes, engine = spec.demand, list[str](), spec.engine
    target = question_of(_search_spec(spec)).target
    order: Sequence[Configuration] = ()
    capacity: Interval | None = None
    simulated: Interval | None = None  # of the simulated replica
    if spec.capacity is not None:
        capacity, search = read_capacity(spec.capacity, target)
        notes += _differences(spec, search)
        if search.definition.target == SIMULATED:
            simulated, engine = capacity, search.definition.engine
    if spec.axes:
        engine, order = best_engine(
            spec.scenario,
            read_settings(engine),
            spec.axes,
            target,
            demand,
            spec.n_schedules,
            console,
        )
        demand = replace(demand, gpus_per_replica=order[0].gpus)
        notes += _fewer(order)
    if simulated is None and engine:
        simulated = _searched(spec, engine, place, console)
    capacity = capacity or simulated
    assert capacity is not None, "a sizing has a capacity or an engine"
    n_divided = by_division(demand.design_per_s, capacity.low)
    trials: list[Trial] = []
    n_serving: int | None = n_divided
    load_per_s = None
    others: list[Variant] = []
    if simulated is None:
        notes.append(
            "bursts and routing were not simulated: the capacity was measured and no simulated "
            "engine is given; add --hardware FILE"
        )
    else:
        load_per_s = demand.design_per_s * (simulated.value or simulated.low) / capacity.low
        simulation = _Simulation(
            spec.scenario, engine, load_per_s, target, spec.n_schedules, console
        )
        n_serving = simulation.least(spec.router, n_divided)
        if n_serving == n_divided > 1:
            simulation.trial(spec.router, n_divided - 1)
        for router in _ROUTERS:
            if n_serving is not None and router != spec.router:
                n = simulation.least(router, n_divided)
                if n is not None:
                    n += demand.survive
                    others.append(Variant(f"router {router}", n, n * demand.gpus_per_replica))
        trials = simulation.trials
    variants: Sequence[Variant] = ()
    n_replicas = n_gpus = spent = None
    if n_serving is not None:
        n_replicas = n_serving + demand.survive
        n_gpus = n_replicas * demand.gpus_per_replica
        variants = [*sensitivity(demand, capacity, n_serving - n_divided), *others]
        tokens_per_s = _tokens_per_s(spec.scenario, demand.peak_per_s)
        watts = spec.watts_per_gpu
        if watts is None and spec.capacity is not None:
            near_per_s = capacity.value or capacity.low
            power = measured_power(
                spec.capacity, search.probes, near_per_s, demand.gpus_per_replica
            )
            if power is not None:
                watts = power.watts_per_gpu
                notes.append(
                    f"energy: the server reported {watts:.4g} W per GPU at "
                    f"{power.level_per_s:.3g} req/s"
                )
        spent = costs(demand, n_gpus, tokens_per_s, spec.price_per_gpu_hour, watts)
    result = Size(
        demand=demand,
        capacity=capacity,
        target=target,
        router=spec.router,
        n_divided=n_divided,
        n_serving=n_serving,
        n_replicas=n_replicas,
        n_gpus=n_gpus,
        simulated_per_s=load_per_s,
        trials=tuple(trials),
        sensitivity=tuple(variants),
        costs=spent,
        notes=tuple(notes),
        exit_code=1 if n_serving is None else 0,
        configurations=tuple(order),
    )
    place.write(result)
    from loadgen.studies.size.page import render

    page = render(result, spec.scenario, place.marker.command, spec.cache_dir)
    place.write_text("report.html", page)
    return result


def read_capacity(directory: Path, target: float) -> tuple[Interval, CapacityFile]:
    """The capacity that a search stored, and the whole of its file. Raises UsageError for a
    directory without a search, or a search without a lower bound in requests per second, RunInvalid
    for a file that was changed, or whose bounds are out of order."""
    search = CAPACITY.read(directory)
    answer = search.answer
    if answer.unit != "req/s":
        raise UsageError(f"--capacity {directory}: counts {answer.unit}; search with --over rate")
    if answer.low is None:
        raise UsageError(
            f"--capacity {directory}: {answer.sentence}: no lower end to divide by; continue "
            "the search with --resume and more time"
        )
    if answer.attainment < target:
        raise UsageError(
            f"--capacity {directory}: was searched for {100 * answer.attainment:g} % of the "
            f"requests, below the {100 * target:g} % of this sizing; search again, or set "
            "--attainment"
        )
    high = None if answer.value is None else answer.high
    bounds = [bound for bound in (answer.low, answer.value, high) if bound is not None]
    if answer.low <= 0 or bounds != sorted(bounds):
        texts = ", ".join(f"{bound:.4g}" for bound in bounds)
        raise RunInvalid(
            f"{directory / CAPACITY.file}: its bounds are not above 0 and in order ({texts} "
            f"{answer.unit}): no capacity to divide by; search again"
        )
    return Interval(answer.low, answer.value, high, answer.confidence), search


def gpus_of(capacity: Path | None, hardware: str, engine: str = "") -> int:
    """GPUs of a replica: the label `gpus` of the measured server, else the number in `4xh200`, else
    1, times the stages of a `pipeline` among the settings of the engine."""
    if capacity is not None:
        for path in sorted(capacity.glob("probes/*/manifest.json")):
            labels = read_manifest_file(path.parent)[0].target.labels
            if labels.gpus:
                return labels.gpus
    settings = read_settings(engine)
    return sim_options({**settings, "hardware": hardware} if hardware else settings).n_gpus


class _Simulation:
    """Simulations of several replicas at the same load; each number is simulated once."""

    def __init__(
        self,
        scenario: Scenario,
        engine: str,
        load_per_s: float,
        target: float,
        n_schedules: int,
        console: Console,
    ) -> None:
        self._engine, self._target, self._console = read_settings(engine), target, console
        phases = scenario.phases
        loaded = scaled(scenario, load_per_s, "rate")
        # The seeds of a capacity search begin at 1: these schedules are others.
        self._scenarios = [
            with_window(loaded, phases.warmup, phases.measure, seed_of(scenario, 1000 + number))
            for number in range(n_schedules)
        ]
        self._load_per_s = load_per_s
        self._trials: dict[tuple[str, int], Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        return list(self._trials.values())

    def least(self, router: str, n_first: int) -> int | None:
        """The least number of replicas from `n_first` on that meets the SLO; None up to twice as
        many."""
        for n in range(n_first, 2 * n_first + 3):
            if self.trial(router, n).is_met:
                return n
        return None

    def trial(self, router: str, n: int) -> Trial:
        if (router, n) not in self._trials:
            self._trials[router, n] = self._run(router, n)
        return self._trials[router, n]

    def _run(self, router: str, n: int) -> Trial:
        options = sim_options({**self._engine, "replicas": str(n), "router": router})
        quiet = Console(quiet=True)
        shares = []
        for scenario in self._scenarios:
            run = record(scenario, make_plan(scenario), options, quiet)
            shares.append(attainment(run))
            if shares[-1] < self._target:
                break
        is_met = min(shares) >= self._target
        self._console.print(
            f"{n} replicas behind {router} at {self._load_per_s:.4g} req/s: "
            f"{100 * min(shares):.2f} % met the SLO",
            markup=False,
            soft_wrap=True,
        )
        return Trial(router, n, tuple(shares), is_met)


def attainment(run: Run) -> float:
    """The share of the requests due in the window that met all their SLOs."""
    n_due, n_met = due_and_met(run)
    return n_met / max(1, n_due)


def _search_spec(spec: SizeSpec, engine: str = "") -> CapacitySpec:
    options = RunOptions(engine=engine, environ=dict(os.environ))
    return CapacitySpec(
        spec.scenario,
        SIMULATED,
        options,
        attainment=spec.attainment,
        budget_s=spec.budget_s,
        precision=_PRECISION,
    )


def _fewer(order: Sequence[Configuration]) -> list[str]:
    """A note on a configuration that needs fewer GPUs at the peak than the best per GPU."""
    best, least = order[0], fewest(order)
    if best.gpus_at_peak == least.gpus_at_peak:
        return []
    return [
        f"{least.settings} needs {least.gpus_at_peak} GPUs at this peak, by division, instead of "
        f"{best.gpus_at_peak}: its replicas are of another size"
    ]


def _searched(spec: SizeSpec, engine: str, place: Place[Size], console: Console) -> Interval:
    console.print(f"capacity of a simulated replica ({engine}):", markup=False, soft_wrap=True)
    search, directory = _search_spec(spec, engine), place.directory / "capacity"
    with opened(search, directory, resume=(directory / MARKER).exists()) as inner:
        answer = search_in(replace(inner, out=place.directory), search, console)
    if answer.is_interrupted:
        raise KeyboardInterrupt
    if answer.low is None:
        raise UsageError(f"the simulated replica has no capacity: {answer.sentence()}")
    high = None if answer.value is None else answer.high
    return Interval(answer.low, answer.value, high, answer.confidence)


def _differences(spec: SizeSpec, search: CapacityFile) -> list[str]:
    """Notes on what the search measured and this sizing assumes otherwise. The rate is scaled, and
    phases and seed vary between probes."""
    own, searched = spec.scenario.resolved(), search.definition.scenario
    ignored = {"phases", "seed", "name", "description", "arrivals"}
    keys = {*own, *searched} - ignored
    current = json.loads(json.dumps(own))
    changed = sorted(key for key in keys if current.get(key) != searched.get(key))
    return [f"the capacity was searched with another scenario: {', '.join(changed)}"] * bool(
        changed
    )


def _tokens_per_s(scenario: Scenario, peak_per_s: float) -> tuple[float, float]:
    """Input and output tokens per second that are planned at the peak."""
    schedule = make_plan(scaled(scenario, peak_per_s, "rate")).schedule
    length_s = scenario.phases.warmup + scenario.phases.measure
    n_input, n_output = (float(schedule[f"{k}_tokens"].sum()) for k in ("input", "output"))
    return n_input / length_s, n_output / length_s


@dataclass(frozen=True)
class MeasuredPower:
    """Watts of a GPU, the mean over the measured window of a probe at `level_per_s` requests/s."""

    watts_per_gpu: float
    level_per_s: float


def measured_power(
    directory: Path, probes: Sequence[Probe], near_per_s: float, gpus_per_replica: int
) -> MeasuredPower | None:
    """The power in that of the probes, stored in the directory of a search, whose load is nearest
    to `near_per_s`. None if no measured probe read the power."""
    measured = [probe for probe in probes if probe.grade == "measured"]
    for probe in sorted(measured, key=lambda probe: abs(probe.level - near_per_s)):
        place = directory / "probes" / probe.name
        if not (place / "server.parquet").is_file():
            continue
        run = read_run(place)
        window = measured_window(run)
        t_s, watts = points(run, _POWER)
        watts = watts[(t_s >= window.start_s) & (t_s <= window.end_s)]
        if len(watts):
            return MeasuredPower(float(watts.mean()) / gpus_per_replica, probe.level)
    return None
