"""The miss law: the probability that a request misses its SLO, a logistic function of the virtual
wait it finds, and its likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.studies.capacity.probe import Array

_STEPS, _STILL, _HALVINGS = 40, 1e-4, 12
_FLOOR = 1e-6  # of the variance of an outcome, for rows that the law is sure of


@dataclass(frozen=True)
class MissLaw:
    """ln(p / (1 − p)) = design · `effects`; `log_likelihood` and `curvature` (its negative second
    derivative, [k, k]) include the penalty."""

    effects: Array
    log_likelihood: float
    curvature: Array

    def misses(self, design: Array) -> Array:
        """The probability of a miss of each row of a design, [n, k] → [n]."""
        return expit(design @ self.effects)


def expit(eta: Array) -> Array:
    """1 / (1 + exp(−eta)), without overflow."""
    share: Array = 1 / (1 + np.exp(-np.clip(eta, -40.0, 40.0)))
    return share


def fit(design: Array, missed: Array, penalty: Array, centre: Array) -> MissLaw:
    """The law that maximises the likelihood of `missed` (0 or 1, [n]) less ½ Σ penalty ·
    (effect − centre)².

    Newton's method; a step is halved until the value rises. The penalty of every effect that could
    separate the outcomes perfectly must be positive.

    Source: McCullagh & Nelder, Generalized Linear Models, §4.4.
    """
    effects = centre.copy()
    effects[0] = np.log((missed.sum() + 0.5) / (len(missed) - missed.sum() + 0.5))

    def value_at(effects: Array) -> float:
        eta = design @ effects
        likelihood = float(missed @ eta - np.logaddexp(0, eta).sum())
        return likelihood - 0.5 * float(penalty @ np.square(effects - centre))

    value = value_at(effects)
    for _ in range(_STEPS):
        share = expit(design @ effects)
        curvature = (design.T * (share * (1 - share) + _FLOOR)) @ design + np.diag(penalty)
        slope = design.T @ (missed - share) - penalty * (effects - centre)
        step = np.linalg.solve(curvature, slope)
        for _ in range(_HALVINGS):
            nearer = value_at(effects + step)
            if nearer >= value:
                break
            step = step / 2
        rise, effects, value = nearer - value, effects + step, nearer
        if rise < _STILL:
            break
    return MissLaw(effects, value, curvature)
