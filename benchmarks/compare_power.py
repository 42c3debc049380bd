"""How often a comparison is wrong: simulated nights without a change, and with a 5 % slow-down.

    python benchmarks/compare_power.py [nights]

The nights are those of benchmarks/rig/nights.py; the tests take 200 and 120 of them.
"""

from __future__ import annotations

import json
import math
import sys

import numpy as np
from rig import nights

from loadgen.studies.compare.contrast import noise_of, runs_needed
from loadgen.studies.compare.judgement import POWER


def main(n_nights: int = 2000) -> None:
    rng = np.random.default_rng(2026)
    table = {}
    for size in (3, 5, 10):
        equal = [
            nights.verdicts(nights.runs(rng, size), nights.runs(rng, size)) for _ in range(n_nights)
        ]
        for word in ("worse", "better"):
            share = np.mean([word in night.values() for night in equal])
            table[f"A/A, {size} runs a side: says {word}"] = float(share)
    oracle = nights.oracle_runs(1.05)
    for n_pilot in (10, 20, 30, 60):
        planned, n_found = [], 0
        for _ in range(n_nights // 4):
            noise = noise_of(np.log(nights.runs(rng, n_pilot)[2]))
            assert noise is not None
            n = runs_needed(noise, math.log(1.05), 2 * 0.05 / len(nights.MEASURES), POWER)
            assert n is not None
            planned.append(n)
            found = nights.verdicts(nights.runs(rng, n), nights.runs(rng, n, slower=1.05))
            n_found += found["mean(tpot)"] == "worse"
        key = f"5 % slower TPOT, planned from {n_pilot} runs"
        table[f"{key}: found"] = n_found / len(planned)
        table[f"{key}: runs a side over the oracle's {oracle}"] = float(np.median(planned)) / oracle
    print(json.dumps({"nights": n_nights, **table}, indent=2))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
