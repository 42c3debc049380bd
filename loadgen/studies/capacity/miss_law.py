"""The miss law: the probability that a request misses its SLO, a logistic function of the virtual
wait it finds, and its likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.studies.capacity.probe import Array

_STEPS, _STILL, _HALVINGS = 40, 1e-4, 12
_BLOCK = 4096
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

    def at(effects: Array) -> tuple[float, Array]:
        """The value, and the probability of a miss of each row: both from a single exp, which
        takes most of the time."""
        eta = design @ effects
        small = np.exp(-np.abs(eta))
        # Not `missed @ eta`: the threads of a long dot product took 38 ms on two busy cores.
        logs = missed * eta - np.maximum(eta, 0.0) - np.log(1 + small)
        share = np.where(eta >= 0, 1.0, small) / (1 + small)
        return float(logs.sum()) - 0.5 * float(penalty @ np.square(effects - centre)), share

    rows = np.ascontiguousarray(design.T)
    value, share = at(effects)
    for _ in range(_STEPS):
        weight = share * (1 - share) + _FLOOR
        curvature = np.diag(penalty)
        for k in range(0, len(design), _BLOCK):  # a block of rows stays in the cache
            block = slice(k, k + _BLOCK)
            curvature += (rows[:, block] * weight[block]) @ design[block]
        slope = rows @ (missed - share) - penalty * (effects - centre)
        step = np.linalg.solve(curvature, slope)
        for _ in range(_HALVINGS):
            nearer, nearer_share = at(effects + step)
            if nearer >= value:
                break
            step = step / 2
        rise, effects, value, share = nearer - value, effects + step, nearer, nearer_share
        if rise < _STILL:
            break
    return MissLaw(effects, value, curvature)
