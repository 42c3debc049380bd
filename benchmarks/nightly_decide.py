"""Measures the verdicts of nights at the recommended number of repeats: false alarms and "same" of
equal nights on machines whose speed varies, and the power for a 5 % slower TPOT, with and without
a neighbour that disturbs runs.

    python benchmarks/nightly_decide.py [nights] [histories]

Runs are those of benchmarks/rig/nights.py and differ by 2 % in TPOT. The machine's speed is white
noise from night to night, an autoregression, a walk, or jumps between hosts; with a control, both
runs of a pair have the speed of their night. A neighbour slows one run in ten by 10 to 40 %.
Repeats are those that the median of ten pilot baselines recommends for 5 % of mean(tpot); the power
plans from each history's own baseline. Results: benchmarks/results/nightly_decide.json.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from rig import nights
from rig.machine import keep

from loadgen.measure.statistics.intervals import Values
from loadgen.studies.compare.judgement import Options
from loadgen.studies.nightly.record import CellNight
from loadgen.studies.nightly.verdict import JOINING, CellVerdict, History, judge_night

WINDOW, PILOT_REPEATS, SLOWER, SEED = 14, 8, 1.05, 25
nights.TPOT_RUN_SD, nights.TTFT_RUN_SD = 0.02, 0.04
Rng = np.random.Generator


def white(n: int, rng: Rng) -> Values:
    return rng.normal(0, 0.03, n)


def autoregression(n: int, rng: Rng) -> Values:
    pace = rng.normal(0, 0.05, n)
    for k in range(1, n):
        pace[k] = 0.8 * pace[k - 1] + 0.6 * pace[k]
    return pace


def walk(n: int, rng: Rng) -> Values:
    return np.asarray(np.cumsum(rng.normal(0, 0.03, n)))


def host_jumps(n: int, rng: Rng) -> Values:
    hosts = rng.normal(0, 0.15, n)
    return np.asarray(hosts[np.maximum.accumulate(np.arange(n) * (rng.random(n) < 0.1))])


MODELS: dict[str, Callable[[int, Rng], Values]] = {
    "white": white,
    "autoregression": autoregression,
    "walk": walk,
    "host jumps": host_jumps,
}


def night(
    rng: Rng, k: int, repeats: int, pace: float, has_control: bool, neighbour: float, slower: float
) -> CellNight:
    made = nights.beside_controls(rng, k, repeats, slower, float(np.exp(pace)))
    made = made if has_control else nights.without_controls(made)
    return nights.disturbed(rng, made, neighbour)


def judged(tonight: CellNight, level: list[CellNight], plans: bool = False) -> CellVerdict:
    histories = {tonight.cell: History((tuple(level[-WINDOW:]),))}
    (found,) = judge_night([tonight], histories, Options(), plans=plans)
    return found


def equal_level(rng: Rng, repeats: int, has_control: bool, neighbour: float) -> list[CellNight]:
    return [
        replace(night(rng, k, repeats, 0.0, has_control, neighbour, 1.0), verdict="same")
        for k in range(WINDOW)
    ]


def recommended(rng: Rng, has_control: bool, neighbour: float) -> int | None:
    """The repeats that a baseline of equal nights recommends for 5 % of mean(tpot)."""
    level = equal_level(rng, PILOT_REPEATS, has_control, neighbour)
    tonight = night(rng, WINDOW, PILOT_REPEATS, 0.0, has_control, neighbour, 1.0)
    found = judged(tonight, level, plans=True)
    return {row.measure: row.runs_needed for row in found.measures}["mean(tpot)"]


def equal_nights(model: str, has_control: bool, repeats: int, n_nights: int) -> dict[str, Any]:
    """Verdicts of equal nights in a row, each against the nights before."""
    rng = np.random.default_rng((SEED, list(MODELS).index(model), has_control))
    paces = MODELS[model](n_nights + 1, rng)
    level: list[CellNight] = []
    verdicts: Counter[str] = Counter()
    for k, pace in enumerate(paces.tolist()):
        tonight = night(rng, k, repeats, pace, has_control, 0.0, 1.0)
        verdict = judged(tonight, level).verdict
        verdicts[verdict] += 1
        if verdict in JOINING:
            level.append(replace(tonight, verdict=verdict))
    return dict(verdicts) | {"alarms": verdicts["worse"] + verdicts["better"]}


def power(neighbour: float, has_control: bool, n_histories: int) -> dict[str, float]:
    """The share of nights with a 5 % slower TPOT found with the repeats that their own baseline
    recommends."""
    rng = np.random.default_rng((SEED, int(100 * neighbour), has_control))
    n_found, asked = 0, []
    for _ in range(n_histories):
        level = equal_level(rng, PILOT_REPEATS, has_control, neighbour)
        tonight = night(rng, WINDOW, PILOT_REPEATS, 0.0, has_control, neighbour, 1.0)
        last = judged(tonight, level, plans=True)
        n = {row.measure: row.runs_needed for row in last.measures}["mean(tpot)"]
        asked.append(np.inf if n is None else n)
        if n is None:
            continue
        slow = night(rng, WINDOW, max(2, n), 0.0, has_control, neighbour, SLOWER)
        rows = {row.measure: row.verdict for row in judged(slow, level).measures}
        n_found += rows["mean(tpot)"] == "worse"
    n_asked = int(np.isfinite(asked).sum())
    return {
        "histories": n_histories,
        "a number recommended": n_asked / n_histories,
        "repeats recommended, median": float(np.median(asked)),
        "found, of those": n_found / max(1, n_asked),
    }


def main(n_nights: int = 200, n_histories: int = 100) -> None:
    table: dict[str, Any] = {}
    for has_control in (True, False):
        word = "with a control" if has_control else "without a control"
        rng = np.random.default_rng((SEED, 7, has_control))
        pilots = [recommended(rng, has_control, 0.0) or 100 for _ in range(10)]
        repeats = int(np.median(pilots))
        table[word] = {"repeats": repeats}
        for model in MODELS:
            table[word][f"{n_nights} equal nights, {model}"] = equal_nights(
                model, has_control, repeats, n_nights
            )
            print(
                word, repeats, model, table[word][f"{n_nights} equal nights, {model}"], flush=True
            )
        for neighbour in (0.0, 0.1):
            key = f"5 % slower TPOT, a neighbour in {100 * neighbour:.0f} % of runs"
            table[word][key] = power(neighbour, has_control, n_histories)
            print(word, key, table[word][key], flush=True)
    asked = {"nights": n_nights, "histories": n_histories, "window": WINDOW, "seed": SEED}
    keep("nightly_decide", asked, table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
