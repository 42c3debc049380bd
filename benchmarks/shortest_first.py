"""Compares the mode `sjf` on one sequence slot with the closed forms of an M/G/1 queue: shortest
job first, and with preemption shortest remaining processing time (SRPT).

    python benchmarks/shortest_first.py [--seeds 10] [--jobs 2500] [--write]

Jobs are answers of 8, 24 or 80 tokens (60, 30 and 10 %) at steps of 1 s, with arrivals at random
and a load of 70 %. Lengths are known. The mean response time over all seeds must be within 2 % of
the closed form. A control removes the chance of the arrivals: an exact recursion serves the same
arrivals in order of arrival, and the formula of Pollaczek and Khinchine gives its true mean. The
deviation from that mean, times the slope between the two over the seeds, is subtracted.

Sources: Schrage and Miller, Operations Research 14(4), 1966 (SRPT); Cobham, Operations Research
2(1), 1954 (priorities without preemption). A step is not interrupted, so a preemption comes half a
step late on average.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rig.machine import machine

from reference_engine.policies.sjf import Sjf
from reference_engine.simulator import simulate
from reference_engine.state.plan import Limits
from reference_engine.state.predictor import LengthDist
from reference_engine.state.sequence import Request

RESULTS = Path(__file__).parent / "results" / "shortest_first.json"
SIZES, SHARES = (8, 24, 80), (0.6, 0.3, 0.1)
LOAD, TOLERANCE = 0.7, 0.02
KNOBS = {"prompt_weight": 0, "kappa": 0, "aging": 0, "preempt_until": 1, "starvation": "1000h"}


def closed_forms(
    sizes: Sequence[float], shares: Sequence[float], load: float
) -> tuple[float, float, float]:
    """Mean response times (s) of an M/G/1 queue whose service times are `sizes` (s, ascending) with
    probabilities `shares`: first come first served, shortest job first, and SRPT. Equal sizes are
    served in order of arrival."""
    mean_s = sum(s * p for s, p in zip(sizes, shares, strict=True))
    rate = load / mean_s
    square = sum(s * s * p for s, p in zip(sizes, shares, strict=True))
    fcfs_s = mean_s + rate * square / 2 / (1 - load)
    sjf_s = srpt_s = residence_s = below = before = squares = 0.0
    longer = 1.0
    for size, share in zip(sizes, shares, strict=True):
        upto = below + rate * share * size  # load of all sizes up to this
        squares += share * size * size
        longer -= share
        free = (1 - below) * (1 - upto)
        sjf_s += share * (size + rate * square / 2 / free)
        residence_s += (size - before) / (1 - below)
        srpt_s += share * (residence_s + rate * (squares + longer * size * size) / 2 / free)
        below, before = upto, size
    return fcfs_s, sjf_s, srpt_s


class Known:
    """A predictor of the exact length of each answer: all that the request may generate."""

    def predict(self, request: Request) -> LengthDist:
        left = float(max(1, request.max_tokens - request.n_output))
        return LengthDist(left, left, left)

    def observe(self, request: Request) -> None:
        """Nothing to learn."""


def jobs(rng: np.random.Generator, n: int) -> list[tuple[float, int]]:
    """Arrivals (s) and lengths (steps of 1 s)."""
    mean_s = sum(s * p for s, p in zip(SIZES, SHARES, strict=True))
    at_s = np.cumsum(rng.exponential(mean_s / LOAD, n))
    lengths = rng.choice(SIZES, n, p=SHARES)
    return [(float(t), int(s)) for t, s in zip(at_s, lengths, strict=True)]


def response_s(work: Sequence[tuple[float, int]], *, preempt: bool) -> float:
    """Mean response time of the mode `sjf` on one slot."""
    requests = [Request(f"r{k}", [k % 256], n, t) for k, (t, n) in enumerate(work)]
    policy = Sjf.model_validate({**KNOBS, "preempt": preempt})
    limits = Limits(1, 1 << 20, 1 << 17, 320)
    done = simulate(requests, policy, limits=limits, predictor=Known(), prefix_cache=False)
    return float(np.mean([(r.finished_s or 0.0) - r.arrived_s for r in done.finished]))


def fcfs_response_s(work: Sequence[tuple[float, int]]) -> float:
    """Mean response time in order of arrival, by Lindley's recursion."""
    free_s, total_s = 0.0, 0.0
    for at_s, length in work:
        free_s = max(free_s, at_s) + length
        total_s += free_s - at_s
    return total_s / len(work)


def controlled(means: Sequence[float], controls: Sequence[float], expected: float) -> float:
    """The mean of `means` less the share that their regression on `controls` explains by the
    deviation of the controls from their `expected` value."""
    y, x = np.asarray(means), np.asarray(controls)
    slope = float(np.cov(x, y)[0, 1] / np.var(x, ddof=1))
    return float(y.mean() - slope * (x.mean() - expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2500)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    options = parser.parse_args()
    fcfs_s, sjf_s, srpt_s = closed_forms(SIZES, SHARES, LOAD)
    works = [jobs(np.random.default_rng(seed), options.jobs) for seed in range(options.seeds)]
    controls = [fcfs_response_s(work) for work in works]
    rows: dict[str, dict[str, Any]] = {}
    for name, preempt, expected_s in (("sjf", False, sjf_s), ("srpt", True, srpt_s)):
        means = [response_s(work, preempt=preempt) for work in works]
        measured_s = controlled(means, controls, fcfs_s)
        rows[name] = {
            "closed_form_s": round(expected_s, 3),
            "simulated_s": round(measured_s, 3),
            "difference": round(measured_s / expected_s - 1, 4),
            "without_control": round(float(np.mean(means)) / expected_s - 1, 4),
            "per_seed_s": [round(mean, 2) for mean in means],
        }
        print(
            f"{name}: {measured_s:.2f} s, closed form {expected_s:.2f} s: "
            f"{rows[name]['difference']:+.2%}",
            flush=True,
        )
    if options.write:
        record = {
            "machine": machine(),
            "sizes": SIZES,
            "shares": SHARES,
            "load": LOAD,
            "seeds": options.seeds,
            "jobs": options.jobs,
            "fcfs_closed_form_s": round(fcfs_s, 3),
            "fcfs_on_these_arrivals_s": round(float(np.mean(controls)), 3),
            "modes": rows,
        }
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(abs(row["difference"]) > TOLERANCE for row in rows.values()))


if __name__ == "__main__":
    main()
