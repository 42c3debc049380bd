"""The attainment curve through the probes, and the posterior of the load at which it meets the
target.

Near the target the log-odds of attainment fall in a straight line with the logarithm of the load:
logit A(x) = logit(target) − slope · (ln x − ln capacity), slope > 0. The posterior of capacity and
slope is computed on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadgen.studies.capacity.dispersion import USUAL, Dispersion, dispersion, relative
from loadgen.studies.capacity.probe import Array, Probe, counts

_N_LEVELS = 121
_N_SLOPES, _LEAST_SLOPE, _MOST_SLOPE = 31, 0.4, 400.0
_USUAL_SLOPE, _SLOPE_SD = 8.0, 1.5  # of the prior, log-normal: 95 % between 0.4 and 150
REACH_LOGIT = 1.1
"""The distance from the capacity, in log-odds, within which a probe counts as near it."""
_REACH_SD = 3.0
_WARM_REQUESTS, _LEAST_REQUESTS = 1.5, 6.0  # over the memory; shorter probes count for less
_LEAST_COUNTED = 2.0  # near probes' worth that count however short all probes are
_SHORTER = 1.25  # factor by which the memory is shortened until enough probes count
_PASSES = 3
_MOST_LOGIT = 2.5
_GREW = 3.0  # standard errors of a Poisson count, by which a queue grew
_LEAST_SERVED, _SERVED_CV = 20.0, 1.5
_FALL_BELOW, _FALL_ABOVE = 0.35, 0.4  # scale of ln(fall at the throughput / usual fall)
_N_RATES, _RATE_SDS = 7, 2.0  # grid over the uncertainty of the throughput
_EFFECT_FLAT, _EFFECT_TIMES = 15.0, 4.5  # the most that D can be, over the memory of a slope
_COLLAPSE = 0.08  # a server may serve so much less when overloaded than at its best (sd)
_MOST_UNSEEN = 32.0  # the memory may be at most this many times what the probes showed
_LEAST_NEAR = 6


@dataclass(frozen=True)
class Posterior:
    """The posterior of the capacity: probabilities over ln(level) and slope."""

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
        """The median slope: the fall of attainment, in log-odds, per e-fold load."""
        cumulative = np.cumsum(self.joint.sum(axis=0))
        return float(self.slopes[min(int(np.searchsorted(cumulative, 0.5)), len(self.slopes) - 1)])

    def memory(self, target: float) -> float:
        """The number of requests over which a queue may remember its past. This is the larger of
        the memory that the probes showed and the memory of a queue of this slope; the latter is
        limited to 32 times the former (or the usual value), since probes shorter than the memory
        cannot show it.

        See `_memory_of`, whose σ² = 1 is too much where gaps and work are even: the factor 32
        bounds it.
        """
        shown = self.dispersion.memory
        by_slope = float(_memory_of(np.array([self.slope]), target)[0])
        return max(shown, min(by_slope, _MOST_UNSEEN * max(shown, USUAL)))

    def band(self, levels: Array, target: float, confidence: float) -> tuple[Array, Array, Array]:
        """(lower bound, median, upper bound) of attainment at each level."""
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
    """The posterior from usable probes (at least 1), with a prior flat in ln(level) from `low` to
    `high`.

    The straight line only holds near the target, so each pass weights a probe by its distance from
    the capacity that the pass before found: exp(−(ln level − ln capacity)² / 2r²). r is the largest
    of 1.1 log-odds, three standard deviations of the posterior, and the distance that includes six
    probes, among them a probe that met the target and a probe that missed it. A probe whose warm-up
    or window was short for a queue this slow counts less than longer probes; where nearly all were
    short, the longer probes among them count. `is_fixed`: the window is the scenario's own, and no
    probe is too short. The likelihood is binomial with D for its scale, integrated over the
    uncertainty of D: a Student t kernel (1 + deviance / (df · D))^(−(df + 1)/2). D is limited by
    the slope (`_most_effect`), because a flat curve is that of a queue with a short memory:
    otherwise the scatter of a slow queue would pass for noise around a flat curve.

    An overloaded probe shows the server's `throughput`; the prior of the slope follows from it
    (`_log_prior_of_fall`).
    """
    levels = np.linspace(math.log(low), math.log(high), _N_LEVELS)
    equal_weights = _Weights(*np.ones((3, len(probes))))
    slopes = np.geomspace(_LEAST_SLOPE, _MOST_SLOPE, _N_SLOPES)
    most = None if is_fixed else throughput(probes, target)
    estimate = _on_grid(probes, target, levels, slopes, equal_weights, most)
    for _ in range(_PASSES):
        first, last = (math.log(estimate.quantile(share)) for share in (0.001, 0.999))
        margin = max(0.25 * (last - first), 1e-3)
        begin, end = max(math.log(low), first - margin), min(math.log(high), last + margin)
        levels = np.linspace(begin, end, _N_LEVELS)
        slopes = _slopes_of(estimate)
        weights = _weights(probes, target, estimate, is_fixed)
        estimate = _on_grid(probes, target, levels, slopes, weights, most)
    return estimate


class Throughput(NamedTuple):
    """The rate at which an overloaded server ended requests: ln(rate), and its standard error."""

    log_rate: float
    se: float


def has_grown(n_due: float, n_ended: float) -> bool:
    """Whether a queue grew: fewer requests ended than were due, by more than chance explains."""
    return n_due - n_ended > _GREW * math.sqrt(n_due)


def throughput(probes: Sequence[Probe], target: float) -> Throughput | None:
    """The highest rate at which the server ended requests while its queue grew; None if no probe
    shows it, or if requests at a rate two standard errors above it met the target. No higher load
    can be sustained."""
    rates = [
        (probe.served_per_s, n)
        for probe in probes
        if probe.served_per_s is not None
        and (n := probe.served_per_s * probe.measured_s) >= _LEAST_SERVED
        and has_grown(probe.n_due, n)
    ]
    if not rates:
        return None
    rate, n = max(rates)
    found = Throughput(math.log(rate), math.hypot(_SERVED_CV / math.sqrt(n), _COLLAPSE))
    least = rate * math.exp(2 * found.se)
    # By the requests that came, not by the load: a short probe may lie between two bursts.
    if any(p.n_due > least * p.measured_s and p.attainment >= target for p in probes):
        return None
    return found


def _memory_of(slopes: Array, target: float) -> Array:
    """The number of requests over which a queue with each slope remembers its past.

    In heavy traffic a queue's ln(1/miss) is θ(1 − ρ), ρ the load relative to the load at which the
    queue grows without end; the slope is then θρ over the attainment, and 1 − ρ is ln(1/miss) over
    their product. The queue forgets within 2σ²/(1 − ρ)² requests, σ² the sum of the squared cv of
    gaps and of work, taken as 1.

    Source: L. Kleinrock, Queueing Systems 2 (1976), §2.7–2.8 (diffusion approximation).
    """
    memory: Array = 2 * np.square(slopes * target / math.log(1 / (1 - target)))
    return memory


def _most_effect(slopes: Array, target: float) -> Array:
    """The largest D for each slope, 15 + 4.5 times the memory: three times the usual D of nine
    queues (`benchmarks/capacity_search.py`), of which work of cv 2 and 1.5 showed 1.8 and 3.0 times
    the usual, the others 0.3 to 1.1 times."""
    most: Array = _EFFECT_FLAT + _EFFECT_TIMES * _memory_of(slopes, target)
    return most


def _log_prior_of_fall(most: Throughput, target: float, log_levels: Array, slopes: Array) -> Array:
    """The logarithm of the prior, [levels, slopes], from the fall of the curve between the capacity
    and the throughput, in log-odds: slope · (ln throughput − ln capacity).

    At the throughput a queue grows without end, and nothing meets an SLO in the long run. In heavy
    traffic (`_memory_of`) the fall is ln(1/(1 − target)) / target; nine queues showed 0.7 to 1.1
    times that at a target of 90 %. Smaller falls are unlikely (log-normal, scale 0.35); larger
    falls are possible (the tail of a Cauchy distribution, scale 0.4), because some SLOs are missed
    by load alone, without a queue. Averaged over the uncertainty of the throughput.
    """
    z = np.linspace(-_RATE_SDS, _RATE_SDS, _N_RATES)
    weights = np.exp(-0.5 * np.square(z))
    above = most.log_rate + most.se * z[None, :] - log_levels[:, None]  # [levels, rates]
    usual = math.log(1 / (1 - target)) / target
    away = np.log(slopes)[None, :, None] + np.log(np.maximum(above, 1e-9) / usual)[:, None, :]
    below, beyond = np.minimum(away, 0.0) / _FALL_BELOW, np.maximum(away, 0.0) / _FALL_ABOVE
    density = np.exp(-0.5 * np.square(below)) / (1 + np.square(beyond))
    prior: Array = np.log(density @ (weights / weights.sum()) + 1e-12)
    return prior


def _slopes_of(estimate: Posterior) -> Array:
    """Slopes around the slopes that carry any weight."""
    cumulative = np.cumsum(estimate.joint.sum(axis=0))
    first, last = (int(np.searchsorted(cumulative, share)) for share in (1e-4, 1 - 1e-4))
    low = estimate.slopes[max(0, first - 1)] / 1.3
    high = estimate.slopes[min(len(estimate.slopes) - 1, last + 1)] * 1.3
    return np.geomspace(max(_LEAST_SLOPE, low), min(_MOST_SLOPE, high), _N_SLOPES)


class _Weights(NamedTuple):
    """Per probe: its nearness, its weight, and its relative design effect."""

    nearness: Array
    relevance: Array
    scale: Array


def _weights(
    probes: Sequence[Probe], target: float, estimate: Posterior, is_fixed: bool
) -> _Weights:
    level = np.array([probe.level for probe in probes])
    away = np.log(level) - math.log(estimate.quantile(0.5))
    reach = max(
        REACH_LOGIT / estimate.slope, _REACH_SD * estimate.sd, _least_reach(probes, away, target)
    )
    near = np.exp(-0.5 * np.square(away / reach))
    # The geometric mean of both estimates: at a cliff probes end early, and would never count.
    memory = math.sqrt(estimate.dispersion.memory * estimate.memory(target))
    counted = near if is_fixed else near * _enough(probes, near, memory)
    miss = 1 / (1 + np.exp(np.clip(logit(target) - estimate.slope * away, -9.0, 9.0)))
    return _Weights(near, np.maximum(counted, 1e-6), relative(miss, target))


def _enough(probes: Sequence[Probe], near: Array, memory: float) -> Array:
    """Whether each probe was long enough for the queue's memory, 0 to 1: the square of the ratio of
    its window to six memories, and of its warm-up to 1.5 memories, each at most 1.

    If fewer than two near probes would count, the memory is shortened until two do. Otherwise a
    single long probe that shows a slow queue would make all others count for nothing, and a single
    probe gives no slope.
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
    """Counts limited to within 2.5 log-odds of the target, as the curve's are: farther away, the
    distance does not matter. Beyond a cliff a server meets no SLO at all, and a straight line
    through zero would move the estimate away from the cliff."""
    least, most = (1 / (1 + math.exp(-logit(target) + by)) for by in (_MOST_LOGIT, -_MOST_LOGIT))
    return np.clip(met, least * due, most * due)


def _least_reach(probes: Sequence[Probe], away: Array, target: float) -> float:
    """The distance to the sixth nearest probe, and to the nearest probe on either side of the
    target, whichever is the largest."""
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
    most: Throughput | None,
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
    scaled = deviance / np.minimum(spread.effect, _most_effect(slopes, target))
    above = (scaled - scaled.min()) / spread.df
    log_joint = -(spread.df + 1) / 2 * np.log1p(above) + prior
    if most is not None:
        log_joint = log_joint + _log_prior_of_fall(most, target, log_levels, slopes)
    joint = np.exp(log_joint - log_joint.max())
    joint /= joint.sum()
    return Posterior(log_levels, slopes, joint, spread, weights.relevance, weights.nearness)
