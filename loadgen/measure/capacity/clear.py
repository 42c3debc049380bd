"""When a probe may end early, because what it would say is clear."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from loadgen.measure.capacity.capacity_probe import Counts
from loadgen.measure.capacity.dispersion import USUAL

LEAST_DUE = 60
_GROUPS = 8
_SURE = 4.5  # standard errors


def clear(
    due: Counts, met: Counts, target: float, effect: float = USUAL
) -> Literal["fine", "saturated"] | None:
    """Whether attainment so far is surely above or below the target; None while it is open.

    `due` and `met` are of equal stretches of the measured window so far. The difference must exceed
    4.5 standard errors, taken as the larger of what eight batches scatter by and of what
    n / `effect` independent requests would at the target. Looking hundreds of times errs below once
    in a thousand probes at the target (measured in tests).
    """
    n, kept = sum(due), sum(met)
    if n < LEAST_DUE:
        return None
    share = kept / n
    parts = np.array([due, met], np.float64).reshape(2, _GROUPS, -1).sum(axis=2)
    scatter = math.sqrt(
        float(np.square(parts[1] - share * parts[0]).sum()) * _GROUPS / (_GROUPS - 1)
    )
    at_target = math.sqrt(max(effect, USUAL) * target * (1 - target) * n)
    if abs(kept - target * n) < _SURE * max(scatter, at_target):
        return None
    return "fine" if share > target else "saturated"
