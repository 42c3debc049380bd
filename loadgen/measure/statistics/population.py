"""The samples behind a percentile: ascending values, failures as +inf, and their dependence: on
their neighbours in time, and on the other samples of the same request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics import cycles as by_cycles
from loadgen.measure.statistics import dependence
from loadgen.measure.statistics.dependence import Dependence, Load, Series
from loadgen.measure.statistics.event_rate import LEAST_BATCHES
from loadgen.measure.statistics.intervals import BoundTimes, Interval, Values, mean_bounds
from loadgen.measure.statistics.percentiles import (
    Percentile,
    effective_n,
    has_few,
    nearest_rank,
    percentile,
    percentile_bounds,
)

BLOCK = 1 << 20  # values at a time: they stay in the processor's cache. At 10⁸ chunks a whole
# intermediate column would take most of a gigabyte.


def group_sums(
    starts: NDArray[np.intp], n: int, values: Callable[[slice], NDArray[Any]]
) -> NDArray[np.int64]:
    """Σ of `values` over each group; group g is [starts[g], starts[g + 1]), the last group ends at
    n.

    `starts` ascends strictly from 0. `values` returns the integers (or booleans) of a stretch; it
    is called for some megabytes at a time.
    """
    edges = np.append(starts, n)
    totals, first = np.empty(len(starts), np.int64), 0
    while first < len(starts):
        begin = int(edges[first])
        last = max(first + 1, int(np.searchsorted(edges, begin + BLOCK, side="right")) - 1)
        stretch = values(slice(begin, int(edges[last])))
        totals[first:last] = np.add.reduceat(stretch, starts[first:last] - begin, dtype=np.int64)
        first = last
    return totals


@dataclass(frozen=True, slots=True)
class Clusters:
    """Samples that come in groups (the gaps of a request), in their own order.

    `values[k]` counts `weights[k]` times (None: once); group g is values[starts[g]:starts[g+1]] and
    counts where `kept[g]`. Values of other groups stay in place, since a copy takes more memory.
    `order` lists the counting groups in order of release.
    """

    values: Values
    starts: NDArray[np.intp]
    kept: NDArray[np.bool_]
    order: NDArray[np.intp]
    weights: NDArray[np.integer] | None = None

    def ordered(self) -> Values:
        """Every sample that counts, ascending."""
        if self.kept.all():
            values, weights = self.values.copy(), self.weights
        else:
            parts = _stretches(self.kept, self.starts, len(self.values))
            values = np.concatenate([self.values[part] for part in parts])
            weights = self.weights
            if weights is not None:
                weights = np.concatenate([weights[part] for part in parts])
        if weights is not None:
            values = np.repeat(values, weights)
        values.sort()
        return values

    def sizes(self) -> Values:
        if self.weights is None:
            return np.diff(self.starts, append=len(self.values))[self.kept].astype(np.float64)
        weights = self.weights
        counts = group_sums(self.starts, len(self.values), lambda part: weights[part])
        return counts[self.kept].astype(np.float64)

    def sums(self) -> Values:
        weighted = self.values if self.weights is None else self.values * self.weights
        total: Values = np.add.reduceat(weighted, self.starts)
        return total[self.kept]

    def hits(self, limit: float) -> Values:
        """Samples at or below the limit, per group."""

        def below(part: slice) -> NDArray[Any]:
            hit = self.values[part] <= limit
            return hit.view(np.int8) if self.weights is None else hit * self.weights[part]

        total = group_sums(self.starts, len(self.values), below)
        return total[self.kept].astype(np.float64)


def _stretches(kept: NDArray[np.bool_], starts: NDArray[np.intp], n: int) -> list[slice]:
    """The stretches of n values whose groups count, neighbouring groups joined. Few groups fail,
    and copying long stretches takes half the time of a mask."""
    turns = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))
    edges = np.append(starts, n)[turns].tolist()
    return [slice(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class Population:
    """`ordered` (ascending, finite), then `n_infinite` times +inf.

    `series` holds the same samples in order of release if each request has a single sample,
    `clusters` if requests have several. Without either, samples count as independent.
    """

    ordered: Values
    n_infinite: int = 0
    clusters: Clusters | None = None
    series: Series | None = None
    _dependences: dict[float, Dependence] = field(default_factory=dict, compare=False, repr=False)
    _times: dict[float, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def n(self) -> int:
        return len(self.ordered) + self.n_infinite

    def percentile(self, quantile: float, confidence: float, cycles: float = 0.0) -> Percentile:
        """Nearest-rank percentile with its two-sided interval.

        Where a bound is open, the samples of a closed loop of so many `cycles` have the interval of
        independent cycles. Below five cycles both bounds are open where no dependence is found: so
        few do not show it.
        """
        found = self.dependence(quantile)
        times = found.bound_times(confidence)
        if 0 < cycles < LEAST_BATCHES and found.time_requests <= 1:
            times = None
        result = self._percentile(quantile, confidence, times)
        worth = found.worth(self.n)
        if (result.low is None or result.high is None) and cycles and self.series is not None:
            of_cycles = by_cycles.bound_times(self.series, quantile, cycles, confidence)
            if of_cycles is not None:
                result = self._percentile(quantile, confidence, of_cycles)
                worth = self.n / max(of_cycles)
        return replace(result, few=has_few(worth, quantile), n_effective=worth)

    def _percentile(
        self, quantile: float, confidence: float, times: BoundTimes | None
    ) -> Percentile:
        return percentile(self.ordered, quantile, confidence, self.n_infinite, times)

    def percentile_bounds(self, quantile: float, confidence: float) -> Interval:
        """The same percentile with exact one-sided bounds."""
        times = self.dependence(quantile).bound_times(confidence)
        return percentile_bounds(self.ordered, quantile, confidence, self.n_infinite, times)

    def dependence(self, quantile: float, limit: float | None = None) -> Dependence:
        """The dependence of the samples for a percentile; with a `limit`, for the share of samples
        within it, where each request has a single sample."""
        if limit is not None and self.series is not None and self.n:
            return self.series.within(limit)
        if quantile not in self._dependences:
            self._dependences[quantile] = self._dependence(quantile)
        return self._dependences[quantile]

    def _dependence(self, quantile: float) -> Dependence:
        if self.series is not None:
            return self.series.at(quantile)
        if self.clusters is None or len(self.ordered) == 0:
            return Dependence(self.n)
        found = dependence.of_groups(self._time_at, len(self.clusters.order), quantile)
        # failures are independent of each other, so each adds a sample
        worth = effective_n(self._hits(quantile), self.clusters.sizes()) + self.n_infinite
        return replace(found, design=self.n / worth)

    def _hits(self, level: float) -> Values:
        assert self.clusters is not None
        return self.clusters.hits(float(self.ordered[nearest_rank(len(self.ordered), level) - 1]))

    def _time_at(self, level: float) -> float:
        """The autocorrelation time of the groups at a percentile, in groups."""
        assert self.clusters is not None
        if level not in self._times:
            hits, sizes = self._hits(level), self.clusters.sizes()
            deviations: Values = hits - hits.sum() / sizes.sum() * sizes
            self._times[level] = dependence.time_of(deviations[self.clusters.order])
        return self._times[level]

    def n_beyond(self, limit: float) -> int:
        """Samples above a limit."""
        return self.n - int(np.searchsorted(self.ordered, limit, side="right"))

    def mean(self, confidence: float) -> Interval:
        """The mean of the finite samples with one-sided bounds."""
        times = self.mean_dependence().bound_times(confidence)
        if self.clusters is not None:
            return mean_bounds(self.clusters.sums(), self.clusters.sizes(), confidence, times)
        return mean_bounds(self.ordered, np.ones(len(self.ordered)), confidence, times)

    def mean_dependence(self) -> Dependence:
        """The dependence of the requests for the mean of the finite samples."""
        if self.clusters is not None:
            sums, sizes = self.clusters.sums(), self.clusters.sizes()
            deviations = sums - sums.sum() / sizes.sum() * sizes
            return dependence.of_values(deviations[self.clusters.order])
        if self.series is None:
            return Dependence(len(self.ordered))
        return dependence.of_values(self.series.finite())

    def largest(self) -> float:
        if self.n_infinite:
            return math.inf
        return float(self.ordered[-1]) if len(self.ordered) else math.nan


def of_requests(values: Values, load: Load | None = None) -> Population:
    """The population of a metric with a value for each request, in order of release: +inf for a
    failed request; NaN (undefined) is left out. `load` is that of the requests, if it is known."""
    is_defined = ~np.isnan(values)
    defined = values[is_defined]
    finite = np.sort(defined[np.isfinite(defined)])
    load = None if load is None else load.of(is_defined)
    return Population(finite, len(defined) - len(finite), series=Series(defined, load))


def of_groups(
    values: Values,
    starts: NDArray[np.intp],
    kept: NDArray[np.bool_],
    order: NDArray[np.intp],
    weights: NDArray[np.integer] | None,
) -> Population:
    """A population of samples in groups, as in `Clusters`."""
    if not kept.any():
        return Population(np.empty(0))
    clusters = Clusters(values, starts, kept, order, weights)
    return Population(clusters.ordered(), clusters=clusters)
