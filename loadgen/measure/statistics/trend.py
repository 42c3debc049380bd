"""Whether a sequence of dependent values, such as the latencies behind a queue, has a trend."""

from __future__ import annotations

import math

import numpy as np

from loadgen.measure.statistics.intervals import Values

MOST_WAVE, LEAST_WAVE = 5.18, 0.2
_BINS = 4096
TREND_BATCHES = 20
MOST_DRIFT = 2.0
MOST_SLOPE = 16.0
"""Set by simulation (`benchmarks/steady_window.py`): at most 5 % of stationary M/M/1 queues at load
0.5 to 0.9, of 300 to 5 000 requests, have a trend by either limit."""


def has_trend(values: Values) -> bool:
    """Whether the values, in order of time, rise or fall by more than their dependence explains.

    Two tests, each against its own variation, so that no correlation needs to be estimated. Drift,
    for a sequence whose neighbouring batches hardly differ: the mean step between 20 batch means,
    over its standard error. Slope, for the others: the least-squares slope over its standard error,
    with the long-run variance 2 Σ S² / n² of the partial sums S of the residuals (Bartlett kernel
    as wide as the sequence). Fewer than 20 values have no trend.

    Source: Kiefer & Vogelsang, Econometric Theory 18(6), 2002 (the long-run variance).
    """
    n = len(values)
    if n < TREND_BATCHES or np.ptp(values) <= 1e-12 * np.abs(values).max():
        return False
    whole = values[: n // TREND_BATCHES * TREND_BATCHES]
    steps = np.diff(whole.reshape(TREND_BATCHES, -1).mean(axis=1))
    if abs(steps.mean()) * np.sqrt(len(steps)) > MOST_DRIFT * steps.std(ddof=1):
        return True
    return abs(slope_ratio(values)) > MOST_SLOPE


def has_wave(instants: Values) -> bool:
    """Whether the rate of arrivals at `instants` in [0, 1) changes slowly through the window, as
    over one day, a ramp or a crowd: the power of one period in the window, over the mean of 5 to 24
    periods, is beyond its 1 % point for a constant rate (F with 2 and 40 degrees of freedom), and
    the wave is at least a fifth of the rate. False for fewer than 20 arrivals.
    """
    n = len(instants)
    if n < TREND_BATCHES:
        return False
    counts, _ = np.histogram(instants, _BINS, (0.0, 1.0))
    power = np.square(np.abs(np.fft.rfft(counts)[:25]))
    is_wave = power[1] > MOST_WAVE * power[5:].mean()
    return bool(is_wave and 2 * np.sqrt(power[1]) >= LEAST_WAVE * n)


def slope_ratio(values: Values) -> float:
    """The least-squares slope of values in order of time over its standard error; 0 for values that
    hardly differ."""
    slope, error = slope_and_error(values)
    return slope / error if error else float(np.inf * np.sign(slope))


def slope_and_error(values: Values) -> tuple[float, float]:
    """The least-squares slope of values in order of time, per value, and its standard error, with
    the long-run variance of the residuals that `has_trend` uses; (0, 1) for values that hardly
    differ."""
    n = len(values)
    if n < 2 or np.ptp(values) <= 1e-12 * np.abs(values).max():
        return 0.0, 1.0
    at = np.arange(n) - (n - 1) / 2
    spread = float(np.dot(at, at))
    slope = float(np.dot(at, values)) / spread
    sums = np.cumsum(values - values.mean() - slope * at)
    long_run = 2 * float(np.dot(sums, sums)) / n**2
    return slope, float(np.sqrt(long_run / spread))


def reversion(values: Values) -> float:
    """How strongly values in order of time return to their mean: n Σ (xₖ₊₁ − xₖ)² / Σ (xₖ − x̄)²,
    about 2 n (1 − ρ₁). A random walk has 10 to 20 at any n, independent values 2 n. +inf for
    constant values.

    Source: D. A. Dickey, W. A. Fuller, J. Am. Stat. Assoc. 74(366), 1979 (n (ρ₁ − 1)).
    """
    centred = values - values.mean() if len(values) else values
    spread = float(np.square(centred).sum())
    return len(values) * float(np.square(np.diff(values)).sum()) / spread if spread else math.inf
