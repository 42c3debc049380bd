"""The requests of a run, or of a class of it, judged by their SLOs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from loadgen.measure.attainment import MeasuredWindow, errors, slos_met
from loadgen.measure.canary import canary_counts
from loadgen.measure.catalog import METRICS
from loadgen.measure.closed_loop import closed_goodput
from loadgen.measure.load import Throughput, per_second, throughput
from loadgen.measure.margins import Margins
from loadgen.measure.per_request import Mask, PerRequest, Samples
from loadgen.measure.slo import Slo, with_implied
from loadgen.measure.slo_result import (
    Misses,
    Shares,
    SloResult,
    max_result,
    mean_result,
    percentile_result,
    request_slo_result,
    run_metric_result,
    share_result,
    tree_result,
)
from loadgen.measure.start_up import of_start_up
from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.margin import LEAST_REVERSION
from loadgen.measure.statistics.trend import reversion
from loadgen.measure.trees import TreeOutcomes, Trees, tree_outcomes
from loadgen.measure.unanswered import left_open
from loadgen.measure.unmeasured import counts_for, settled
from loadgen.measure.validity.error_bound import ErrorBound
from loadgen.measure.validity.survival import with_error
from loadgen.records import Run

_SHARES = ("attainment", "goodput", "tree_attainment")
MANY_IN_FLIGHT = 8.0  # on average


@dataclass(frozen=True)
class Scope:
    """The requests of a run, or those of a class, and the SLOs that judge them."""

    run: Run
    columns: PerRequest
    due: Mask
    window: MeasuredWindow
    slos: Sequence[Slo]
    meets: Callable[[PerRequest], Mask]
    """Rows that met each of their per-request limits."""
    limited: Mask
    """Rows with a per-request limit."""
    limits: Sequence[tuple[Slo, Mask]]
    """Every SLO that can count for attainment, with the rows that it applies to."""
    error: ErrorBound
    confidence: float
    is_closed_loop: bool = False
    start_up: str = ""
    """Why the run is mostly the start of its closed loop, "" where it is not."""
    trees: Trees | None = None
    """The trees of agents, if there are any."""

    def outcomes(self, columns: PerRequest, only: Slo | None = None) -> TreeOutcomes | None:
        """How the trees kept their SLOs with these latencies, or `only` one limit per tree, beside
        having answers; None without agents."""
        if self.trees is None:
            return None
        met = columns.is_ok & columns.has_token if only else self.meets(columns)
        limits = [(slo, rows) for slo, rows in self.limits if slo.scope == "tree"]
        if only:
            limits = [(only, np.ones(len(self.due), bool))]
        return tree_outcomes(
            self.trees, self.run, self.due, self.due & met, self.window, limits, columns.close_s
        )

    def goodput(self, met: Mask, share: Interval, confidence: float) -> Interval:
        """The goodput of a closed loop with a two-sided interval, for the share of due requests
        that met their SLOs, in `met`."""
        run, due, window = self.run, self.due, self.window
        return closed_goodput(run, due, met, window, confidence, bool(self.start_up), share)

    def as_measured(self) -> JudgedScope:
        return self._at(self.columns, throughput(self.run, self.columns, self.window))

    def with_errors(self, measured: Sequence[SloResult]) -> tuple[SloResult, ...]:
        """The results of the SLOs as measured, each with its instrument error; without a verdict
        where answers without TPOT or ITL decide, or where the SLO leaves too many requests out."""
        results = with_error(
            self.run,
            self.columns,
            self.error,
            self.window,
            self.due,
            lambda moved, rates: self._at(moved, rates).results(self.slos),
            [slo for slo, _ in with_implied(self.slos)],
            measured,
            [(slo, rows) for slo, rows in self.limits if slo.scope == "request"],
        )
        rates = throughput(self.run, self.columns, self.window)
        found = settled(
            results, self.columns, self.due, lambda c: self._at(c, rates).results(self.slos)
        )
        found = of_start_up(found, self.start_up) if self.start_up else found
        allowed = [
            slo.limit for slo, rows in self.limits if slo.metric == "error_rate" and rows.all()
        ]
        most_failed = max(allowed, default=0.0)
        return left_open(found, self.run.request_rows, self.columns, self.due, most_failed)

    def _at(self, columns: PerRequest, rates: Throughput) -> JudgedScope:
        """The requests with these latencies: as measured, or shifted by the instrument error."""
        met, samples = self.due & self.meets(columns), Samples(columns, self.due)
        shares = self._shares(columns, met, samples)
        answering = shares.misses.answering if shares.misses else Dependence(shares.due)
        margins = Margins(
            self.run,
            columns,
            self.due,
            met,
            self.window,
            self.limits,
            answering,
            self.confidence,
        )
        return JudgedScope(
            columns,
            self.due,
            met,
            samples,
            rates,
            self.window,
            shares,
            margins,
            partial(self.outcomes, columns),
            self.confidence,
            canary_counts(self.run.manifest),
        )

    def _shares(self, columns: PerRequest, met: Mask, samples: Samples) -> Shares:
        run, (failed, counted) = self.run, errors(self.run)
        failed &= ~columns.is_ok
        is_unanswered = self.due & ~(columns.is_ok & columns.has_token)
        is_late = self.due & ~met & ~is_unanswered
        limited_metrics = tuple({slo.metric: 0 for slo in self.slos if slo.scope == "request"})
        misses = Misses(
            count(is_unanswered),
            count(is_late),
            answering=samples.share(is_unanswered),
            lateness=samples.share(is_late, limited_metrics),
        )
        return Shares(
            due=count(self.due),
            met=count(met),
            failed=count(failed),
            counted=count(counted),
            length_s=self.window.length_s,
            meeting=samples.share(met, limited_metrics),
            failing=Samples(columns, counted).share(failed),
            goodput=partial(self.goodput, met, confidence=2 * self.confidence - 1)
            if self.is_closed_loop
            else None,
            requested_per_s=(
                run.manifest.requested_rate_per_s if len(run.names.classes) == 1 else None
            ),
            misses=misses,
        )


@dataclass(frozen=True)
class JudgedScope:
    """The requests of a scope with the latencies by which they are judged."""

    columns: PerRequest
    due: Mask
    met: Mask
    samples: Samples
    rates: Throughput
    window: MeasuredWindow
    shares: Shares
    margins: Margins
    outcomes: Callable[[Slo | None], TreeOutcomes | None]
    """How the trees kept all SLOs, or only one limit per tree; None without agents."""
    confidence: float
    canaries: tuple[int, int]
    """Canaries under load with the answer that they had at idle, and all."""

    def results(self, slos: Sequence[Slo]) -> list[SloResult]:
        """The results of `slos`, and of the SLO that they imply."""
        return [
            replace(result, is_implied=implied, seconds_needed=self._seconds_needed(result))
            for slo, implied in with_implied(slos)
            for result in [self.margins.with_margin(self._settled(self._result(slo)))]
        ]

    def _settled(self, result: SloResult) -> SloResult:
        """The result, not proven met where many requests in flight have not settled: such a run
        has seen only part of a slow wave of its load, which its latencies may hardly show."""
        is_share = result.slo.quantile is not None or result.metric in _SHARES
        if not (result.met and result.proven and is_share) or self._settling >= 1:
            return result
        n_needed = max(result.n + 1, math.ceil(result.n / max(self._settling, 1e-3)))
        is_upper = METRICS[result.metric].direction == "lower"
        low, high = (result.low, None) if is_upper else (None, result.high)
        return replace(result, proven=False, n_needed=n_needed, low=low, high=high)

    @cached_property
    def _settling(self) -> float:
        """How far the number in flight has settled: 1 and more is enough, as is a small number."""
        order = self.columns.release_order
        in_flight = self.columns.in_flight[order[self.due[order]]]
        if not len(in_flight) or in_flight.mean() < MANY_IN_FLIGHT:
            return math.inf
        return reversion(in_flight) / LEAST_REVERSION

    def _result(self, slo: Slo) -> SloResult:
        metric, confidence = METRICS[slo.metric], self.confidence
        if slo.scope == "request":
            return self._request_slo_result(slo)
        if slo.is_about_trees:
            found = self.outcomes(slo if slo.scope == "tree" else None)
            assert found is not None, f"{slo.text}: only for runs of agents"
            return tree_result(slo, found, confidence)
        if slo.quantile is not None:
            population = self.samples.of(metric, with_failures=True)
            return percentile_result(slo, population, confidence)
        if slo.aggregate == "mean":
            return mean_result(slo, self.samples.of(metric), confidence)
        if slo.aggregate == "max":
            return max_result(slo, self.samples.of(metric, with_failures=True))
        if slo.metric == "canary_match":
            return share_result(slo, *self.canaries, confidence)
        return run_metric_result(slo, self.shares, self._rate, confidence)

    def _request_slo_result(self, slo: Slo) -> SloResult:
        own_s = self.columns.own_slo_s.get(slo.metric)
        has_own = self.due & (own_s > 0) if own_s is not None else self.due & False
        counted = has_own if math.isinf(slo.limit) else self.due
        counted = counted & counts_for(self.columns, slo.metric)
        met = counted & slos_met(self.columns, slo)
        n_met, n_counted, n_own = map(count, (met, counted, has_own))
        dependence = self.samples.share(met, (slo.metric,))
        if n_counted < self.shares.due:
            dependence = dependence.of_run(n_counted)
        return request_slo_result(slo, n_met, n_counted, self.confidence, dependence, n_own)

    def _rate(self, metric: str) -> float:
        if metric == "goodput_output_tokens_per_s":
            return per_second(float(self.columns.streamed_tokens[self.met].sum()), self.window)
        value: float = getattr(self.rates, metric)
        return value

    def _seconds_needed(self, result: SloResult) -> float | None:
        if not result.n_needed or not result.n:
            return None
        return self.window.length_s * result.n_needed / result.n


def count(rows: Mask) -> int:
    return int(np.count_nonzero(rows))
