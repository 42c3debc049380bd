"""The rate of the events of a population of users, with an interval by batch means."""

from __future__ import annotations

import math

import numpy as np

from loadgen.measure.statistics.intervals import Interval, Values
from loadgen.measure.statistics.student_t import student_t

LEAST_BATCHES, _MOST_BATCHES = 5, 20
_CORRELATED = 1.645  # standard errors of the correlation of neighbouring batches


def event_rate(
    times_s: Values,
    start_s: float,
    end_s: float,
    cycle_s: float,
    confidence: float,
    n_users: int = 0,
) -> Interval:
    """Events per second in [start_s, end_s), with a two-sided interval.

    The window is cut into at most 20 batches of equal length, each at least `cycle_s` long, the
    mean time from one event of a user to its next: users that had an event in one batch have the
    next in another, so that shorter batches would count this regularity as noise. The interval is
    Student's t over the counts; where neighbouring batches are positively correlated (significant
    at 5 %) it is wider by √((1 + ρ)/(1 − ρ)). Open with fewer than five batches; NaN for an empty
    window.

    The two ends of the window fall anywhere into the cycles of `n_users` users. That adds the
    variance 1/6 per user to the count even where all cycles are equal (the mean of f(1 − f) over a
    fraction f of a cycle), and u²/6 for u users that act at once: u/6 · (1 + (u − 1) · coherence).

    Source: A. M. Law, Simulation Modeling and Analysis (5th ed.), section 9.5.3.
    """
    length_s = end_s - start_s
    if not length_s > 0:
        return Interval(math.nan)
    inside = times_s[(times_s >= start_s) & (times_s < end_s)]
    rate = len(inside) / length_s
    n_batches = int(min(_MOST_BATCHES, length_s / cycle_s)) if cycle_s > 0 else 0
    if n_batches < LEAST_BATCHES or not rate:
        return Interval(rate)
    edges = np.linspace(start_s, end_s, n_batches + 1)
    counts = np.histogram(inside, edges)[0].astype(np.float64)
    error = float(counts.std(ddof=1)) / math.sqrt(n_batches) / float(counts.mean())
    together = max(0.0, coherence(inside, start_s, end_s, cycle_s)) if n_users > 1 else 0.0
    per_cycle = len(inside) * cycle_s / length_s / n_users if n_users else 0.0
    ends = per_cycle * math.sqrt(n_users / 6 * (1 + (n_users - 1) * together)) / len(inside)
    error = math.hypot(error * _widening(counts), ends)
    half = student_t((1 + confidence) / 2, n_batches - 1) * error
    return Interval(rate, max(0.0, rate * (1 - half)), rate * (1 + half))


def product(rate: Interval, share: Interval) -> Interval:
    """The rate of the events that belong to a share: the product of both estimates. Their relative
    errors add in squares, as those of independent estimates do; open where either bound is."""
    value = rate.value * share.value

    def distance(of_rate: float | None, of_share: float | None) -> float:
        if of_rate is None or of_share is None:
            return math.inf
        return math.hypot(
            (of_rate - rate.value) * share.value, (of_share - share.value) * rate.value
        )

    low, high = distance(rate.low, share.low), distance(rate.high, share.high)
    return Interval(
        value,
        max(0.0, value - low) if math.isfinite(low) else None,
        value + high if math.isfinite(high) else None,
    )


def wider(a: Interval, b: Interval) -> Interval:
    """`a` with the lower of both lower and the higher of both upper bounds; open where `a` is."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return a
    return Interval(a.value, min(a.low, b.low), max(a.high, b.high))


def _widening(counts: Values) -> float:
    """√((1 + ρ)/(1 − ρ)) of a significantly positive correlation ρ of neighbours, else 1."""
    centred = counts - counts.mean()
    total = float(np.square(centred).sum())
    correlation = float((centred[1:] * centred[:-1]).sum()) / total if total > 0 else 0.0
    if correlation * math.sqrt(len(counts)) <= _CORRELATED:
        return 1.0
    return math.sqrt((1 + correlation) / (1 - correlation))


def coherence(times_s: Values, start_s: float, end_s: float, cycle_s: float) -> float:
    """How closely the events of a cycle come together: 0 for independent users, 1 if all users
    have their events at the same instants.

    The mean of (n R² − 1)/(n − 1) over consecutive windows of `cycle_s` with n ≥ 2 events, weighted
    by n − 1, where R is the length of the mean of exp(2πi t/cycle_s): without bias for independent
    events, whatever n. NaN without such a window.

    Source: N. I. Fisher, Statistical Analysis of Circular Data (1993), section 2.3.
    """
    if not cycle_s > 0 or not end_s - start_s >= cycle_s:
        return math.nan
    n_windows = int((end_s - start_s) / cycle_s)
    phase = (times_s[(times_s >= start_s) & (times_s < end_s)] - start_s) / cycle_s
    window = phase.astype(np.intp)
    turns = np.exp(2j * np.pi * phase[window < n_windows])
    window = window[window < n_windows]
    counts = np.bincount(window, minlength=n_windows).astype(np.float64)
    sums = np.bincount(window, turns.real, n_windows) + 1j * np.bincount(
        window, turns.imag, n_windows
    )
    pairs = counts - 1
    several = pairs > 0
    if not several.any():
        return math.nan
    together = (np.abs(sums[several]) ** 2 / counts[several] - 1).sum()
    return float(together / pairs[several].sum())
