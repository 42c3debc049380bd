"""Measures how often a drifting machine is taken for a slower server, with a control and without,
and how soon a server that is 10 % slower is found on it, through the baseline's own files.

    python benchmarks/nightly_drift.py [nights] [seeds]

The machine's speed walks from night to night and shifts each pair by itself; runs differ beyond
that (benchmarks/rig/nights.py). Slower nights come after two equal ones, as in the example of
docs/nightly.md. Results: benchmarks/results/nightly_drift.json.

Degrees of freedom of the assumed noise between nights (decision 51), 1000 simulated nights each:
with eight, 24 pairs find a change of four standard errors of a night's mean in the third night in
76 % of cases; with four in 68 %, and several measures lose more. With eight, equal nights that
differ by one standard error beyond their runs are called worse in 3.4 % of second and 2.0 % of
third nights (5 are allowed), and by two standard errors in 13.5 and 8.8 %; better in 3.8 and 3.4 %
(1 is allowed). A control doubles the time and multiplies the standard deviation of independent
noise by 1.4. Assuming a share of the variance between runs instead (a quarter) let many short pairs
find no more than eight long ones.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from loadgen.studies.nightly.record import CellNight
from loadgen.studies.nightly.verdict import judge_night
from loadgen.workload.scenario import load_scenario

WINDOW, KEEP, REPEATS, SLOWER = 14, 30, 8, 1.1
CELL = NightCell(Cell("chat", load_scenario("nightly_small"), "sim", RunOptions()), {"kind": "sim"})
STEPS = {
    "keeps its pace": (0.0, 0.0),
    "walks 5 % a night": (0.05, 0.05),
    "walks 10 % a night": (0.1, 0.1),
}
"""Of the pace: from night to night, and from pair to pair."""
RUN_SDS = (0.01, 0.02, 0.03)
OPTIONS = Options(metrics=["mean(tpot)"])


@contextmanager
def stores() -> Iterator[dict[str, Baseline]]:
    """An empty baseline for each way to measure."""
    with tempfile.TemporaryDirectory() as folder:
        yield {way: Baseline(Path(folder) / way) for way in ("with a control", "without")}


def judged(store: Baseline, night: CellNight) -> str:
    """The verdict of a night, which is kept."""
    history = {"chat": store.history(CELL, WINDOW)}
    (found,) = judge_night([night], history, OPTIONS, plans=False)
    store.add(CELL, replace(night, verdict=found.verdict))
    store.prune(CELL, KEEP, WINDOW)
    return found.verdict


def sides(night: CellNight) -> dict[str, CellNight]:
    return {"with a control": night, "without": nights.without_controls(night)}


def alarms(seed: int, n_nights: int, step_sd: float, pair_sd: float) -> dict[str, int]:
    """Equal nights called worse or better, of `n_nights` in a row."""
    rng, pace = np.random.default_rng(seed), 0.0
    with stores() as kept:
        counted = dict.fromkeys(kept, 0)
        for k in range(n_nights + 1):
            pace += rng.normal(0, step_sd)
            made = nights.beside_controls(rng, k, REPEATS, 1.0, float(np.exp(pace)), pair_sd)
            for way, night in sides(made).items():
                counted[way] += judged(kept[way], night) in ("worse", "better")
    return counted


def third_nights(seed: int, n: int, step_sd: float, pair_sd: float) -> dict[str, dict[str, float]]:
    """Of `n` second nights that are equal the share called worse or better, of as many third ones
    that are slower the share called worse."""
    rng = np.random.default_rng(seed)
    said: dict[str, list[list[str]]] = {}
    for _ in range(n):
        pace = np.exp(np.cumsum(rng.normal(0, step_sd, 3)))
        with stores() as kept:
            for k in range(3):
                slower = SLOWER if k == 2 else 1.0
                made = nights.beside_controls(rng, k, REPEATS, slower, float(pace[k]), pair_sd)
                words = {way: judged(kept[way], night) for way, night in sides(made).items()}
                for way, word in words.items():
                    said.setdefault(way, [[], [], []])[k].append(word)
    return {
        way: {
            "second, equal: worse or better": sum(w in ("worse", "better") for w in second) / n,
            "third, 10 % slower: worse": third.count("worse") / n,
        }
        for way, (_, second, third) in said.items()
    }


def main(n_nights: int = 200, n_seeds: int = 1) -> None:
    table: dict[str, Any] = {}
    for run_sd in RUN_SDS:
        nights.TPOT_RUN_SD, nights.TTFT_RUN_SD = run_sd, 2 * run_sd
        for word, (step_sd, pair_sd) in STEPS.items():
            key = f"runs differ by {100 * run_sd:.0f} %, the machine {word}"
            table[key] = {
                f"alarms of {n_nights} equal nights": [
                    alarms(seed, n_nights, step_sd, pair_sd) for seed in range(1, n_seeds + 1)
                ],
                **third_nights(9, n_nights, step_sd, pair_sd),
            }
            print(key, table[key], flush=True)
    keep("nightly_drift", {"nights": n_nights, "seeds": n_seeds, "repeats": REPEATS}, table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
