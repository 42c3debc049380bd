"""Measures: each is a number of a run, named as in an SLO: `p99(ttft)`, `mean(tpot)`,
`error_rate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from loadgen.errors import UsageError
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import (
    due_rows,
    errors,
    limited_rows,
    measured_window,
    meets_own,
    slos_by_class,
)
from loadgen.measure.canary import canary_counts
from loadgen.measure.catalog import Metric
from loadgen.measure.closed_loop import closed_goodput, is_closed, is_start_up
from loadgen.measure.load import per_second, throughput
from loadgen.measure.per_request import Mask, PerRequest, Samples, per_request
from loadgen.measure.slo import parse_measure, parse_slo
from loadgen.measure.statistics.dependence import of_share
from loadgen.measure.statistics.intervals import Interval, Values
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.statistics.population import Population, of_requests
from loadgen.measure.statistics.proportions import wilson
from loadgen.measure.summary import Summary
from loadgen.measure.trees import (
    TreeOutcomes,
    Trees,
    ended_trees,
    in_order_of_start,
    tree_limits,
    tree_outcomes,
    tree_times,
    trees_of,
)
from loadgen.records import Run

TREE_ATTAINMENT = "tree_attainment"


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a run. `quantile` is set for percentiles; `aggregate` is None for a metric of the
    run itself."""

    text: str
    metric: Metric
    aggregate: str | None
    quantile: float | None

    @property
    def is_share(self) -> bool:
        """Shares are compared in points, all other measures in per cent of A."""
        return self.metric.unit == "share"

    @property
    def is_about_trees(self) -> bool:
        """Whether only runs of agents have it."""
        return self.metric.scope == "tree" or self.metric.name == TREE_ATTAINMENT


def measure(text: str) -> Measure:
    """The measure that an expression names. Raises UsageError with the nearest correct
    expression."""
    try:
        metric, aggregate, quantile = parse_measure(text)
    except ValueError as problem:
        raise UsageError(f"--metric {problem}") from None
    if aggregate == "max":
        raise UsageError(
            f"--metric {text!r}: a maximum depends on a single request and varies between equal "
            f"runs; write 'p99({metric.slo})'"
        )
    return Measure(text.strip(), metric, aggregate, quantile)


