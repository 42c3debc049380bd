"""Durations counted while a run is under way, for percentiles that need not be exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hdrh.histogram import HdrHistogram

_LOWEST_US, _HIGHEST_US, _DIGITS = 1, 600_000_000, 3


class LiveCounts:
    """An HdrHistogram from 1 µs to 600 s, three digits; what lies outside is at the nearest end.

    The library walks through its buckets in Python, milliseconds for each percentile, so the walk
    is numpy's here, over the library's own counts: `benchmarks/live_view.py`.
    """

    def __init__(self) -> None:
        self._histogram = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        self._counts = np.ctypeslib.as_array(self._histogram.counts)  # its memory, not a copy

    @property
    def n(self) -> int:
        return int(self._histogram.get_total_count())

    def add(self, seconds: Sequence[float]) -> None:
        for one in seconds:
            us = min(_HIGHEST_US, max(_LOWEST_US, round(one * 1e6)))
            self._histogram.record_value(us)

    def quantile(self, q: float) -> float:
        """The nearest-rank q-quantile, seconds; NaN where nothing was counted."""
        if not self.n:
            return math.nan
        rank = min(self.n, max(1, math.ceil(q * self.n)))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(self._histogram.get_value_from_index(place)) * 1e-6
