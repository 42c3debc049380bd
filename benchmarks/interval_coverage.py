"""Measures how often the interval of a percentile contains the true value, by simulation: within
two points of the stated 95 %, from 50 samples to 10⁴, for any distribution.

Run: python benchmarks/interval_coverage.py > benchmarks/results/interval_coverage.json

The interval is interpolated between neighbouring order statistics, so only these are drawn: the
r-th of n uniform samples is Beta(r, n − r + 1), and the next takes a share of the rest. `exact` is
the interval between whole order statistics, which this interval replaced (decision 41).

Over nine distributions (two of them without a mean or nearly so) and 13 sizes from 50 to 10 000,
the worst coverage is 1.2 points off, for a P99 of 50 samples. Between whole order statistics a P50
of 50 samples is covered in 96.7 % and a P99 of 50 in 98.7 % of cases. Straight lines instead of
logarithms covered 92 % with a distribution too heavy to have a mean; 2.5 % at the only existing
bound would cover 97.5 %.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from loadgen.measure.statistics.percentiles import interval_places, order_ranks

Values = NDArray[np.float64]
N_DRAWS, SEED, CONFIDENCE = 200_000, 20, 0.95
QUANTILES = (0.5, 0.9, 0.95, 0.99)
SIZES = (50, 59, 72, 100, 150, 200, 299, 368, 500, 1000, 2000, 5000, 10_000)
LAWS: dict[str, Callable[[Values], Values]] = {
    "uniform": lambda u: u,
    "normal": lambda u: np.asarray(ndtri(u)),
    "exponential": lambda u: -np.log1p(-u),
    "lognormal, sigma 1": lambda u: np.exp(ndtri(u)),
    "Weibull, shape 1/2": lambda u: np.square(np.log1p(-u)),
    "Pareto, tail 3": lambda u: (1 - u) ** (-1 / 3),
    "Pareto, tail 0.7": lambda u: (1 - u) ** (-1 / 0.7),
    "lognormal, sigma 2.5": lambda u: np.exp(2.5 * ndtri(u)),
    "two modes": lambda u: np.where(u < 0.7, u, u + 5),
}


def main() -> None:
    rng = np.random.default_rng(SEED)
    rows: list[dict[str, Any]] = []
    for quantile in QUANTILES:
        for n in SIZES:
            places = interval_places(n, quantile, CONFIDENCE)
            ranks = order_ranks(n, quantile, CONFIDENCE)
            for law, inverse in LAWS.items():
                rows.append(
                    {
                        "quantile": quantile,
                        "n": n,
                        "law": law,
                        "is_open": None in places,
                        "coverage": coverage(places, n, quantile, inverse, rng),
                        "exact": coverage(ranks, n, quantile, inverse, rng),
                    }
                )
    worst = max(rows, key=lambda row: abs(row["coverage"] - CONFIDENCE))
    off = abs(worst["coverage"] - CONFIDENCE)
    result = {
        "benchmark": "interval_coverage",
        "goal": "within 2 points of 95 % for P50 to P99, n from 50 to 10000",
        "met": off < 0.02,
        "worst_points": round(100 * off, 2),
        "worst": worst,
        "worst_exact_points": round(100 * max(abs(row["exact"] - CONFIDENCE) for row in rows), 2),
        "draws": N_DRAWS,
        "standard_error_points": round(100 * math.sqrt(0.95 * 0.05 / N_DRAWS), 3),
        "seed": SEED,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    print(f"worst {100 * off:.2f} points off: {worst}", file=sys.stderr)


def coverage(
    places: tuple[float | None, float | None],
    n: int,
    quantile: float,
    inverse: Callable[[Values], Values],
    rng: np.random.Generator,
) -> float:
    """The share of intervals that hold the true quantile; an open end holds everything."""
    low, high = places
    truth = float(inverse(np.array([quantile]))[0])
    above = 0.0 if low is None else float(np.mean(values(low, n, inverse, rng) > truth))
    below = 0.0 if high is None else float(np.mean(values(high, n, inverse, rng) < truth))
    return round(1 - above - below, 5)  # both at once cannot be


def values(
    place: float, n: int, inverse: Callable[[Values], Values], rng: np.random.Generator
) -> Values:
    """What stands at a place (a rank with a fraction) among n sorted samples, N_DRAWS times."""
    rank, part = int(place), place - int(place)
    first = rng.beta(rank, n - rank + 1, N_DRAWS)
    if not part:
        return inverse(first)
    second = 1 - (1 - first) * rng.random(N_DRAWS) ** (1 / (n - rank))
    below, above = inverse(first), inverse(second)
    with np.errstate(all="ignore"):
        in_logs = below * (above / below) ** part
    return np.where(below > 0, in_logs, (1 - part) * below + part * above)


if __name__ == "__main__":
    main()