class Measured:
    """A run with the columns of its measures, each computed once."""

    def __init__(self, run: Run, name: str = "") -> None:
        self.run = run
        self.name = name or run.manifest.run
        self.columns: PerRequest = per_request(run)
        self.due: Mask = due_rows(run)
        self._samples = Samples(self.columns, self.due)

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.run)

    @property
    def is_comparable(self) -> bool:
        """Whether the evidence of the run holds and the load generator's own delays are a small
        part of its numbers, whatever the verdict on its SLOs."""
        return not self.summary.validity.why_not_comparable

    @property
    def has_reasoning(self) -> bool:
        """Whether an answer has reasoning, so that TTFAT differs from TTFT."""
        return self.summary.reasoning is not None

    @property
    def schedule_sha256(self) -> str:
        return self.run.manifest.schedule_sha256

    @cached_property
    def met(self) -> Mask:
        """Due rows that met every per-request SLO of the run."""
        slos = [parse_slo(text) for text in self.run.manifest.slo]
        met = meets_own(self.run, self.columns, slos, slos_by_class(self.run))
        return self.due & met

    @cached_property
    def has_limits(self) -> bool:
        """Whether a due request has a per-request limit; without any there is no attainment."""
        slos = [parse_slo(text) for text in self.run.manifest.slo]
        limited = limited_rows(self.run, self.columns, slos, slos_by_class(self.run))
        return bool((self.due & limited).any())

    @cached_property
    def of_trees(self) -> _OfTrees | None:
        """The numbers of the trees of agents; None without agents."""
        trees = trees_of(self.run)
        return None if trees is None else _OfTrees.of(self, trees)

    def n_due(self) -> int:
        return int(np.count_nonzero(self.due))

    def n_of(self, measure: Measure) -> int:
        """The number of due requests, or, of a measure of trees, of the due trees that met or
        missed their SLOs."""
        if not measure.is_about_trees:
            return self.n_due()
        return 0 if self.of_trees is None else len(self.of_trees.outcomes.hits)

    def _population(self, metric: Metric, with_failures: bool = False) -> Population:
        if metric.scope != "tree":
            return self._samples.of(metric, with_failures)
        if self.of_trees is None:
            return Population(np.empty(0))
        return of_requests(self.of_trees.in_order_of_start(metric.name, self.run, with_failures))

    def value(self, measure: Measure) -> float:
        """The value of the measure in this run, in the unit of its metric; NaN where it has
        none."""
        metric, n_due = measure.metric, self.n_due()
        if metric.scope == "run":
            return self._of_run(metric.name, n_due)
        population = self._population(metric)
        if not len(population.ordered):
            return math.nan
        if measure.quantile is not None:
            rank = nearest_rank(len(population.ordered), measure.quantile)
            return float(population.ordered[rank - 1])
        return float(population.ordered.mean())

    def estimate(self, measure: Measure, confidence: float, with_failures: bool = True) -> Interval:
        """The value with its two-sided interval if a single run has an interval; throughputs have
        none. Latencies are with failures as +inf, so that failing does not look fast, or of the
        successful requests."""
        metric, n_due = measure.metric, self.n_due()
        if metric.scope == "run":
            return self._estimate_of_run(metric.name, n_due, confidence)
        population = self._population(metric, with_failures)
        if not population.n:
            return Interval(math.nan)
        if measure.quantile is not None:
            found = population.percentile(measure.quantile, confidence)
            return Interval(found.value, found.low, found.high)
        if population.n_infinite:
            return Interval(math.inf)
        return population.mean((1 + confidence) / 2)

    def ordered(self, metric: Metric) -> Values:
        """The samples of the successful requests, or of the trees that ended, ascending."""
        return self._population(metric).ordered

    def in_order(self, measure: Measure) -> Values:
        """A value per *due* request, or per tree (NaN: has none), in the order of the schedule, so
        that two runs of the same schedule pair up. Not for gap metrics."""
        if measure.is_about_trees:
            return (
                np.empty(0) if self.of_trees is None else self.of_trees.values[measure.metric.name]
            )
        if measure.metric.name == "error_rate":
            return errors(self.run)[0][self.due].astype(np.float64)
        if measure.metric.name == "attainment":
            return self.met[self.due].astype(np.float64)
        assert measure.metric.scope != "gap", "a request has several gaps"
        values = self.columns.column(measure.metric.name)
        return np.where(self.columns.is_ok, values, np.nan)[self.due]

    def _estimate_of_run(self, name: str, n_due: int, confidence: float) -> Interval:
        if name == "attainment" and not self.has_limits:
            return Interval(math.nan)
        if name == "error_rate":
            failed, counted = errors(self.run)
            times = Samples(self.columns, counted).share(failed).bound_times(confidence)
            n = int(np.count_nonzero(counted))
            return wilson(int(np.count_nonzero(failed)), n, confidence, times)
        if name == TREE_ATTAINMENT and self.of_trees is not None:
            hits = self.of_trees.outcomes.hits
            times = of_share(hits).hit_times(confidence)
            return wilson(int(np.count_nonzero(hits)), len(hits), confidence, times)
        if name not in ("attainment", "goodput"):
            return Interval(self._of_run(name, n_due))
        times = self._samples.share(self.met).hit_times(confidence)
        share = wilson(int(np.count_nonzero(self.met)), n_due, confidence, times)
        if name == "attainment":
            return share
        if is_closed(self.run):
            window, is_open = measured_window(self.run), is_start_up(self.run)
            goodput = closed_goodput(
                self.run, self.due, self.met, window, confidence, is_open, share
            )
            return replace(goodput, value=self._of_run(name, n_due))
        per_s = per_second(float(n_due), measured_window(self.run))
        return replace(share.times(per_s), value=self._of_run(name, n_due))

    def _of_run(self, name: str, n_due: int) -> float:
        if name == "attainment" and not self.has_limits:
            return math.nan
        if name == "error_rate":
            failed, counted = errors(self.run)
            return float(np.count_nonzero(failed)) / int(counted.sum()) if n_due else math.nan
        if name == "attainment":
            return float(np.count_nonzero(self.met)) / n_due if n_due else math.nan
        if name == TREE_ATTAINMENT:
            hits = np.empty(0) if self.of_trees is None else self.of_trees.outcomes.hits
            return float(hits.mean()) if len(hits) else math.nan
        if name == "canary_match":
            n_same, n = canary_counts(self.run.manifest)
            return n_same / n if n else math.nan
        window = measured_window(self.run)
        if name == "goodput":
            return per_second(float(np.count_nonzero(self.met)), window)
        if name == "goodput_output_tokens_per_s":
            return per_second(float(self.columns.streamed_tokens[self.met].sum()), window)
        value: float = getattr(throughput(self.run, self.columns, window), name)
        return value


@dataclass(frozen=True, slots=True)
class _OfTrees:
    """The trees of a run: how they kept their SLOs, and by metric a value per tree, in the order of
    the schedule (NaN: not due, or not known when the run ended). `broken` are the due trees with a
    failed request."""

    trees: Trees
    outcomes: TreeOutcomes
    values: Mapping[str, Values]
    broken: Mask

    @classmethod
    def of(cls, measured: Measured, trees: Trees) -> _OfTrees:
        run, due, window = measured.run, measured.due, measured_window(measured.run)
        limits, close_s = tree_limits(run), measured.columns.close_s
        outcomes = tree_outcomes(trees, run, due, measured.met, window, limits, close_s)
        times, ended = tree_times(trees, run, close_s), outcomes.due & ended_trees(trees, run)
        is_known = outcomes.met | outcomes.missed
        return cls(
            trees,
            outcomes,
            {
                "task_time_s": np.where(ended, times.task_s, np.nan),
                "wait_share": np.where(ended, times.wait_share, np.nan),
                TREE_ATTAINMENT: np.where(is_known, outcomes.met, np.nan),
            },
            outcomes.due & trees.any_of(due & errors(run)[0]),
        )

    def in_order_of_start(self, name: str, run: Run, with_failures: bool) -> Values:
        """The values of the due trees in order of their start; with failures, those of broken trees
        as +inf."""
        values = np.where(self.broken, np.inf, self.values[name]) if with_failures else None
        numbers = in_order_of_start(self.trees, run, self.outcomes.due)
        return (self.values[name] if values is None else values)[numbers]
