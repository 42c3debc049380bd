"""The variation of the times of steps around their costs, fitted to consecutive steps.

What the costs leave over is kept, so that a simulation is as slow on average as the server was, and
its slow steps come in spells as they did.
"""

from __future__ import annotations

import numpy as np

from loadgen.measure.statistics.ranks import mean_ranks
from loadgen.studies.calibrate.step_samples import Column
from reference_engine.state.step_variation import MOST_RATIO, StepVariation

_UP_TO = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0)  # shares of the steps
_N_PAUSES = 10
_LAGS = 2 ** np.arange(11)  # steps
_MEMORIES = 2.0 ** np.arange(0, 10.5, 0.5)  # steps
_SMALLEST = 1e-9


def variation_of(seconds: Column, costs_s: Column) -> StepVariation:
    """The variation of the times of consecutive steps [n] around their costs [n]. The memory is
    fitted by least squares to the autocorrelation of their normal scores up to 1 024 steps. Of the
    pauses in their order, equal parts are replaced by their means."""
    from scipy.special import ndtri

    n = len(seconds)
    ratio = np.minimum(seconds / costs_s, MOST_RATIO)
    pauses_s = np.sort((seconds - MOST_RATIO * costs_s)[seconds > MOST_RATIO * costs_s])
    up_to = np.array(_UP_TO)
    edges = np.ceil(up_to * n).astype(int)
    has_steps = np.diff(edges, append=n + 1) > 0  # few steps: fewer shares
    up_to, edges = up_to[has_steps], edges[has_steps]
    scores = ndtri((mean_ranks(seconds / costs_s) - 0.5) / n)
    scores -= scores.mean()
    lags = _LAGS[n / 4 > _LAGS]
    variance = max(float(np.mean(scores**2)), _SMALLEST)
    correlation = np.array([np.mean(scores[:-k] * scores[k:]) for k in lags]) / variance

    def fitted(memory: float) -> tuple[float, float]:
        """The squared error, and the share that lasts."""
        fading = np.exp(-lags / memory)
        share = float(np.clip(correlation @ fading / (fading @ fading), 0, 1))
        return float(np.sum((correlation - share * fading) ** 2)), share

    errors = {memory: fitted(memory) for memory in _MEMORIES.tolist()}
    memory = min(errors, key=lambda memory: errors[memory][0])
    return StepVariation(
        tuple(up_to.tolist()),
        tuple(float(part.mean()) for part in np.split(np.sort(ratio), edges[:-1])),
        errors[memory][1],
        memory,
        len(pauses_s) / n,
        tuple(float(part.mean()) for part in np.array_split(pauses_s, _N_PAUSES) if len(part)),
    )
