"""Whether a run is clear of a limit: met with so large a margin, or missed by so many requests,
that only a kind of slowness absent from the run could change the result.

Up to the slowest request no distribution is assumed. Beyond it the excess over the median falls at
least like 1/x, which is heavier than the tails of latencies met so far. Requests are dependent:
misses come in runs of about (τ + 1) / 2, with three times the estimated τ, since a run without a
miss does not show how its misses would cluster.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.dependence import Dependence, Load, Series
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.proportions import exact_bounds, least_n, share_where
from loadgen.measure.statistics.trend import reversion, slope_and_error, slope_ratio

UNSEEN_RUNS = 3.0
"""Factor on the estimated autocorrelation time: the runs of misses that were not seen."""

MOST_RISE = 5.28
"""The 95 % point of `slope_ratio` of independent values (20 000 draws of 1 000 values)."""

DOUBLED = 2.0

LEAST_PILED, PILED_SHARE = 3.0, 0.25  # requests in flight

FOLLOWS_LOAD = 0.1
"""The share of the variance of the ranks of waits that the number in flight explains in a queue: of
62 requests at a load of 1 to 1.2 at least 95 % of the runs with a single server have more."""

LEAST_REVERSION = 45.0
"""At least 95 % of runs of queues at a load of 1, of 1 to 12 servers, empty at first, have a
smaller `reversion` (600 runs each of 62 to 300 requests; 93 % of 1 000 requests)."""

_LEAST_VALUES = 20  # fewer have no trend


def share_beyond(n: int, time: float, confidence: float) -> float:
    """The upper bound of the share of requests slower than the slowest of n, where such requests
    come in runs of (`time` + 1) / 2 requests.

    With share s, a two-state Markov chain shows none of them with probability
    (1 − s) (1 − 2 s / (time + 1))ⁿ⁻¹. Independent requests (`time` 1): 1 − (1 − confidence)^(1/n).
    """
    starts = 2 / (max(1.0, time) + 1)
    return share_where(
        lambda share: (1 - share) * (1 - starts * share) ** (n - 1) <= 1 - confidence
    )


def is_clear(
    n: int,
    largest: float,
    share: float,
    time: float,
    confidence: float,
    n_failed: int = 0,
    failing: Dependence | None = None,
) -> bool:
    """Whether a run shows by its margin that at least `share` of the requests are within limits.

    `largest` is the largest (x − median) / (limit − median) of the `n` answered requests
    (`margin_ratios`), over all of their limits; above 1 it is late. `time` is their estimated
    autocorrelation time. A late answer, or fewer requests than early stopping needs (59 for 95 %,
    299 for 99 %), is never clear. `n_failed` more requests failed, with a dependence of their own:
    the bound of their share and that of the late answers then have half of the error each, and
    their sum counts.
    """
    if not n or largest > 1 or not 0 < share < 1:
        return False
    if n + n_failed < least_n(0, share, confidence):
        return False
    if not n_failed:
        return share_beyond(n, UNSEEN_RUNS * time, confidence) * largest <= 1 - share
    half = (1 + confidence) / 2
    times = (failing or Dependence(n + n_failed)).bound_times(half)
    failures = exact_bounds(n_failed, n + n_failed, half, times).high
    if failures is None:
        return False
    late = share_beyond(n, UNSEEN_RUNS * time, half) * largest
    return failures + late <= 1 - share


def is_missed_by_far(
    missed: NDArray[np.bool_],
    quarters: NDArray[np.intp],
    share: float,
    time: float,
    confidence: float,
) -> bool:
    """Whether clearly more than 1 − `share` of the requests missed their limits, throughout the
    window.

    `missed`, shape [n], in order of release, with the quarter of the window (0 to 3) of each. Each
    quarter must have misses, and their share a lower bound above 1 − share, with half of the error
    and three times the autocorrelation time of the misses.
    """
    if len(np.unique(quarters[missed])) < 4:
        return False
    times = (max(1.0, UNSEEN_RUNS * time),) * 2
    bounds = exact_bounds(int(missed.sum()), len(missed), (1 + confidence) / 2, times)
    return bounds.low is not None and bounds.low > 1 - share


def rises(values: Values) -> bool:
    """Whether values in order of time rise by more than their dependence explains: a one-sided test
    at 5 %, against their own long-run variance. Fewer than 20 values never do.

    Behind a steady queue it rejects 5 to 15 % of short runs, of an AR(1) of 0.97 up to 22 %.
    """
    return len(values) >= _LEAST_VALUES and slope_ratio(values) > MOST_RISE


def doubles(values: Values) -> bool:
    """Whether values in order of time rise, and the median of their last quarter is at least twice
    that of the first."""
    quarter = len(values) // 4
    if not rises(values):
        return False
    return float(np.median(values[-quarter:])) >= DOUBLED * float(np.median(values[:quarter]))


def may_reach_limit(ratios: Values) -> bool:
    """Whether the largest of `ratios` (`margin_ratios`, in order of time) and their growth over as
    many requests again may come to the limit, 1, by the upper bound of the growth."""
    if len(ratios) < _LEAST_VALUES:
        return False
    slope, error = slope_and_error(ratios)
    growth = max(0.0, slope + MOST_RISE * error) * len(ratios)
    return float(ratios.max()) + growth > 1


def piles_up(in_flight: Values) -> bool:
    """Whether the number in flight at each release rises, by at least 3 requests and a quarter of
    its mean."""
    slope, _ = slope_and_error(in_flight)
    rise = slope * len(in_flight)
    return rise >= max(LEAST_PILED, PILED_SHARE * float(in_flight.mean())) and rises(in_flight)


Growth = Literal["latency", "limit", "queue", "in_flight"]


def growth(values: Values, ratios: Values, in_flight: Values, is_wait: bool) -> Growth | None:
    """The sign that a load may still be growing, None without any: latencies that double through
    the window, or may come to the limit; waits (`is_wait`) that follow a queue that has not
    settled; or requests that pile up.

    `values` and their `ratios` are in order of release, each with the number `in_flight` then.
    """
    if doubles(values):
        return "latency"
    if may_reach_limit(ratios):
        return "limit"
    if has_settled(in_flight):
        return None
    if is_wait and Series(values, Load(in_flight)).share_by_load >= FOLLOWS_LOAD:
        return "queue"
    return "in_flight" if piles_up(in_flight) else None


def has_settled(in_flight: Values) -> bool:
    """Whether the number in flight at each release returns to its mean often enough that it is no
    queue at or above its capacity, which starts empty and grows like a random walk (5 %)."""
    return reversion(in_flight) >= LEAST_REVERSION


def margin_ratios(values: Values, limits: Values | float) -> Values:
    """(x − median) / (limit − median) of each value; +inf where its limit is not above the median.
    Empty for no values."""
    if not len(values):
        return np.empty(0)
    median = float(np.partition(values, len(values) // 2)[len(values) // 2])
    room = np.broadcast_to(np.asarray(limits, np.float64) - median, len(values))
    ratios = np.full(len(values), math.inf)
    np.divide(values - median, room, out=ratios, where=room > 0)
    return ratios
