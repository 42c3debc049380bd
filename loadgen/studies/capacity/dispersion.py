"""The number of independent requests that a probe's requests are equivalent to.

Neighbours wait in the same queue and miss the SLO together, so n of them carry as much information
as n / D independent requests, D the design effect. Intervals that ignored this would be several
times too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadgen.studies.capacity.probe import N_BLOCKS, Array, Counts, Probe, counts

USUAL = 3.0
_USUAL_DF = 3.0  # weight of the prior, in degrees of freedom
_FEW, _MANY = 4, 8


@dataclass(frozen=True, slots=True)
class Dispersion:
    """`effect` is D ≥ 1 at the target, `df` its degrees of freedom. `memory` is the number of
    requests over which a queue may remember its past, for planning: the larger of the dispersion
    inside probes and between them, and more where attainment still falls from their first half to
    their second."""

    effect: float = USUAL
    df: float = _USUAL_DF
    memory: float = USUAL


def relative(miss: Array, target: float) -> Array:
    """D at a share of misses, relative to D at the target: ln(1 − target) / ln(miss), between 1/5
    and 10.

    Queues fluctuate more slowly and more widely the nearer they are to saturation. In an M/M/1
    queue ln(1/miss) is proportional to 1 − ρ, and D grows with (1 − ρ)⁻¹ to (1 − ρ)⁻²; the smaller
    exponent is used.
    """
    share = np.clip(miss, 1e-4, 0.97)
    scale: Array = np.clip(np.log(1 - target) / np.log(share), 0.2, 10.0)
    return scale


def dispersion(
    probes: Sequence[Probe], met: Array, expected: Array, relevance: Array, scale: Array
) -> Dispersion:
    """D from the scatter inside the probes and between them.

    `met` holds the requests of each probe that met the SLO, bounded as for the curve; `expected`
    the shares of the fitted curve, `relevance` the weight of each probe, `scale` the `relative` D
    of each. Inside: batch means over 4 and 8 stretches; the shorter stretches miss part of the slow
    fluctuations, so the difference is added once more (Richardson's extrapolation of a bias that
    falls with the length). Between: Pearson's residuals from the curve. Both are averaged by their
    degrees of freedom, together with a prior of 3 that weighs three.

    Source: Law & Kelton, Simulation Modeling and Analysis, §9.5.3 (batch means); McCullagh &
    Nelder, Generalized Linear Models, §4.5 (over-dispersion).
    """
    due = counts(probes)[0].sum(axis=1)
    variance = float(relevance @ (due * expected * (1 - expected)))
    if variance <= 1e-9:
        return Dispersion()
    weights = relevance / scale
    few, many = (_inside(probes, weights, groups) / variance for groups in (_FEW, _MANY))
    inside, inside_df = max(few, 2 * few - many), (_FEW - 1) * float(relevance.sum())
    total, df, sure_df, between = inside * inside_df, inside_df, inside_df / 2, 0.0
    worth = float(relevance.sum()) ** 2 / max(1e-9, float((relevance**2).sum()))
    if worth >= 3:
        spread = float(weights @ np.square(met - expected * due)) / variance
        between = spread * worth / (worth - 2)
        total, df = total + spread * worth, df + worth - 2
        sure_df = worth - 2 + inside_df / 3
    effect = max(1.0, (total + USUAL * _USUAL_DF) / (df + _USUAL_DF))
    memory = max(effect, inside, between) * _settling(probes, relevance, variance, effect)
    return Dispersion(effect, sure_df + _USUAL_DF, memory)


def _settling(probes: Sequence[Probe], relevance: Array, variance: float, effect: float) -> float:
    """1, or up to 4 where the first halves of the probes met the SLO more often than the second
    halves, by more than 1.5 standard errors: those probes were not warm yet."""
    due, met = counts(probes)
    half = N_BLOCKS // 2
    fell = met[:, :half].sum(axis=1) * due[:, half:].sum(axis=1)
    fell = fell - met[:, half:].sum(axis=1) * due[:, :half].sum(axis=1)
    total = float(relevance @ (fell / np.maximum(due.sum(axis=1) / 2, 1)))
    surprise = total / math.sqrt(max(1e-9, effect * variance))
    return min(4.0, max(1.0, surprise / 1.5))


def _inside(probes: Sequence[Probe], weights: Array, groups: int) -> float:
    """Σ weight · Σ (met − share · due)² over each probe's groups of blocks, × groups/(groups − 1);
    share is the probe's own."""
    due, met = (v.reshape(len(probes), groups, N_BLOCKS // groups).sum(2) for v in counts(probes))
    share = met.sum(axis=1) / np.maximum(due.sum(axis=1), 1)
    squares = np.square(met - share[:, None] * due).sum(axis=1)
    return float(weights @ squares) * groups / (groups - 1)


LEAST_DUE = 60

_GROUPS = 8

_SURE = 4.5  # standard errors


def clear(
    due: Counts, met: Counts, target: float, effect: float = USUAL
) -> Literal["fine", "saturated"] | None:
    """Whether attainment so far is surely above ("fine") or below ("saturated") the target; None
    while it is open.

    `due` and `met` are counts in equal stretches of the measured window so far. The difference must
    exceed 4.5 standard errors. The standard error is the larger of the scatter of eight batches and
    that of n / `effect` independent requests at the target. Hundreds of looks at a probe at the
    target err less than once in a thousand probes (measured in tests).
    """
    n_due, n_met = sum(due), sum(met)
    if n_due < LEAST_DUE:
        return None
    share = n_met / n_due
    parts = np.array([due, met], np.float64).reshape(2, _GROUPS, -1).sum(axis=2)
    scatter = math.sqrt(
        float(np.square(parts[1] - share * parts[0]).sum()) * _GROUPS / (_GROUPS - 1)
    )
    at_target = math.sqrt(max(effect, USUAL) * target * (1 - target) * n_due)
    if abs(n_met - target * n_due) < _SURE * max(scatter, at_target):
        return None
    return "fine" if share > target else "saturated"
