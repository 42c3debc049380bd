"""Which points of a trade-off are worth having: the Pareto front of noisy measurements.

Every point has a benefit (more is better: throughput per GPU) and a cost (less is better: a
latency), each measured in several runs. One point beats another where it is *surely* better in one
of the two and *not surely* worse in the other. The front is what nobody beats. Without noise this
is the ordinary front. With noise a point stays while nothing speaks against it for sure, and it
goes where all it has for itself may be chance.

Surely better means that the interval of the mean ratio, run by run, leaves out 1: the k-th runs of
two points had the same seed, and about the same minute. (Ratios, on the log scale, because a change
of a latency is in proportion to it; where a value is 0, differences and zero.) Where there are no
two such runs, it means that the points' own intervals do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadgen.measure.statistics.intervals import Interval, mean_bounds


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its interval, and what each run says by the run's number. +inf is what failed,
    NaN no value."""

    interval: Interval
    by_run: Mapping[int, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.interval.value


@dataclass(frozen=True, slots=True)
class TradeOff:
    """A measured trade-off. One without a value neither beats nor is beaten, and is on no front."""

    benefit: Quantity
    cost: Quantity

    @property
    def has_values(self) -> bool:
        return not (math.isnan(self.benefit.value) or math.isnan(self.cost.value))


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a point is on the front, and the index of one that beats it if not."""

    is_front: bool
    beaten_by: int | None = None


def pareto_front(points: Sequence[TradeOff], confidence: float) -> list[Standing]:
    """Where each point stands; of several that beat it, the one with the lowest cost is named.

    “Not surely worse” is not transitive, so it can happen, with very different noise, that every
    point is beaten by another; the front is then that of the estimates alone.
    """
    beaten = [_best(p, points, confidence) for p in points]
    if any(p.has_values and by is None for p, by in zip(points, beaten, strict=True)):
        return [_standing(p, by) for p, by in zip(points, beaten, strict=True)]
    exact = [TradeOff(_exactly(p.benefit), _exactly(p.cost)) for p in points]
    return [_standing(p, _best(p, exact, confidence)) for p in exact]


def beats(one: TradeOff, other: TradeOff, confidence: float) -> bool:
    """Whether `one` is surely better in one of the two and not surely worse in the other."""
    if not (one.has_values and other.has_values):
        return False
    if is_above(one.benefit, other.benefit, confidence):
        return not is_above(one.cost, other.cost, confidence)
    return is_above(other.cost, one.cost, confidence) and not is_above(
        other.benefit, one.benefit, confidence
    )


def is_above(one: Quantity, other: Quantity, confidence: float) -> bool:
    """Whether one number is surely above another."""
    runs = [k for k in one.by_run if k in other.by_run]
    ours, theirs = (np.array([q.by_run[k] for k in runs]) for q in (one, other))
    if len(runs) > 1 and np.isfinite(ours).all() and np.isfinite(theirs).all():
        if (ours > 0).all() and (theirs > 0).all():
            ours, theirs = np.log(ours), np.log(theirs)
        low = mean_bounds(ours - theirs, np.ones(len(runs)), (1 + confidence) / 2).low
        return low is not None and low > 0
    low, high = one.interval.low, other.interval.high
    return (one.value if low is None else low) > (other.value if high is None else high)


def _best(point: TradeOff, points: Sequence[TradeOff], confidence: float) -> int | None:
    """The cheapest of those that beat a point."""
    better = [k for k, other in enumerate(points) if beats(other, point, confidence)]
    return min(better, key=lambda k: points[k].cost.value, default=None)


def _standing(point: TradeOff, by: int | None) -> Standing:
    return Standing(point.has_values and by is None, by)


def _exactly(quantity: Quantity) -> Quantity:
    return Quantity(Interval(quantity.value))
