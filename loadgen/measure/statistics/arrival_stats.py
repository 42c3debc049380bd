"""How a stream of instants looks: its gaps, its counts, and whether neighbours are alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.records import Times

ARRIVALS_PER_WINDOW = 5


def describe_arrivals(times: Times, horizon_s: float) -> dict[str, Any]:
    """Second-order statistics of sorted instants in [0, horizon_s).

    gap_cv: standard deviation / mean of the gaps. gap_lag1: correlation of neighbouring gaps.
    dispersion: variance / mean of the counts in equal windows of about five arrivals each (1 for
    Poisson at any window). peak_in_1s: the most arrivals in any [t, t + 1 s).
    """
    gaps_s = np.diff(times)
    has_gaps = gaps_s.size > 1 and float(np.mean(gaps_s)) > 0
    is_varied = gaps_s.size > 2 and float(np.std(gaps_s)) > 1e-9 * float(np.mean(gaps_s))
    n_windows = times.size // ARRIVALS_PER_WINDOW
    counts, _ = np.histogram(times, max(n_windows, 1), (0.0, horizon_s))
    return {
        "gap_cv": float(np.std(gaps_s) / np.mean(gaps_s)) if has_gaps else None,
        "gap_lag1": float(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) if is_varied else None,
        "dispersion": float(np.var(counts) / np.mean(counts)) if n_windows >= 10 else None,
        "dispersion_window_s": horizon_s / n_windows if n_windows >= 10 else None,
        "peak_in_1s": int(np.max(np.searchsorted(times, times + 1.0) - np.arange(times.size))),
    }
