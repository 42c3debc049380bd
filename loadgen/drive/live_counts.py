"""Durations counted while a run is under way, for percentiles that need not be exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_LOWEST_S, _HIGHEST_S = 1e-6, 600.0
_STEPS = 1000  # per factor e: a value is known to within 0.05 %
_BINS = round(math.log(_HIGHEST_S / _LOWEST_S) * _STEPS) + 1


class LiveCounts:
    """Counts in bins of equal ratio from 1 µs to 600 s; what lies outside is in the nearest one.

    What adding and a percentile take does not depend on what was counted before: some 50 µs.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)

    @property
    def n(self) -> int:
        return int(self._counts.sum())

    def add(self, seconds: Sequence[float]) -> None:
        if not seconds:
            return
        known = np.clip(np.array(seconds, np.float64), _LOWEST_S, _HIGHEST_S)
        bins = np.rint(np.log(known / _LOWEST_S) * _STEPS).astype(np.intp)
        self._counts += np.bincount(bins, minlength=_BINS)

    def quantile(self, q: float) -> float:
        """The nearest-rank q-quantile, seconds; NaN where nothing was counted."""
        n = self.n
        if not n:
            return math.nan
        rank = min(n, max(1, math.ceil(q * n)))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return _LOWEST_S * math.exp(place / _STEPS)
