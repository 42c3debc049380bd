"""The miss law: the probability that a request misses its SLO, a logistic function of the virtual
wait it finds, and its likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.studies.capacity.probe import Array

_STEPS, _STILL, _MOST_STEP = 25, 1e-5, 2.0
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

    Newton's method, its steps limited to 2 log-odds per effect. The penalty of at least one effect
    on perfectly separated outcomes must be positive.

    Source: McCullagh & Nelder, Generalized Linear Models, §4.4.
    """
    effects = centre.copy()
    effects[0] = np.log((missed.sum() + 0.5) / (len(missed) - missed.sum() + 0.5))
    for _ in range(_STEPS):
        share = expit(design @ effects)
        curvature = (design.T * (share * (1 - share) + _FLOOR)) @ design + np.diag(penalty)
        step = np.linalg.solve(
            curvature, design.T @ (missed - share) - penalty * (effects - centre)
        )
        effects = effects + np.clip(step, -_MOST_STEP, _MOST_STEP)
        if np.abs(step).max() < _STILL:
            break
    eta = design @ effects
    likelihood = float(missed @ eta - np.logaddexp(0, eta).sum())
    likelihood -= 0.5 * float(penalty @ np.square(effects - centre))
    return MissLaw(effects, likelihood, curvature)
