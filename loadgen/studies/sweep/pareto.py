"""The Pareto front of noisy measurements: the points of a trade-off that no other point beats.

Every point has a benefit (more is better: throughput per GPU) and a cost (less is better: a
latency), each measured in several runs. A point beats another where it is significantly better in
benefit or cost and not significantly worse in the other. Without noise this is the ordinary front.
With noise a point stays on the front unless another point is significantly better.

Significantly better means that the interval of the mean ratio, run by run, excludes 1: the k-th
runs of two points had the same seed and about the same time of day. (Ratios, on the log scale,
because changes of a latency are in proportion to it; where a value is 0, differences and zero.)
Where two points share fewer than two such runs, it means that their own intervals do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadgen.measure.statistics.intervals import Interval, mean_bounds


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its interval, and its value in each run by the run's number. +inf is a failed
    run, NaN no value."""

    interval: Interval
    by_run: Mapping[int, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.interval.value


@dataclass(frozen=True, slots=True)
class TradeOff:
    """A measured trade-off. A point without a value beats no other, is not beaten, and is on no
    front."""

    benefit: Quantity
    cost: Quantity

    @property
    def has_values(self) -> bool:
        return not (math.isnan(self.benefit.value) or math.isnan(self.cost.value))


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a point is on the front, and the index of a point that beats it if not."""

    is_front: bool
    beaten_by: int | None = None


def pareto_front(points: Sequence[TradeOff], confidence: float) -> list[Standing]:
    """The standing of each point. If several points beat it, the point with the lowest cost is
    named.

    “Not significantly worse” is not transitive. With very different noise it can happen that every
    point is beaten by another; the front is then the front of the estimates alone.
    """
    beaten = [_cheapest_winner(p, points, confidence) for p in points]
    if any(p.has_values and by is None for p, by in zip(points, beaten, strict=True)):
        return [_standing(p, by) for p, by in zip(points, beaten, strict=True)]
    exact = [TradeOff(_exactly(p.benefit), _exactly(p.cost)) for p in points]
    return [_standing(p, _cheapest_winner(p, exact, confidence)) for p in exact]


def beats(first: TradeOff, second: TradeOff, confidence: float) -> bool:
    """Whether `first` is significantly better in benefit or cost and not significantly worse in the
    other."""
    if not (first.has_values and second.has_values):
        return False
    if is_above(first.benefit, second.benefit, confidence):
        return not is_above(first.cost, second.cost, confidence)
    return is_above(second.cost, first.cost, confidence) and not is_above(
        second.benefit, first.benefit, confidence
    )


def is_above(first: Quantity, second: Quantity, confidence: float) -> bool:
    """Whether the first number is significantly above the second."""
    runs = [k for k in first.by_run if k in second.by_run]
    ours, theirs = (np.array([q.by_run[k] for k in runs]) for q in (first, second))
    if len(runs) > 1 and np.isfinite(ours).all() and np.isfinite(theirs).all():
        if (ours > 0).all() and (theirs > 0).all():
            ours, theirs = np.log(ours), np.log(theirs)
        low = mean_bounds(ours - theirs, np.ones(len(runs)), (1 + confidence) / 2).low
        return low is not None and low > 0
    low, high = first.interval.low, second.interval.high
    return (first.value if low is None else low) > (second.value if high is None else high)


def _cheapest_winner(point: TradeOff, points: Sequence[TradeOff], confidence: float) -> int | None:
    """The cheapest of the points that beat a point."""
    better = [k for k, other in enumerate(points) if beats(other, point, confidence)]
    return min(better, key=lambda k: points[k].cost.value, default=None)


def _standing(point: TradeOff, by: int | None) -> Standing:
    return Standing(point.has_values and by is None, by)


def _exactly(quantity: Quantity) -> Quantity:
    return Quantity(Interval(quantity.value))
