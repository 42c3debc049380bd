"""The number of requests that two runs need to show a change of a latency."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadgen.measure.attainment import due_rows
from loadgen.measure.catalog import METRICS
from loadgen.measure.per_request import per_request
from loadgen.measure.statistics.dependence import time_of
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.wording import format_count, format_share
from loadgen.records import Run

_LEAST = 3  # values that show how they vary
_BOTH_QUANTILES = 1.959964 + 1.281552  # normal: two-sided 95 % and a power of 90 %


@dataclass(frozen=True, slots=True)
class ShownChange:
    """Whether two runs of `n` requests each show a `change` of the mean of a metric, which
    `n_needed` requests a run do (None: too few to tell)."""

    metric: str
    change: float
    n: int
    n_needed: int | None

    @property
    def text(self) -> str:
        title, share = METRICS[self.metric].title, format_share(self.change)
        what = f"a {share} change of the mean {title}"
        if self.n_needed is None:
            return f"n = {format_count(self.n)} is too few to tell which change it can show"
        if self.n >= self.n_needed:
            return f"n = {format_count(self.n)} can show {what}; that needs {self._needed}"
        return f"n = {format_count(self.n)} cannot show {what}; you need {self._needed}"

    @property
    def _needed(self) -> str:
        return format_count(self.n_needed or 0)


def shown_change(run: Run, change: float) -> ShownChange:
    """The change of TTFT, or of E2E without a stream, that a second run like this one shows, by the
    successful due requests. Variation between runs comes on top (`slobench compare`)."""
    columns = per_request(run)
    metric = "ttft_s" if columns.is_streamed else "e2e_s"
    values_s = columns.column(metric)
    order = columns.release_order
    counted = (due_rows(run) & columns.is_ok & np.isfinite(values_s))[order]
    kept = values_s[order][counted]
    return ShownChange(metric, change, len(kept), requests_needed(kept, change))


def requests_needed(values: Values, change: float) -> int | None:
    """The number n of requests in each of two runs, of which a relative `change` of the mean is
    found at 95 % (two-sided) with a power of 90 %: n = 2 (z₀.₉₇₅ + z₀.₉₀)² cv² τ / change², τ the
    autocorrelation time of the `values` in order of release. None for fewer than three values or a
    mean of 0."""
    if len(values) < _LEAST or not values.mean() > 0:
        return None
    cv2 = float(np.var(values, ddof=1)) / float(values.mean()) ** 2
    tau = time_of(values)
    return max(_LEAST, math.ceil(2 * _BOTH_QUANTILES**2 * cv2 * tau / change**2))
