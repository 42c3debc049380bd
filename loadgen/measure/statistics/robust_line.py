"""A line fitted to points by Theil and Sen's method, which outliers hardly affect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from loadgen.measure.statistics.dependence import of_values
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.ranks import mean_ranks, rank_correlation

MOST_POINTS = 300  # 45 000 pairs, a few milliseconds
LEAST_POINTS = 20


@dataclass(frozen=True, slots=True)
class FittedLine:
    """y = `intercept` + `slope` · x. `low` and `high` are the slope's interval, `rank_correlation`
    is Spearman's, `n` the number of points (the line uses at most 300 of them, evenly spaced)."""

    slope: float
    low: float
    high: float
    intercept: float
    rank_correlation: float
    n: int


def robust_line(
    x: Values, y: Values, confidence: float, is_series: bool = False
) -> FittedLine | None:
    """The Theil–Sen line: the median slope of all pairs of points, with Sen's interval.

    None below 20 points or where x never changes. The interval treats the points as independent,
    unless they are a series in order of release (`is_series`): then it is √τ times as wide, with
    the autocorrelation time τ of the points' shares in Kendall's S. If the series is shorter than
    20 τ, the interval reaches from the least slope of a pair to the largest.

    Source: Sen, Estimates of the Regression Coefficient Based on Kendall's Tau, JASA 63, 1968.
    """
    n = len(x)
    if n < LEAST_POINTS or x.min() == x.max():
        return None
    taken = np.linspace(0, n - 1, min(n, MOST_POINTS)).astype(np.intp)
    few_x, few_y = x[taken], y[taken]
    if few_x.min() == few_x.max():
        return None
    slopes = _slopes(few_x, few_y)
    slope = float(np.median(slopes))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    spread = z * math.sqrt(_variance(few_x, few_y))
    if is_series:
        shares = _centred_ranks(few_x) * _centred_ranks(few_y - slope * few_x)
        times = of_values(shares).bound_times(confidence)
        spread *= math.inf if times is None else math.sqrt(max(times))
    spread = min(spread, len(slopes))
    first = max(round((len(slopes) - spread) / 2) - 1, 0)
    last = min(round((len(slopes) + spread) / 2), len(slopes) - 1)
    return FittedLine(
        slope=slope,
        low=float(slopes[first]),
        high=float(slopes[last]),
        intercept=float(np.median(few_y) - slope * np.median(few_x)),
        rank_correlation=rank_correlation(x, y),
        n=n,
    )


def median_slope(x: Values, y: Values) -> float:
    """Theil and Sen's slope: the median over all pairs of points; x with at least two values."""
    return float(np.median(_slopes(x, y)))


def _slopes(x: Values, y: Values) -> Values:
    """The slopes of all pairs of points whose x differ, ascending."""
    later, earlier = np.tril_indices(len(x), -1)
    dx: Values = x[later] - x[earlier]
    dy: Values = y[later] - y[earlier]
    differ = dx != 0
    slopes: Values = np.sort(dy[differ] / dx[differ])
    return slopes


def _variance(x: Values, y: Values) -> float:
    """The variance of Kendall's S without a relation, with ties in x or y (Sen 1968, eq. 2.6)."""
    n = len(x)
    total = n * (n - 1) * (2 * n + 5)
    for values in (x, y):
        _, counts = np.unique(values, return_counts=True)
        total -= int((counts * (counts - 1) * (2 * counts + 5)).sum())
    return max(total, 0) / 18


def _centred_ranks(values: Values) -> Values:
    ranks = mean_ranks(values)
    centred: Values = ranks - ranks.mean()
    return centred
