"""The numbers of a scope: counts, rates, latencies, SLO results, attainment and goodput."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from loadgen.measure.attainment import (
    MeasuredWindow,
    came_due,
    failed_rows,
    start_rows,
    unfinished_rows,
    warmup_rows,
    withdrawn_rows,
)
from loadgen.measure.catalog import METRICS, Metric
from loadgen.measure.closed_loop import cycles
from loadgen.measure.load import Throughput, inside, per_second
from loadgen.measure.per_request import Mask, Samples
from loadgen.measure.scope import Scope, count
from loadgen.measure.slo import parse_slo
from loadgen.measure.slo_result import Bound, SloResult
from loadgen.measure.start_up import open_distribution, without_bounds
from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.statistics.population import Population
from loadgen.measure.statistics.proportions import wilson
from loadgen.measure.summary import NO_LIMIT, PERCENTILES, Attainment, Distribution, Goodput
from loadgen.records import Run, Status

_ANY_SHARE = parse_slo("attainment >= 0%")
"""Always met: its bound is the lower bound of an attainment that no SLO is about."""


@dataclass(frozen=True, slots=True)
class TrafficRates:
    """Requests per second of the measured window: requested by the scenario, offered by its
    schedule and achieved; `note` is why a rate is None, or what else it counts."""

    requested_per_s: float | None
    offered_per_s: float | None
    achieved_per_s: float
    note: str


@dataclass(frozen=True, slots=True)
class ScopeNumbers:
    """The fields that the summary of a run and that of a class share."""

    counts: Mapping[str, int]
    rates: TrafficRates
    throughput: Throughput
    metrics: Mapping[str, Distribution]
    slo: tuple[SloResult, ...]
    attainment: Attainment
    goodput: Goodput


def scope_numbers(
    scope: Scope, requested_per_s: float | None, is_closed_loop: bool
) -> ScopeNumbers:
    """All numbers of a scope, whose traffic has a requested rate or is a closed loop."""
    due, window, level = scope.due, scope.window, scope.confidence
    judged = scope.as_measured()
    plain = judged.results(scope.slos)
    meeting = judged.shares.meeting or Dependence(judged.shares.due)
    of_share = [r for r in plain if r.metric == "attainment"] or judged.results([_ANY_SHARE])
    share_bound = min(of_share, key=lambda result: result.met is not False).bound
    goodput = _goodput(scope, judged.met, meeting)
    attainment = _attainment(due, judged.met, scope.limited, meeting, level, share_bound)
    metrics = _distributions(judged.samples, level, cycles(scope.run, due))
    if scope.start_up:
        attainment = without_bounds(attainment)
        metrics = {name: open_distribution(found) for name, found in metrics.items()}
    return ScopeNumbers(
        counts=_counts(scope.run, due),
        rates=_rates(scope.run, window, requested_per_s, is_closed_loop),
        throughput=judged.rates,
        metrics=metrics,
        slo=scope.with_errors(plain),
        attainment=attainment,
        goodput=goodput,
    )


def _counts(run: Run, due: Mask) -> dict[str, int]:
    by_status = np.bincount(run.request_rows["status"][due], minlength=len(Status))
    n_warmup, n_start = count(warmup_rows(run)), count(start_rows(run))
    n_scheduled, n_due = len(run.schedule_rows), count(due)
    n_withdrawn = count(withdrawn_rows(run))
    return {
        "scheduled": n_scheduled,
        "warmup": n_warmup,
        "start": n_start,
        "due": n_due,
        "withdrawn": n_withdrawn,
        "not_due": n_scheduled - n_warmup - n_start - n_due - n_withdrawn,
        "failed": count(failed_rows(run)),
        "unfinished": count(unfinished_rows(run)),
        **{status.name: int(by_status[status]) for status in Status},
    }


def _rates(
    run: Run, window: MeasuredWindow, requested_per_s: float | None, is_closed_loop: bool
) -> TrafficRates:
    """The rate requested, offered and achieved, of the requests that came due; requests cancelled
    on purpose belong to the traffic, too."""
    came = came_due(run)
    is_sent = came & inside(run.request_rows["sent_s"], window)
    offered_per_s = None if is_closed_loop else per_second(float(count(came)), window)
    if is_closed_loop:
        note = "closed loop: the server's speed sets the rate"
    elif requested_per_s is None:
        note = "requested: no mean rate was recorded"
    elif (run.schedule_rows["n_parents"] > 0).any():
        note = "requested: starts of sessions and chains"
    else:
        note = ""
    return TrafficRates(
        requested_per_s, offered_per_s, per_second(float(count(is_sent)), window), note
    )


def _distributions(samples: Samples, confidence: float, n_cycles: float) -> dict[str, Distribution]:
    """The distribution of each metric. The samples of a metric are freed after it: 2 MB for 10⁵
    requests, of 13 metrics. Gap metrics may share theirs."""
    cache: dict[int, dict[str, Percentile]] = {}  # by id(): `samples` keeps the objects alive

    def percentiles(population: Population) -> dict[str, Percentile]:
        if id(population) not in cache:
            cache[id(population)] = {
                name: population.percentile(quantile, confidence, n_cycles)
                for name, quantile in PERCENTILES.items()
            }
        return cache[id(population)]

    def distribution(metric: Metric) -> Distribution:
        plain = samples.of(metric)
        ordered = plain.ordered
        failures: Mapping[str, Percentile] = {}
        if metric.slo:
            failures = percentiles(samples.of(metric, with_failures=True))
        return Distribution(
            n=plain.n,
            mean=float(ordered.mean()) if len(ordered) else math.nan,
            min=float(ordered[0]) if len(ordered) else math.nan,
            max=plain.largest(),
            percentiles=percentiles(plain),
            with_failures=failures,
        )

    found: dict[str, Distribution] = {}
    for name, metric in METRICS.items():
        if metric.scope in ("request", "gap"):
            found[name] = distribution(metric)
        if metric.scope == "request":
            cache.clear()
            samples.forget(metric)
    return found


def _attainment(
    due: Mask,
    met: Mask,
    limited: Mask,
    dependence: Dependence,
    confidence: float,
    bound: Bound | None,
) -> Attainment:
    """The attainment; there is none where no due request has a per-request limit."""
    n_met, n_due = count(met), count(due)
    if n_due and not (due & limited).any():
        return Attainment(math.nan, None, None, None, n_due, NO_LIMIT)
    share = wilson(n_met, n_due, confidence, dependence.hit_times(confidence))
    reason = "" if n_due else "no request was due"
    return Attainment(
        share.value, share.low, share.high, n_met, n_due, reason, bound, dependence.n_effective
    )


def _goodput(scope: Scope, met: Mask, dependence: Dependence) -> Goodput:
    """The goodput; in a closed loop its interval includes the error of the rate."""
    window, confidence = scope.window, scope.confidence
    n_met, n_due = count(met), count(scope.due)
    share = wilson(n_met, n_due, confidence, dependence.hit_times(confidence))
    per_s = share.times(per_second(float(n_due), window))
    if scope.is_closed_loop:
        per_s = scope.goodput(met, share, confidence)
    n_tokens = float(scope.columns.streamed_tokens[met].sum())
    requests_per_s = replace(per_s, value=per_second(float(n_met), window))
    return Goodput(requests_per_s, per_second(n_tokens, window))
