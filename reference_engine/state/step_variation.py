"""Times of steps that vary around their costs as on a measured server: by chance, and in spells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_CHUNK = 4096
_SEED = 0x5EED
MOST_RATIO = 2.0
"""The largest ratio of a step's time to its cost; the rest of a longer step is a pause."""


@dataclass(frozen=True, slots=True)
class StepVariation:
    """The distribution and the memory of the times of steps with a given cost.

    A step takes r times its cost, at most `MOST_RATIO` times: the fastest share `up_to[0]` of the
    steps takes `ratio[0]` times on average, those up to the share `up_to[k]` take `ratio[k]` times.
    `up_to` rises to 1. Slow steps come in spells: the normal score of r is the sum of a part that
    differs from step to step, and of a part with the share `lasting` of the variance, whose
    correlation fades to 1/e in `memory` steps.

    The share `pausing` of the steps pauses in addition, for one of the equally likely `pause_s`,
    which does not depend on the cost or on the step before.
    """

    up_to: tuple[float, ...]
    ratio: tuple[float, ...]
    lasting: float
    memory: float
    pausing: float = 0.0
    pause_s: tuple[float, ...] = ()


class VaryingSteps:
    """The times of the steps of an engine, one after another; equal for equal `number`. A step is
    passed by when it is executed, so that `varied` begins with the step that was executed last."""

    def __init__(self, variation: StepVariation, number: int = 0) -> None:
        self._variation = variation
        self._ratio = np.array(variation.ratio)
        self._scores = [NormalDist().inv_cdf(share) for share in variation.up_to[:-1]]
        self._kept = math.exp(-1 / variation.memory)
        self._rng = np.random.default_rng((_SEED, number))
        self._slow = float(self._rng.standard_normal())
        self._ready: list[tuple[float, float]] = []  # ratio and pause (s) of each step
        self._next = 0

    def varied(self, costs_s: Sequence[float]) -> list[float]:
        """The seconds of steps by their costs (s), of which the first was passed by last."""
        end = self._next + len(costs_s)
        while len(self._ready) < end:
            self._extend()
        ready = self._ready[self._next : end]
        return [
            cost_s * ratio + pause_s
            for cost_s, (ratio, pause_s) in zip(costs_s, ready, strict=True)
        ]

    def take(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The ratios of the next `n` steps to their costs, and their pauses (s); passes them by."""
        first = self._next + 1  # after the step that was passed by last
        while len(self._ready) < first + n:
            self._extend()
        taken = np.array(self._ready[first : first + n])
        self.pass_by(n)
        return taken[:, 0].copy(), taken[:, 1].copy()

    def pass_by(self, n: int) -> None:
        """Pass `n` steps by; a negative `n` takes the last of them back."""
        self._next += n
        if self._next > _CHUNK:
            del self._ready[: self._next - 1]
            self._next = 1

    def _extend(self) -> None:
        variation, rng, kept = self._variation, self._rng, self._kept
        new, own = rng.standard_normal((2, _CHUNK))
        new *= math.sqrt(1 - kept**2)
        slow = list(accumulate(new.tolist(), lambda x, e: kept * x + e, initial=self._slow))
        self._slow = slow[-1]
        lasting, pauses_s = variation.lasting, np.zeros(_CHUNK)
        score = math.sqrt(lasting) * np.array(slow[1:]) + math.sqrt(1 - lasting) * own
        ratio = self._ratio[np.searchsorted(self._scores, score)]
        if variation.pause_s:
            is_pausing = rng.random(_CHUNK) < variation.pausing
            pauses_s[is_pausing] = rng.choice(variation.pause_s, int(is_pausing.sum()))
        self._ready += zip(ratio.tolist(), pauses_s.tolist(), strict=True)
