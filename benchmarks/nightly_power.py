"""Measures how often a nightly verdict is wrong, through the baseline's own files: equal nights in
a row, and nights with a 5 % slower TPOT.

    python benchmarks/nightly_power.py [nights] [seeds]

The nights are those of benchmarks/rig/nights.py: heavy tails, noise that whole runs share, and,
where stated, noise that whole nights share. Results: benchmarks/results/nightly_power.json.

Rejected variants (decision 43): runs as observations, with 5 repeats and two-sided tests at 5 %,
alarm on a quarter of equal nights where nights and runs have the same standard deviation. Pooling
nights and runs by the usual test at 25 % gives 7.7 % alarms where 5 % are allowed, at 50 % 5.4 % at
most. Where nights differ by twice as much as runs, up to a quarter of second nights alarm falsely.
The first night with four times the repeats of those before alarms in up to 7 of 100 equal cases
where nights differ about as much as the means of their runs. Repeats that were planned against the
actual nights came out as 11, as 400, or, in a quarter of cases, as none, on equal servers.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rig import nights
from rig.machine import keep

from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.compare.judgement import Options
from loadgen.studies.nightly.baseline import Baseline
from loadgen.studies.nightly.matrix import NightCell
from loadgen.studies.nightly.verdict import History, judge_night
from loadgen.workload.scenario import load_scenario

WINDOW, KEEP, SLOWER = 14, 30, 1.05
NIGHT_SD = {"nights alike": (0.0, 0.0), "nights differ by 0.5 % and 2 %": (0.005, 0.02)}
"""Of TPOT and of TTFT, beyond what their runs explain."""
RUNS = {
    "5 runs a night that differ by 2 %": (5, 0.02),
    "5 runs a night that differ by 4 %": (5, 0.04),
}
"""Repeats, and what the TPOT of runs differs by."""


def alarms(seed: int, repeats: int, n_nights: int, night_sd: tuple[float, float]) -> Counter[str]:
    """Verdicts of `n_nights` equal nights after the first, each judged against the files that the
    ones before left."""
    rng = np.random.default_rng(seed)
    cell = NightCell(
        Cell("chat", load_scenario("nightly_small"), "sim", RunOptions()), {"kind": "sim"}
    )
    said: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        store = Baseline(Path(folder))
        for k in range(n_nights + 1):
            night = nights.cell_night(rng, k, repeats, night_sd=night_sd)
            histories = {"chat": store.history(cell, WINDOW)}
            (found,) = judge_night([night], histories, Options(), plans=False)
            store.add(cell, replace(night, verdict=found.verdict))
            store.prune(cell, KEEP, WINDOW)
            said[found.verdict] += 1
            if any(row.is_gated and row.verdict == "better" for row in found.measures):
                said["any better"] += 1
    return said


def power(
    seed: int, repeats: int, n_histories: int, night_sd: tuple[float, float]
) -> dict[str, Any]:
    """Histories of `WINDOW` nights, each with the repeats it recommends for 5 % on mean(tpot), and
    a slower night of so many."""
    rng = np.random.default_rng(seed)
    options = Options(effect=SLOWER - 1)
    asked, n_found = [], 0
    for _ in range(n_histories):
        level = tuple(
            replace(nights.cell_night(rng, k, repeats, night_sd=night_sd), verdict="same")
            for k in range(WINDOW)
        )
        histories = {"chat": History((level,))}
        (last,) = judge_night(
            [nights.cell_night(rng, WINDOW, repeats, night_sd=night_sd)], histories, options
        )
        n = {row.measure: row.runs_needed for row in last.measures}["mean(tpot)"]
        asked.append(math.inf if n is None else n)
        if n is not None:
            slow = nights.cell_night(rng, WINDOW, n, SLOWER, night_sd)
            (found,) = judge_night([slow], histories, Options(), plans=False)
            n_found += {r.measure: r.verdict for r in found.measures}["mean(tpot)"] == "worse"
    median = float(np.median(asked))
    two_sample = oracle(repeats, night_sd[0], None)
    return {
        "histories": n_histories,
        "a number of repeats recommended": float(np.mean(np.isfinite(asked))),
        "found, of those": n_found / max(1, int(np.isfinite(asked).sum())),
        "found, of all histories": n_found / n_histories,
        "repeats recommended, median": median,
        "oracle, a night against a night": two_sample,
        "oracle, against the same baseline": oracle(repeats, night_sd[0], WINDOW),
        "recommended over the oracle of two samples": median / two_sample,
    }


def oracle(repeats: int, night_sd: float, n_nights: int | None) -> int:
    """Runs a night of a z test at 5 %, two-sided, that knows all noise, for 90 % power: against
    one night of as many runs, or against `n_nights` of `repeats` runs."""
    of_mean = math.log1p(math.expm1(nights.TPOT_REQUEST_SD**2) / nights.N_REQUESTS)
    run = nights.TPOT_RUN_SD**2 + of_mean
    allowed = (math.log(SLOWER) / (1.959964 + 1.281552)) ** 2
    for n in range(1, 10_000):
        before = night_sd**2 + run / n
        if n_nights is not None:
            before = (night_sd**2 + run / repeats) / n_nights
        if night_sd**2 + run / n + before <= allowed:
            return n
    raise AssertionError(f"nights that differ by {night_sd} never show {SLOWER}")


def main(n_nights: int = 200, n_seeds: int = 3) -> None:
    table: dict[str, Any] = {}
    for run_word, (repeats, run_sd) in RUNS.items():
        nights.TPOT_RUN_SD, nights.TTFT_RUN_SD = run_sd, 2 * run_sd
        for night_word, night_sd in NIGHT_SD.items():
            said = {}
            for seed in range(1, n_seeds + 1):
                counted = alarms(seed, repeats, n_nights, night_sd)
                said[f"seed {seed}"] = dict(counted) | {
                    "false alarms": counted["worse"] + counted["better"]
                }
            key = f"{run_word}, {night_word}"
            table[key] = {
                f"A/A over {n_nights} nights": said,
                "5 % slower TPOT": power(99, repeats, n_nights, night_sd),
            }
            print(key, json.dumps(table[key]))
    asked = {"nights": n_nights, "seeds": n_seeds, "window": WINDOW}
    keep("nightly_power", asked, table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
