"""The autocorrelation time of the requests of a closed loop by batch means over its cycles."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.dependence import Series, t_inflation
from loadgen.measure.statistics.intervals import BoundTimes, Values
from loadgen.measure.statistics.ranks import mean_ranks

LEAST_CYCLES = 15
"""Fewer cycles do not show whether they are independent."""
_MOST_BATCHES = 20
_CORRELATED = 1.2816  # 10 %, one-sided: a missed correlation makes an interval too narrow


def bound_times(
    series: Series, quantile: float, cycles: float, confidence: float
) -> BoundTimes | None:
    """The autocorrelation times of 1{x ≤ v} at the percentile v for both bounds of its two-sided
    interval, of requests that come in `cycles` cycles; None where they are too few, or where they
    are not independent of each other.

    A cycle is about one request of each user, and the users that share a step of the server wait
    alike. The run is cut into at most 20 batches of equal numbers of requests, each at least two
    cycles long; τ is the variance of the mean of the batches' shares over that of independent
    requests, with Student's t. Cycles count as dependent if the sums of the ranks of neighbouring
    cycles are positively correlated (10 %, one-sided).

    Source: A. M. Law, Simulation Modeling and Analysis (5th ed.), section 9.5.3.
    """
    n = len(series)
    if cycles < LEAST_CYCLES or n < cycles:
        return None
    if _correlation(_sums(mean_ranks(series.values), int(cycles))) > _CORRELATED:
        return None
    n_batches = min(_MOST_BATCHES, int(cycles / 2))
    hits = series.indicator(quantile)
    share = float(hits.mean())
    if not 0 < share < 1:
        return None
    variance = float(np.square(_sums(hits, n_batches)).sum()) / (n_batches - 1) * n_batches / n
    time = max(1.0, variance / (share * (1 - share)))
    time *= t_inflation(n_batches - 1, confidence)
    return time, time


def _sums(values: Values, n_groups: int) -> Values:
    """The sums of the deviations from the mean over equally long groups of neighbours."""
    group: NDArray[np.intp] = np.arange(len(values)) * n_groups // len(values)
    return np.bincount(group, values - values.mean(), n_groups).astype(np.float64)


def _correlation(sums: Values) -> float:
    """The correlation of neighbours in standard errors."""
    total = float(np.square(sums).sum())
    return float((sums[1:] * sums[:-1]).sum()) / total * math.sqrt(len(sums)) if total > 0 else 0.0
