"""Settings of a capacity search, and the search problem in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from loadgen.errors import UsageError
from loadgen.measure.slo import IMPLIED_ATTAINMENT, parse_slo
from loadgen.run.run_options import RunOptions
from loadgen.studies.capacity.next_probe import FIRST_REQUESTS, FIRST_TREES, Question
from loadgen.studies.capacity.observed import new_tokens
from loadgen.studies.capacity.result import Counted
from loadgen.studies.capacity.traffic import Law, Traffic
from loadgen.workload.scaling import (
    MINUTE_S,
    LoadUnit,
    OfferedLoad,
    Over,
    offered_load,
    scaled,
    with_window,
)
from loadgen.workload.scenario import Scenario, varied
from loadgen.workload.schedule import make_schedule

_PRECISION, _WITHIN_BUDGET = 0.15, 0.10
"""Three minutes give ± 15 % at some ten requests per second. A search with a budget uses the rest
of it, too."""
_LOADS_KEPT = 32
_SHORTEST = 0.25  # of the scenario's window, where its rate is steady


@dataclass(frozen=True)
class CapacitySpec:
    """Settings of a search. `attainment`: the share of requests, or of trees of agents, that must
    meet their SLOs; None is the scenario's own target, else 99 %. `between` bounds the load,
    `budget_s` the time of all probes together (virtual time for `sim`). `precision`: None is 10 %
    with a budget, else 15 %."""

    scenario: Scenario
    target: str
    options: RunOptions = field(default_factory=RunOptions)
    over: Over = "rate"
    attainment: float | None = None
    between: tuple[float, float] | None = None
    budget_s: float = math.inf
    confidence: float = 0.95
    precision: float | None = None

    @property
    def unit(self) -> LoadUnit:
        return offered_load(self.scenario, self.over).unit

    @property
    def counted(self) -> Counted:
        """Trees of agents where the scenario states a share of trees."""
        is_about_trees = any(slo.is_about_trees for slo in self.scenario.all_slos())
        return "trees" if is_about_trees else "requests"


def question_of(spec: CapacitySpec) -> Question:
    """The search problem in numbers. Raises UsageError for a scenario without limits per request or
    without a load that can be scaled, and for invalid bounds."""
    scenario = spec.scenario
    about_trees = [slo.text for slo in scenario.all_slos() if slo.is_about_trees]
    if about_trees and spec.over != "agents":
        raise UsageError(
            f"{scenario.name}: --over {spec.over} counts requests, and '{about_trees[0]}' is about"
            " trees; use --over agents, or remove it"
        )
    is_limited = bool(about_trees) or any(s.scope == "request" for s in scenario.all_slos())
    if not is_limited and not scenario.own_slo_metrics():
        raise UsageError(
            f"{scenario.name}: capacity counts the requests that meet their SLOs, and the scenario "
            "has no limit per request; add e.g. --slo 'ttft<=500ms' (with --attainment 99% this "
            "equals 'p99(ttft)<=500ms')"
        )
    target = _target(spec)
    if not 0 < target < 1:
        raise UsageError(f"--attainment {target:g}: expected more than 0 % and less than 100 %")
    load = offered_load(scenario, spec.over)
    low, high = spec.between or (None, None)
    start = load.level if low is None or high is None else math.sqrt(low * high)
    # A shorter part of a tree would lack its long contexts.
    share = _SHORTEST if load.is_steady and spec.over != "agents" else 1.0
    least_s = scenario.phases.warmup + share * scenario.phases.measure
    if spec.budget_s < least_s:
        raise UsageError(
            f"--budget {spec.budget_s:g}s: the shortest probe takes {least_s:g} s "
            f"({scenario.phases.warmup:g} s of warm-up), and a search about five probes; write "
            f"--budget {math.ceil(5 * least_s)}s, or shorten phases.warmup and phases.measure"
        )
    law, no_law = _law_of(spec, load.is_steady)
    return Question(
        target=target,
        start=max(1.0, round(start)) if load.is_integer else start,
        precision=_precision(spec),
        confidence=spec.confidence,
        low=low,
        high=high,
        warmup_s=scenario.phases.warmup,
        measure_s=scenario.phases.measure * share,
        is_integer=load.is_integer,
        is_fixed=not load.is_steady,
        law=law,
        no_law=no_law,
        first=FIRST_TREES if spec.counted == "trees" else FIRST_REQUESTS,
        per_level=_per_level(spec, load),
    )


def _per_level(spec: CapacitySpec, load: OfferedLoad) -> float | None:
    """The counted requests, or trees, per second and level; None for a closed loop."""
    if load.is_integer:
        return None
    if spec.over != "agents":
        return 1.0
    corpora = [own.agents.corpus for own in spec.scenario.traffic().values() if own.agents]
    sizes = [len(tree) for corpus in corpora for tree in corpus.trees]
    return (1.0 if spec.counted == "trees" else float(np.mean(sizes))) / MINUTE_S


_LAW_SEED = 2**40 + 41  # no probe has it


def _law_of(spec: CapacitySpec, is_steady: bool) -> tuple[Law | None, str]:
    """The scenario's traffic at any load, or None and the reason."""
    if spec.over == "agents":
        return None, "the requests of agents wait for the answers of others"
    if spec.over != "rate":
        return None, "the send times of users follow from the answers"
    if not is_steady:
        return None, "the rate varies by design"
    schedule = make_schedule(with_window(spec.scenario, 0.0, spec.scenario.horizon_s, _LAW_SEED))
    if schedule["n_parents"].any():
        return None, "requests wait for the answers of others"
    if schedule["cancel_after_s"].any():
        return None, "requests are cancelled on purpose"
    return lru_cache(_LOADS_KEPT)(partial(_traffic, spec.scenario)), ""


def _traffic(scenario: Scenario, level: float, n_requests: int) -> Traffic:
    """About so many requests of the scenario at a load, the same in each call."""
    at_level = scaled(scenario, level, "rate")
    sent = make_schedule(with_window(at_level, 0.0, n_requests / level, _LAW_SEED))
    sent = sent[np.argsort(sent["scheduled_s"], kind="stable")]
    return Traffic(
        sent["scheduled_s"],
        sent["input_tokens"].astype(np.float64),
        new_tokens(sent).astype(np.float64),
        sent["output_tokens"].astype(np.float64),
        sent["class_id"].astype(np.int64),
    )


def judged_by(spec: CapacitySpec, target: float) -> Scenario:
    """The scenario with the searched share as its attainment, so that a probe is judged by that and
    not by the implied 99 %. Of trees and of classes, the scenario's own."""
    if spec.counted == "trees" or spec.scenario.classes:
        return spec.scenario
    texts = [slo.text for slo in spec.scenario.slos() if slo.metric != "attainment"]
    return varied(spec.scenario, {"slo": [*texts, f"attainment >= {100 * target:.10g}%"]}, "--slo")


def _precision(spec: CapacitySpec) -> float:
    if spec.precision is not None:
        return spec.precision
    return _WITHIN_BUDGET if math.isfinite(spec.budget_s) else _PRECISION


def _target(spec: CapacitySpec) -> float:
    """The required attainment: `attainment`, else the scenario's strictest target, else the implied
    target."""
    if spec.attainment is not None:
        return spec.attainment
    metric = "tree_attainment" if spec.counted == "trees" else "attainment"
    stated = [slo.limit for slo in spec.scenario.all_slos() if slo.metric == metric]
    return max(stated, default=parse_slo(IMPLIED_ATTAINMENT).limit)
