"""Sequences in order of time: the statistics of arrival times, and the point where the steady state
begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.measure.statistics.intervals import Values
from loadgen.records import Times

ARRIVALS_PER_WINDOW = 5


def describe_arrivals(times: Times, horizon_s: float) -> dict[str, Any]:
    """Second-order statistics of sorted arrival times in [0, horizon_s).

    gap_cv: standard deviation / mean of the gaps. gap_lag1: correlation of neighbouring gaps.
    dispersion: variance / mean of the counts in equal windows of about five arrivals each (1 for
    Poisson at any window). peak_in_1s: the most arrivals in any [t, t + 1 s).
    """
    gaps_s = np.diff(times)
    has_gaps = gaps_s.size > 1 and float(np.mean(gaps_s)) > 0
    is_varied = gaps_s.size > 2 and all(
        float(np.std(part)) > 1e-9 * float(np.mean(gaps_s)) for part in (gaps_s[:-1], gaps_s[1:])
    )
    n_windows = times.size // ARRIVALS_PER_WINDOW
    counts, _ = np.histogram(times, max(n_windows, 1), (0.0, horizon_s))
    return {
        "gap_cv": float(np.std(gaps_s) / np.mean(gaps_s)) if has_gaps else None,
        "gap_lag1": float(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) if is_varied else None,
        "dispersion": float(np.var(counts) / np.mean(counts)) if n_windows >= 10 else None,
        "dispersion_window_s": horizon_s / n_windows if n_windows >= 10 else None,
        "peak_in_1s": int(np.max(np.searchsorted(times, times + 1.0) - np.arange(times.size))),
    }


MSER_BATCH = 5


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The first `cut` values are warm-up. `is_found` is False where the best cut lies in their
    second half: the sequence did not settle, or is too short to show it."""

    cut: int
    is_found: bool


def mser5(values: Values) -> SteadyState:
    """The cut of a time-ordered sequence that minimises the standard error of the mean of the rest.

    Values are averaged by fives, Y₁…Y_k; the cut d minimises Σ_{j>d} (Y_j − Ȳ_d)² / (k − d)². Cuts
    that leave fewer than five batches are not tried (so few values may agree by chance); fewer than
    ten batches are never cut. The caller removes NaN first.

    Source: White, Cobb & Spratt, Proc. Winter Simulation Conference 2000 (MSER-5).
    """
    n_batches = len(values) // MSER_BATCH
    if n_batches < 2 * MSER_BATCH:
        return SteadyState(0, False)
    batches = values[: n_batches * MSER_BATCH].reshape(n_batches, MSER_BATCH).mean(axis=1)
    batches = batches - batches.mean()  # keeps the sums of squares exact
    left = np.arange(n_batches, 0, -1)
    sums, squares = (np.cumsum(x[::-1])[::-1] for x in (batches, np.square(batches)))
    spread = np.maximum(squares - sums**2 / left, 0.0)[: n_batches - MSER_BATCH]
    cut = int(np.argmin(spread / np.square(left[: n_batches - MSER_BATCH])))
    return SteadyState(cut * MSER_BATCH, cut < n_batches / 2)
