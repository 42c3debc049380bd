"""Means of groups that ignore a few foreign values: runs that a neighbour on the machine disturbed.

A least-squares fit, in which values far from the others of their group lose their weight (Tukey's
bisquare). Undisturbed values keep 95 % of their information.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.intervals import Values

Design = NDArray[np.float64]

LEAST_DF, LEAST_PER_GROUP = 12, 4
"""With fewer residual degrees of freedom, or values in a group, foreign values cannot be told from
others."""
_CUT = 4.685  # standard deviations, from where a value has no weight
_FAR = 3.5  # standard deviations, from where a value is foreign
_N_START, _N_STEPS = 10, 15
_ROUNDING = 1e-9


def robust_fit(design: Design, values: Values, n_per_group: float) -> tuple[Values, float] | None:
    """The effects of the columns of `design`, shape [n, p] and of full rank, and the variance of a
    value: that of the mean of k values is a k-th of it. None where all values fit without an error.

    The fit starts from least absolute residuals. The variance holds for large groups. That of small
    groups of n is 1 + 7/n² times as large (simulated: one-sided tests at 1.25 % keep their level),
    and 1 + 2 times the share of foreign values, since groups have more or fewer of them.

    Source: Huber & Ronchetti, Robust Statistics, 2nd ed. 2009, §7.6 (equation 7.85).
    """
    n, n_effects = design.shape
    residuals = values - design @ _weighted_fit(design, values, np.ones(n))
    for _ in range(_N_START):
        scale = _scale(residuals, n_effects)
        if scale < _ROUNDING:
            return None
        weights = 1 / np.maximum(np.abs(residuals), 0.1 * scale)
        effects = _weighted_fit(design, values, weights)
        residuals = values - design @ effects
    scale = _scale(residuals, n_effects)
    if scale < _ROUNDING:
        return None
    for _ in range(_N_STEPS):
        inside = np.maximum(1 - np.square(residuals / (_CUT * scale)), 0.0)
        effects = _weighted_fit(design, values, np.square(inside))
        residuals = values - design @ effects
    inside = np.maximum(1 - np.square(residuals / (_CUT * scale)), 0.0)
    influence = residuals * np.square(inside)
    slopes = inside * (inside - 4 * np.square(residuals / (_CUT * scale))) * (inside > 0)
    variance = n * float(np.square(influence).sum()) / float(slopes.sum()) ** 2 * n
    share_far = float(np.mean(np.abs(residuals) > _FAR * scale))
    small = (1 + 7 / n_per_group**2) * (1 + 2 * share_far)
    return effects, variance / (n - n_effects) * small


def _weighted_fit(design: Design, values: Values, weights: Values) -> Values:
    roots = np.sqrt(weights)
    found = np.linalg.lstsq(design * roots[:, None], values * roots, rcond=None)[0]
    return np.asarray(found, np.float64)


def _scale(residuals: Values, n_effects: int) -> float:
    """The standard deviation of normal residuals by their median distance from zero."""
    n = len(residuals)
    return 1.4826 * float(np.median(np.abs(residuals))) * math.sqrt(n / (n - n_effects))
