"""What a scenario would send, in numbers, before anything is sent: asked against generated, and how
many requests its promises need for a proven verdict."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import Slo
from loadgen.measure.stats import least_n
from loadgen.records import Phase, Schedule, Times
from loadgen.workload.lengths import TokenCounts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import schedule_sha256

ARRIVALS_PER_WINDOW = 5


def preview(scenario: Scenario, schedule: Schedule, confidence: float = 0.95) -> dict[str, Any]:
    """The figures of one schedule as JSON; None where a number does not exist (a gap of one row, a
    kind that states no rate).

    `n` and everything about arrivals and lengths covers warm-up and measured window alike; `slo`
    counts the measured window only. n_needed is the least number of requests that prove a promise
    about a share of them if not one misses; it is None for a promise of another kind, or of 100 %.
    """
    asked, horizon_s, n = scenario.requests, scenario.horizon_s, len(schedule)
    prefix_tokens = asked.shared_prefix.tokens if asked.shared_prefix else 0
    inputs, outputs = schedule["input_tokens"], schedule["output_tokens"]
    asked_rate = scenario.arrivals.mean_rate_per_s(horizon_s)
    n_measured = int(np.count_nonzero(schedule["phase"] == Phase.measure))
    return {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "schedule_sha256": schedule_sha256(schedule),
        "n": n,
        "n_measured": n_measured,
        "duration_s": horizon_s,
        "window": {
            "warmup_s": scenario.phases.warmup,
            "measure_s": scenario.phases.measure,
            "drain_s": scenario.phases.drain,
        },
        "arrivals": {
            "kind": scenario.arrivals.kind,
            "asked_rate_per_s": asked_rate,
            "generated_rate_per_s": n / horizon_s,
            **describe_arrivals(schedule["scheduled_s"], horizon_s),
        },
        "input_tokens": _lengths(asked.input_tokens.mean + prefix_tokens, inputs),
        "output_tokens": _lengths(asked.output_tokens.mean, outputs),
        "input_tokens_per_s": float(inputs.sum(dtype=np.float64)) / horizon_s,
        "output_tokens_per_s": float(outputs.sum(dtype=np.float64)) / horizon_s,
        "prefix_share": float(schedule["prefix_tokens"].sum(dtype=np.float64) / inputs.sum()),
        "slo": [
            _proof(slo, n_measured, scenario.phases.measure, confidence)
            for slo in scenario.promises()
        ],
    }


def describe_arrivals(times: Times, horizon_s: float) -> dict[str, Any]:
    """Second-order statistics of sorted instants in [0, horizon_s).

    gap_cv: standard deviation / mean of the gaps. gap_lag1: correlation of neighbouring gaps.
    dispersion: variance / mean of the counts in equal windows of about five arrivals each (1 for
    Poisson at any window). peak_in_1s: the most arrivals in any [t, t + 1 s).
    """
    gaps_s = np.diff(times)
    is_varied = gaps_s.size > 2 and float(np.std(gaps_s)) > 1e-9 * float(np.mean(gaps_s))
    n_windows = times.size // ARRIVALS_PER_WINDOW
    counts, _ = np.histogram(times, max(n_windows, 1), (0.0, horizon_s))
    return {
        "gap_cv": float(np.std(gaps_s) / np.mean(gaps_s)) if gaps_s.size > 1 else None,
        "gap_lag1": float(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) if is_varied else None,
        "dispersion": float(np.var(counts) / np.mean(counts)) if n_windows >= 10 else None,
        "dispersion_window_s": horizon_s / n_windows if n_windows >= 10 else None,
        "peak_in_1s": int(np.max(np.searchsorted(times, times + 1.0) - np.arange(times.size))),
    }


def _lengths(asked_mean: float, tokens: TokenCounts) -> dict[str, float]:
    p50, p90, p99 = np.quantile(tokens, (0.5, 0.9, 0.99), method="inverted_cdf")
    return {
        "asked_mean": asked_mean,
        "mean": float(np.mean(tokens)),
        "p50": int(p50),
        "p90": int(p90),
        "p99": int(p99),
        "max": int(tokens.max()),
    }


def _proof(slo: Slo, n: int, measure_s: float, confidence: float) -> dict[str, Any]:
    share = _promised_share(slo)
    n_needed = None if share is None else least_n(0, share, confidence) or None
    minutes = None if n_needed is None else n_needed * measure_s / n / 60
    return {
        "text": slo.text,
        "n_needed": n_needed,
        "n": n,
        "minutes_needed": minutes,
        "is_provable": None if n_needed is None else n >= n_needed,
    }


def _promised_share(slo: Slo) -> float | None:
    """The share of requests that a run-level promise speaks of; None where it is not a share, or
    one of the gaps within requests, which are not independent."""
    if slo.quantile is not None:
        return slo.quantile if METRICS[slo.metric].scope == "request" else None
    return {"attainment": slo.limit, "error_rate": 1 - slo.limit}.get(slo.metric)
