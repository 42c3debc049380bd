"""The attainment curve through the probes, and what it leaves open about where it meets the target.

Near the target the log-odds of attainment fall in a straight line with the logarithm of the load:
logit A(x) = logit(target) − slope · (ln x − ln capacity), slope > 0. What is known of capacity and
slope is a posterior on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadgen.measure.capacity.capacity_probe import Array, Probe, counts
from loadgen.measure.capacity.dispersion import USUAL, Dispersion, dispersion, relative

_N_LEVELS = 121
_N_SLOPES, _LEAST_SLOPE, _MOST_SLOPE = 31, 0.4, 400.0
_USUAL_SLOPE, _SLOPE_SD = 8.0, 1.5  # of the prior, log-normal: 95 % between 0.4 and 150
REACH_LOGIT = 1.1
"""How far from the answer, in log-odds, a probe is still near it."""
_REACH_SD = 3.0
_WARM_REQUESTS, _LEAST_REQUESTS = 1.5, 6.0  # over the memory; shorter probes count for less
_LEAST_COUNTED = 2.0  # of the probes' nearness, however short they all are
_SHORTER = 1.25  # a step from the memory to the one that probes can stand for
_PASSES = 3
_MOST_LOGIT = 2.5
_MOST_UNSEEN = 32.0  # times what is seen of a memory is believed to be unseen
_LEAST_NEAR = 6


@dataclass(frozen=True)
class Posterior:
    """What is known of the capacity: probabilities over ln(level) and slope."""

    log_levels: Array
    slopes: Array
    joint: Array  # [levels, slopes], sums to 1
    dispersion: Dispersion
    relevance: Array  # of each probe, 0 to 1: how near it is, and less where it is short
    nearness: Array  # of each probe, 0 to 1

    @property
    def weights(self) -> Array:
        """Probabilities over `log_levels`."""
        weights: Array = self.joint.sum(axis=1)
        return weights

    def quantile(self, share: float) -> float:
        """The level below which the capacity lies with this probability."""
        weights = self.weights
        middle = np.cumsum(weights) - weights / 2
        return math.exp(float(np.interp(share, middle, self.log_levels)))

    @property
    def sd(self) -> float:
        """Standard deviation of ln(capacity)."""
        weights = self.weights
        mean = float(weights @ self.log_levels)
        return math.sqrt(max(0.0, float(weights @ np.square(self.log_levels - mean))))

    @property
    def slope(self) -> float:
        """The median slope: by how many log-odds attainment falls per e-fold load."""
        cumulative = np.cumsum(self.joint.sum(axis=0))
        return float(self.slopes[min(int(np.searchsorted(cumulative, 0.5)), len(self.slopes) - 1)])

    def memory(self, target: float) -> float:
        """How many requests a queue may remember: what the probes showed, or what a queue of this
        slope does, up to 32 times what they showed or what is usual, as probes shorter than it
        cannot show it.

        In heavy traffic a queue's ln(1/miss) is θ(1 − ρ), ρ the load over the one at which it grows
        for ever; then the slope is θρ over the attainment, and 1 − ρ is ln(1/miss) over their
        product. It forgets within 2σ²/(1 − ρ)² requests, σ² the sum of the squared cv of gaps and
        of work. That is taken as 1: too much where both are even, which the 32 bounds.

        Source: L. Kleinrock, Queueing Systems 2 (1976), §2.7–2.8 (diffusion approximation).
        """
        seen = self.dispersion.memory
        by_slope = 2 * (self.slope * target / math.log(1 / (1 - target))) ** 2
        return max(seen, min(by_slope, _MOST_UNSEEN * max(seen, USUAL)))

    def band(self, levels: Array, target: float, confidence: float) -> tuple[Array, Array, Array]:
        """(low, middle, high) of attainment at each level."""
        gap = np.log(levels)[:, None, None] - self.log_levels[None, :, None]
        eta = logit(target) - self.slopes[None, None, :] * gap
        order = np.argsort(eta.reshape(len(levels), -1), axis=1)
        sorted_eta = np.take_along_axis(eta.reshape(len(levels), -1), order, axis=1)
        mass = np.cumsum(self.joint.reshape(-1)[order], axis=1)
        tail = (1 - confidence) / 2
        ends = []
        for share in (tail, 0.5, 1 - tail):
            place = np.minimum((mass < share).sum(axis=1), mass.shape[1] - 1)
            ends.append(sorted_eta[np.arange(len(levels)), place])
        low, middle, high = (1 / (1 + np.exp(-np.clip(end, -500, 500))) for end in ends)
        return low, middle, high


def logit(share: float) -> float:
    """Log-odds of a share in (0, 1)."""
    return math.log(share / (1 - share))


def posterior(
    probes: Sequence[Probe], target: float, low: float, high: float, is_fixed: bool = False
) -> Posterior:
    """The posterior from usable probes (one or more), prior flat in ln(level) from `low` to `high`.

    The line only holds nearby, so each pass weighs a probe by how near the pass before found the
    target: exp(−(ln level − ln capacity)² / 2r²), r the largest of 1.1 log-odds, three standard
    deviations of what is known, and what takes in six probes, a fine and a missed one among them. A
    probe whose warm-up or window was short for queues this slow counts less, beside those that were
    longer: where nearly all were short, the longer ones of them count. `is_fixed`: the window is
    what is asked for, and none is too short.
    The likelihood is the binomial one with D for its scale, integrated over what D leaves open: a
    Student t kernel (1 + deviance / (df · D))^(−(df + 1)/2).
    """
    levels = np.linspace(math.log(low), math.log(high), _N_LEVELS)
    alike = _Weights(*np.ones((3, len(probes))))
    slopes = np.geomspace(_LEAST_SLOPE, _MOST_SLOPE, _N_SLOPES)
    found = _on_grid(probes, target, levels, slopes, alike)
    for _ in range(_PASSES):
        first, last = (math.log(found.quantile(share)) for share in (0.001, 0.999))
        margin = max(0.25 * (last - first), 1e-3)
        begin, end = max(math.log(low), first - margin), min(math.log(high), last + margin)
        levels = np.linspace(begin, end, _N_LEVELS)
        slopes = _slopes_of(found)
        weights = _weights(probes, target, found, is_fixed)
        found = _on_grid(probes, target, levels, slopes, weights)
    return found


def _slopes_of(found: Posterior) -> Array:
    """Slopes around those that have any weight."""
    cumulative = np.cumsum(found.joint.sum(axis=0))
    first, last = (int(np.searchsorted(cumulative, share)) for share in (1e-4, 1 - 1e-4))
    low = found.slopes[max(0, first - 1)] / 1.3
    high = found.slopes[min(len(found.slopes) - 1, last + 1)] * 1.3
    return np.geomspace(max(_LEAST_SLOPE, low), min(_MOST_SLOPE, high), _N_SLOPES)


class _Weights(NamedTuple):
    """Of each probe: how near it is, how much it counts, and its relative design effect."""

    nearness: Array
    relevance: Array
    scale: Array


def _weights(probes: Sequence[Probe], target: float, found: Posterior, is_fixed: bool) -> _Weights:
    level = np.array([probe.level for probe in probes])
    away = np.log(level) - math.log(found.quantile(0.5))
    reach = max(REACH_LOGIT / found.slope, _REACH_SD * found.sd, _least_reach(probes, away, target))
    near = np.exp(-0.5 * np.square(away / reach))
    # Half believed here: those of a cliff end early, and would never count.
    memory = math.sqrt(found.dispersion.memory * found.memory(target))
    counted = near if is_fixed else near * _enough(probes, near, memory)
    miss = 1 / (1 + np.exp(np.clip(logit(target) - found.slope * away, -9.0, 9.0)))
    return _Weights(near, np.maximum(counted, 1e-6), relative(miss, target))


def _enough(probes: Sequence[Probe], near: Array, memory: float) -> Array:
    """How far each probe was long enough for what a queue remembers, 0 to 1: the square of what
    its window and its warm-up are of six and of one and a half memories.

    A memory that leaves less than two near probes in the count is taken for as much shorter: once
    a single long probe shows a slow queue, all others would be nothing, and it knows no slope.
    """
    n = np.array([probe.n_due for probe in probes], np.float64)
    warmed = n * np.array([probe.warmup_s / probe.measured_s for probe in probes])

    def enough(memory: float) -> Array:
        window = np.minimum(1.0, n / (_LEAST_REQUESTS * memory))
        shares: Array = window * np.minimum(1.0, warmed / (_WARM_REQUESTS * memory))
        return shares**2

    least = min(_LEAST_COUNTED, float(near[warmed > 0].sum()) / 2)
    while near @ enough(memory) < least:
        memory /= _SHORTER
    return enough(memory)


def _bounded(due: Array, met: Array, target: float) -> Array:
    """Counts whose log-odds are at most 2.5 from the target's, as those of the curve are: farther
    away, all that counts is that it is farther away. Past a cliff a server keeps no promise at all,
    and a straight line through *none* would be bent away from where the cliff is."""
    least, most = (1 / (1 + math.exp(-logit(target) + by)) for by in (_MOST_LOGIT, -_MOST_LOGIT))
    return np.clip(met, least * due, most * due)


def _least_reach(probes: Sequence[Probe], away: Array, target: float) -> float:
    """How far the six nearest probes lie, and the nearest on either side of the promise."""
    distance = np.abs(away)
    is_fine = np.array([probe.attainment >= target for probe in probes])
    sides = [float(distance[side].min()) for side in (is_fine, ~is_fine) if side.any()]
    return max(float(np.sort(distance)[min(_LEAST_NEAR, len(probes)) - 1]), *sides)


def _on_grid(
    probes: Sequence[Probe],
    target: float,
    log_levels: Array,
    slopes: Array,
    weights: _Weights,
) -> Posterior:
    x = np.log([probe.level for probe in probes])
    due, met = (values.sum(axis=1) for values in counts(probes))
    met = _bounded(due, met, target)
    counted = weights.relevance / weights.scale
    gap = x[None, None, :] - log_levels[:, None, None]
    eta = np.clip(-slopes[None, :, None] * gap, -_MOST_LOGIT, _MOST_LOGIT) + logit(target)
    missed = np.logaddexp(0, eta)  # −ln(1 − A); −ln A is that less eta
    deviance = 2 * ((missed - eta) @ (counted * met) + missed @ (counted * (due - met)))
    best = np.unravel_index(int(np.argmin(deviance)), deviance.shape)
    expected = 1 / (1 + np.exp(-eta[best]))
    spread = dispersion(probes, met, expected, weights.relevance, weights.scale)
    prior = -0.5 * np.square(np.log(slopes / _USUAL_SLOPE) / _SLOPE_SD)
    above = (deviance - deviance.min()) / (spread.df * spread.effect)
    log_joint = -(spread.df + 1) / 2 * np.log1p(above) + prior
    joint = np.exp(log_joint - log_joint.max())
    joint /= joint.sum()
    return Posterior(log_levels, slopes, joint, spread, weights.relevance, weights.nearness)
