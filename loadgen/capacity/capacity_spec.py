"""What a search for capacity is asked, and the same as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loadgen.errors import UsageError
from loadgen.measure.capacity.capacity_result import Unit
from loadgen.measure.capacity.next_probe import Question
from loadgen.measure.slo import parse_slo
from loadgen.measure.verdict import IMPLIED_ATTAINMENT
from loadgen.run.run_options import RunOptions
from loadgen.workload.scaling import Over, offered_load
from loadgen.workload.scenario import Scenario

_SHORTEST = 0.25  # of the scenario's window, where its rate is steady


@dataclass(frozen=True)
class CapacitySpec:
    """What to search. `attainment` None: what the scenario promises, else 99 %. `between` bounds
    the load; `budget_s` bounds the time of all probes, virtual time for `sim`."""

    scenario: Scenario
    target: str
    options: RunOptions = field(default_factory=RunOptions)
    over: Over = "rate"
    attainment: float | None = None
    between: tuple[float, float] | None = None
    budget_s: float = math.inf
    confidence: float = 0.95
    precision: float = 0.05

    @property
    def unit(self) -> Unit:
        return "req/s" if self.over == "rate" else "users"


def question_of(asked: CapacitySpec) -> Question:
    """What is searched, in numbers. Raises UsageError for a scenario without anything to keep, one
    that cannot be scaled, or bounds that are none."""
    scenario = asked.scenario
    is_limited = any(slo.scope == "request" for slo in scenario.all_slos())
    if not is_limited and not scenario.own_slo_metrics():
        raise UsageError(
            f"{scenario.name}: capacity counts the requests that keep their promises, and none is "
            "asked of each request; add e.g. --slo 'ttft<=500ms' ('p99(ttft)<=500ms' is the same "
            "as that with --attainment 99%)"
        )
    target = _target(asked)
    if not 0 < target < 1:
        raise UsageError(f"--attainment {target:g}: expected more than 0 % and less than 100 %")
    found = offered_load(scenario, asked.over)
    low, high = asked.between or (None, None)
    start = found.level if low is None or high is None else math.sqrt(low * high)
    share = _SHORTEST if found.is_steady else 1.0
    least_s = scenario.phases.warmup + share * scenario.phases.measure
    if asked.budget_s < least_s:
        raise UsageError(
            f"--budget {asked.budget_s:g}s: the shortest probe of {scenario.name} takes "
            f"{least_s:g} s ({scenario.phases.warmup:g} s of warm-up); allow several times that, "
            "or shorten phases.warmup and phases.measure"
        )
    return Question(
        target=target,
        start=max(1.0, round(start)) if asked.over == "concurrency" else start,
        precision=asked.precision,
        confidence=asked.confidence,
        low=low,
        high=high,
        warmup_s=scenario.phases.warmup,
        measure_s=scenario.phases.measure * share,
        is_integer=asked.over == "concurrency",
        is_fixed=not found.is_steady,
    )


def _target(asked: CapacitySpec) -> float:
    """As asked, else the strictest share that the scenario promises, else the implied one."""
    if asked.attainment is not None:
        return asked.attainment
    stated = [slo.limit for slo in asked.scenario.all_slos() if slo.metric == "attainment"]
    return max(stated, default=parse_slo(IMPLIED_ATTAINMENT).limit)
