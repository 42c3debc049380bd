"""`slobench solve`: the best size of each batch for a model on some hardware.

The batches of the mode `dynamic` are a queue whose optimum is computed exactly
(`smdp.batch_queue`), for several loads. The table of batch sizes is written as a file for that
mode, and simulated next to two rules on the same requests: greedy (serve all that wait) and the
best control limit (wait for q requests).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

import numpy as np
from rich.console import Console

from loadgen.errors import UsageError
from loadgen.lab.prompt_ids import PromptIds
from loadgen.lab.sim_options import SimOptions, sim_options
from loadgen.lab.simulated_engine import build
from loadgen.lab.virtual_client import VirtualClient
from loadgen.measure.statistics.intervals import mean_over
from loadgen.records import Requests
from loadgen.studies.capacity.run import seed_of
from loadgen.studies.solve.result import Averages, Level, Simulated, Solved
from loadgen.studies.solve.service_times import Lengths, service_times_s
from loadgen.studies.study import Place, Study
from loadgen.workload.renewal import Poisson
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from reference_engine.policies.dynamic import Dynamic
from reference_engine.smdp.batch_queue import BatchQueue, Objective, Policy, Value
from reference_engine.smdp.batch_table import BatchSheet, BatchTableFile
from reference_engine.smdp.decision_table import digest
from reference_engine.state.plan import Limits

SOLVE = Study("solve", "solution", Solved, resumes=False)
TABLE, LIMIT = "table.json", "control_limit.json"
MODE = Dynamic.kind
_FIXED = ("mode", "table", "load_window", "max_delay", "preferred_sizes", "finished_rows", "pad")
_CONFIDENCE = 0.95
_LENGTHS = 2000  # requests whose lengths are averaged
_WINDOW = 100  # requests over which the simulated engine measures its load
_WARMUP = 3 * _WINDOW
_BEYOND = 1.2  # the load up to which the table of the highest load is used
RULES = _GREEDY, _LIMIT_RULE, _TABLE_RULE = ("greedy", "best limit", "table")


@dataclass(frozen=True)
class SolveSpec:
    """Settings of a solution. `engine` are those of the simulated engine, `loads` shares of the
    highest rate that batches can serve. `watts` is the power of a batch in progress above that of
    an idle engine. `n_seeds` schedules (0: none) of `n_requests` are simulated at each load."""

    scenario: Scenario
    engine: Mapping[str, str]
    loads: tuple[float, ...]
    power_weight: float = 0.0
    late_weight: float = 0.0
    watts: float = 0.0
    n_seeds: int = 10
    n_requests: int = 1000

    @property
    def slo_s(self) -> float | None:
        """The e2e SLO of the scenario, for each request or for a percentile (s)."""
        slos = self.scenario.slos()
        limits = [slo.limit for slo in slos if slo.metric == "e2e_s" and slo.operator == "<="]
        return min(limits, default=None)

    def objective(self) -> Objective:
        """The weights. Raises UsageError for weights without their quantity."""
        if self.late_weight and self.slo_s is None:
            raise UsageError("--late-weight: needs an SLO on e2e, e.g. --slo 'e2e<=2s'")
        if self.power_weight and not self.watts:
            raise UsageError("--power-weight: needs the power of the hardware, e.g. --watts 400")
        return Objective(1.0, self.power_weight, self.late_weight, self.slo_s or 0.0)


def solve(place: Place[Solved], spec: SolveSpec, console: Console) -> Solved:
    """Solves and simulates; writes table.json, control_limit.json and solve.json.

    Raises UsageError for an engine whose batches are not those of the mode `dynamic`.
    """
    objective = spec.objective()
    options = _options(spec.engine)
    engine = build(options, is_sharing=False)
    policy = engine.policy
    assert isinstance(policy, Dynamic), "the options name the mode"
    state = engine.simulator.replicas[0].state
    cost, b_max = state.view().cost, min(policy.max_batch_size, state.limits.max_num_seqs)
    lengths = _lengths(spec.scenario)
    _check_room(lengths, b_max, state.kv.n_blocks * state.kv.block_tokens, state.limits)
    service_s = service_times_s(cost, lengths, b_max, policy.pad_to)
    most_per_s = float((np.arange(1, b_max + 1) / service_s).max())
    queues = [
        BatchQueue(load * most_per_s, service_s, spec.watts * service_s) for load in spec.loads
    ]
    solutions = [queue.solve(objective) for queue in queues]
    limits = [queue.best_control_limit(objective) for queue in queues]
    tables: dict[str, list[tuple[Policy, Iterable[float]]]] = {
        TABLE: [(solution.policy, solution.action_gap) for solution in solutions],
        LIMIT: [(queue.control_limit(q), ()) for queue, (q, _) in zip(queues, limits, strict=True)],
    }
    for name, sheets in tables.items():
        file = _file(name, spec, digest(cost), policy.pad_to, most_per_s, sheets)
        place.write_text(name, file.model_dump_json(by_alias=True) + "\n")
    levels = []
    for load, queue, solution, (q, limited) in zip(
        spec.loads, queues, solutions, limits, strict=True
    ):
        simulated = None
        if spec.n_seeds:
            simulated = _simulated(spec, queue.rate_per_s, place.directory, objective)
            console.print(f"{load:.0%} load: simulated {spec.n_seeds} schedules", markup=False)
        level = Level(
            load,
            queue.rate_per_s,
            q,
            _averages(queue.evaluate(queue.greedy(), objective)),
            _averages(limited),
            _averages(solution.value),
            tuple(solution.policy.tolist()),
            simulated,
        )
        levels.append(level)
    result = Solved(
        engine=engine.description,
        table=str(place.directory / TABLE),
        cost_model=digest(cost),
        weights={"latency": 1.0, "power": spec.power_weight, "late": spec.late_weight},
        slo_s=spec.slo_s,
        service_s=tuple(service_s.tolist()),
        levels=tuple(levels),
        notes=tuple(_notes(spec)),
    )
    place.write(result)
    return result


def _file(
    name: str,
    spec: SolveSpec,
    cost_model: str,
    pad_to: tuple[int, ...],
    most_per_s: float,
    sheets: Sequence[tuple[Policy, Iterable[float]]],
) -> BatchTableFile:
    """The table file of a policy per load; the ranges of load meet halfway."""
    middles = [(low + high) / 2 for low, high in pairwise(spec.loads)]
    ranges = pairwise([0.0, *middles, _BEYOND])
    settings = ", ".join(f"{key}={value}" for key, value in spec.engine.items())
    return BatchTableFile(
        schema=1,
        states="waiting_requests",
        actions="batch_size",
        name=f"{spec.scenario.name} {name.removesuffix('.json')}",
        about=f"Written by slobench solve for {settings}",
        cost_model=cost_model,
        pad_to=pad_to,
        tables=tuple(
            BatchSheet(
                load_per_s=(low * most_per_s, high * most_per_s),
                batch_sizes=tuple(sizes.tolist()),
                action_gap=tuple(gap if isfinite(gap) else None for gap in gaps),
            )
            for (low, high), (sizes, gaps) in zip(ranges, sheets, strict=True)
        ),
    )


def _options(engine: Mapping[str, str]) -> SimOptions:
    fixed = [key for key in engine if key in _FIXED]
    if fixed:
        raise UsageError(f"--engine {fixed[0]}: solve sets it; its batches are those of {MODE}")
    options = sim_options({"mode": MODE, **engine})
    if len(options.each_replica()) > 1 or options.placement.pipeline > 1 or options.async_depth:
        raise UsageError("--engine: solve describes a single engine without async_depth")
    return options


def _lengths(scenario: Scenario) -> list[Lengths]:
    schedule = make_plan(scenario).schedule[:_LENGTHS]
    if not len(schedule):
        raise UsageError(f"{scenario.name}: schedules no request")
    prompts, outputs = (np.maximum(schedule[f"{k}_tokens"], 1) for k in ("input", "output"))
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _check_room(lengths: Sequence[Lengths], b_max: int, kv_tokens: int, limits: Limits) -> None:
    """Raises UsageError where the largest batch does not fit the KV memory or a prefill step, so
    that its time would be another."""
    most = max(n_prompt + n_output for n_prompt, n_output in lengths)
    prompt = max(n_prompt for n_prompt, _ in lengths)
    n_fitting = min(kv_tokens // most, limits.max_step_tokens // prompt)
    if n_fitting < b_max:
        raise UsageError(
            f"--engine max_batch_size={b_max}: only {n_fitting} of the longest requests fit the "
            f"KV memory and a step; use max_batch_size={max(1, n_fitting)} or shorter requests"
        )


def _notes(spec: SolveSpec) -> Iterator[str]:
    arrivals = spec.scenario.arrivals
    if not isinstance(arrivals, Poisson):
        kind = "of classes" if arrivals is None else arrivals.kind
        yield f"the table is exact for Poisson arrivals; the scenario's are {kind}"
    pairs = set(_lengths(spec.scenario))
    if len(pairs) > 1:
        yield (
            "requests differ in length: the table is solved for the mean time of each batch size"
        )
    if spec.n_seeds == 1:
        yield "a single schedule has no interval: add --seeds 10"


def _averages(value: Value) -> Averages:
    fields = asdict(value)
    fields.pop("overflow")
    return Averages(**fields)


def _simulated(
    spec: SolveSpec, rate_per_s: float, directory: Path, objective: Objective
) -> Simulated:
    """The three rules on the same schedules at a rate."""
    window = {"load_window": f"{_WINDOW / rate_per_s:.6f}s", "max_delay": "1h"}
    settings = {
        _GREEDY: {"max_delay": "0s"},
        _LIMIT_RULE: {"table": str(directory / LIMIT), **window},
        _TABLE_RULE: {"table": str(directory / TABLE), **window},
    }
    loaded = scaled(spec.scenario, rate_per_s, "rate")
    warmup_s = _WARMUP / rate_per_s
    measured: dict[str, list[_Measured]] = {rule: [] for rule in RULES}
    for number in range(spec.n_seeds):
        seed = seed_of(spec.scenario, number)
        scenario = with_window(loaded, warmup_s, spec.n_requests / rate_per_s, seed)
        for rule in RULES:
            options = sim_options({"mode": MODE, **spec.engine, **settings[rule]})
            measured[rule].append(_measured(scenario, options, objective, rate_per_s, spec))
    costs = {rule: [m.cost for m in measured[rule]] for rule in RULES}

    def ratio(other: str) -> list[float]:
        return [a / b for a, b in zip(costs[_TABLE_RULE], costs[other], strict=True)]

    has_slo = spec.slo_s is not None
    return Simulated(
        {rule: float(np.mean([m.latency_s for m in measured[rule]])) for rule in RULES},
        {rule: float(np.mean([m.met for m in measured[rule]])) for rule in RULES if has_slo},
        mean_over(ratio(_GREEDY), _CONFIDENCE),
        mean_over(ratio(_LIMIT_RULE), _CONFIDENCE),
    )


@dataclass(frozen=True)
class _Measured:
    cost: float
    latency_s: float
    met: float


def _measured(
    scenario: Scenario,
    options: SimOptions,
    objective: Objective,
    rate_per_s: float,
    spec: SolveSpec,
) -> _Measured:
    plan = make_plan(scenario)
    engine = build(options, PromptIds(plan).is_sharing)
    client = VirtualClient(scenario, plan)
    simulator = engine.simulator
    simulator.run(client)
    rows, _, _ = client.tables()
    begin_s, end_s = scenario.phases.warmup, scenario.phases.warmup + scenario.phases.measure
    due = rows[(rows["released_s"] >= begin_s) & (rows["released_s"] < end_s)]
    responses_s = due["last_token_s"] - due["released_s"]
    latency_s = float(responses_s.mean())
    power_w = spec.watts * simulator.replicas[0].busy_s / simulator.now_s
    most = rate_per_s * objective.slo_s
    late_s = mean_excess(rows, most, begin_s, end_s) / rate_per_s if spec.late_weight else 0.0
    cost = latency_s + objective.power * power_w + objective.late * late_s
    met = float((responses_s <= objective.slo_s).mean())
    return _Measured(cost, latency_s, met)


def mean_excess(rows: Requests, most: float, begin_s: float, end_s: float) -> float:
    """The time average of the number of requests in the system above `most`, in a window."""
    times = np.concatenate([rows["released_s"], rows["last_token_s"]])
    steps = np.repeat([1, -1], len(rows))
    order = np.argsort(times, kind="stable")
    at = np.clip(times[order], begin_s, end_s)
    inside = np.cumsum(steps[order])
    return float(np.maximum(inside[:-1] - most, 0) @ np.diff(at)) / (end_s - begin_s)
