"""Measures how often `rescore --window steady` refuses a run, by simulated queues.

Run: python benchmarks/steady_window.py > benchmarks/results/steady_window.json

A stationary M/M/1 queue at load 0.5 to 0.9 must seldom be refused: at most 5 % of runs. The rule
before (a cut of MSER-5 in the second half refuses) is `mser5_refused`; it refused 46 % of runs of
1 000 requests at load 0.9. A queue at load 1.2, which only grows, should be refused, and so should
a run whose latency falls from its first to its last request by three times the mean. A few hundred
requests hold little: at load 1.2 the queue of 300 requests is often also that of a load of 0.9.
"""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import steady_from
from loadgen.measure.statistics.time_series import mser5

Values = NDArray[np.float64]
N_RUNS, SEED = 2000, 21
STATIONARY_LOADS, STATIONARY_SIZES = (0.5, 0.7, 0.9), (300, 500, 1000, 2000, 5000)
MOST_REFUSED = 0.05
GROWING_LOAD, GROWING_SIZES = 1.2, (300, 600, 1000, 3000)
WARMUP_LOAD, WARMUP_SIZES, WARMUP_MEANS = 0.7, (300, 1000, 3000), 3.0


def main() -> None:
    rng = np.random.default_rng(SEED)
    rows = [
        cell("stationary", load, n, response_times(load, n, rng))
        for load in STATIONARY_LOADS
        for n in STATIONARY_SIZES
    ]
    rows += [
        cell("growing", GROWING_LOAD, n, response_times(GROWING_LOAD, n, rng))
        for n in GROWING_SIZES
    ]
    for n in WARMUP_SIZES:
        falling = WARMUP_MEANS / (1 - WARMUP_LOAD) * np.linspace(1, 0, n)
        times = response_times(WARMUP_LOAD, n, rng) + falling
        rows.append(cell("warm-up over the whole run", WARMUP_LOAD, n, times))
    worst = max((r for r in rows if r["kind"] == "stationary"), key=lambda r: r["refused"])
    result = {
        "benchmark": "steady_window",
        "goal": f"at most {MOST_REFUSED:.0%} of stationary M/M/1 runs refused, 0.5 to 0.9",
        "met": worst["refused"] <= MOST_REFUSED,
        "worst": worst,
        "runs": N_RUNS,
        "seed": SEED,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    for row in rows:
        print(row, file=sys.stderr)


def cell(kind: str, load: float, n: int, times: Values) -> dict[str, Any]:
    """The share of runs refused, by the rule and by the cut of MSER-5 alone."""
    return {
        "kind": kind,
        "load": load,
        "n": n,
        "refused": float(np.mean([steady_from(run) is None for run in times])),
        "mser5_refused": float(np.mean([not mser5(run).is_found for run in times])),
    }


def response_times(load: float, n: int, rng: np.random.Generator) -> Values:
    """The response times of N_RUNS M/M/1 queues, [N_RUNS, n], in mean service times; stationary
    from the first request below load 1, from an empty queue above."""
    busy = rng.random(N_RUNS) < load
    mean = 1 / (1 - load) if load < 1 else 0.0
    wait = np.where(busy, rng.exponential(1.0, N_RUNS) * mean, 0.0)
    times = np.empty((N_RUNS, n))
    for k in range(n):
        times[:, k] = wait + rng.exponential(1.0, N_RUNS)
        wait = np.maximum(0.0, times[:, k] - rng.exponential(1 / load, N_RUNS))
    return times


if __name__ == "__main__":
    main()
