"""Measures how often intervals and proofs hold where requests depend on each other: response times
of queues, autoregressions, and the simulated engine.

Run: python benchmarks/dependent_coverage.py [--repetitions 400] [--first-seed 10000] \
         [--cases mm1-0.7,ar-0.9] [--into benchmarks/results/dependent_coverage.json]

A run has the seeds from `--first-seed` on; the committed figures have seeds that no constant of the
estimator was calibrated on. With `--into` the chosen cases replace theirs in a file, so that a long
measurement can be taken in pieces; without it the result is printed. `--table FILE` prints a file's
cells as the Markdown table of benchmarks/results/dependent_coverage.md.

Each cell (process, n, percentile) draws `--repetitions` runs of n requests. A run *covers* when the
true percentile lies in its two-sided interval; an open bound covers its side. A *false proof* is a
run that proves "percentile <= truth" with 95 % confidence, a *false miss* a run that proves it
missed (at most 5 % of each are allowed). `time` is the true autocorrelation time of the indicator,
from the variance of the share over the runs of the largest n; `width` is the median of
√(τ used / τ true), and `closed` the share of runs with both bounds. The same figures follow for the
attainment at a limit that the true share meets exactly, which is also how an SLO on a percentile is
proven. `powers` are the shares of runs that prove a true SLO. `--sizes` measures fewer sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rig.machine import machine_line
from rig.processes import (
    Process,
    Values,
    autoregression,
    independent,
    mm1,
    mmpp,
    processor_sharing,
)
from scipy.special import ndtri

from loadgen.lab.simulate import simulate
from loadgen.measure.per_request import per_request
from loadgen.measure.statistics.dependence import Load, of_share
from loadgen.measure.statistics.population import of_requests
from loadgen.measure.statistics.proportions import exact_bounds, wilson
from loadgen.workload.scenario import Scenario

CONFIDENCE = 0.95
QUANTILES = (0.5, 0.9, 0.99)
SIZES = (300, 1000, 3000, 10_000, 30_000, 50_000)
ENGINE_SIZES = (300, 700, 1500, 3000)
FAR = 10**6  # seeds of the runs that give a true percentile lie this far from the others
PROCESSES: Mapping[str, Process] = {
    "independent": independent,
    "mm1-0.5": mm1(0.5),
    "mm1-0.7": mm1(0.7),
    "mm1-0.9": mm1(0.9),
    "mm1-0.9-warm-up": mm1(0.9, n_discarded=300),
    "ar-0.5": autoregression(0.5),
    "ar-0.9": autoregression(0.9),
    "mmpp-0.6": mmpp(0.6),
    "ps-0.7": processor_sharing(0.7),
    "ps-0.9": processor_sharing(0.9),
}
ENGINE_RATES = (8.0, 11.0, 13.0)
ENGINE: dict[str, Any] = {"shape": "8b", "hardware": "h200", "max_num_seqs": 8}

TITLES = {
    "independent": "independent",
    "mm1-0.5": "M/M/1, load 0.5",
    "mm1-0.7": "M/M/1, load 0.7",
    "mm1-0.9": "M/M/1, load 0.9",
    "mm1-0.9-warm-up": "M/M/1, load 0.9, empty at first",
    "ar-0.5": "AR(1), 0.5",
    "ar-0.9": "AR(1), 0.9",
    "mmpp-0.6": "MMPP/M/1, load 0.6",
    "ps-0.7": "processor sharing, load 0.7",
    "ps-0.9": "processor sharing, load 0.9",
    **{f"engine-{rate:g}": f"simulated engine, {rate:g}/s" for rate in ENGINE_RATES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--engine-repetitions", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=10_000)
    parser.add_argument("--sizes", default="", help="runs of these n only; default: all")
    parser.add_argument("--cases", default="", help="processes, or 'powers'; default: all")
    parser.add_argument("--into", type=Path, help="a file of results whose cases are replaced")
    parser.add_argument("--table", type=Path, help="a file of results to print as a table")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(json.loads(options.table.read_text())["cells"])))
        return
    names = [*PROCESSES, *(f"engine-{rate:g}" for rate in ENGINE_RATES), "powers"]
    chosen = options.cases.split(",") if options.cases else names
    if unknown := set(chosen) - set(names):
        parser.error(f"--cases: {', '.join(sorted(unknown))} not in {', '.join(names)}")
    is_begun = options.into is not None and options.into.exists()
    earlier = json.loads(options.into.read_text()) if is_begun else {}
    powers: dict[str, Any] = earlier.get("powers", {})
    cells = {case: list(of_case) for case, of_case in groupby(earlier.get("cells", []), _case)}
    with ProcessPoolExecutor(options.workers) as pool:
        for name in chosen:
            n_runs = options.engine_repetitions if "engine" in name else options.repetitions
            seeds = range(options.first_seed, options.first_seed + n_runs)
            if name == "powers":
                powers = {case: power(case, seeds, pool) for case in POWERS}
            else:
                sizes = tuple(map(int, options.sizes.split(","))) if options.sizes else ()
                cells[name] = cells_of(name, seeds, pool, sizes)
                report(cells[name])
    result = result_of([cell for name in names for cell in cells.get(name, [])], powers)
    text = json.dumps(result, indent=1)
    if options.into:
        options.into.write_text(text + "\n")
    else:
        print(text)


def _case(cell: Mapping[str, Any]) -> str:
    return str(cell["case"])


def result_of(cells: Sequence[Mapping[str, Any]], powers: Mapping[str, Any]) -> dict[str, Any]:
    """The cells, the worst of them, and the machine."""
    long = [cell for cell in cells if is_long(cell)]
    return {
        "benchmark": "dependent_coverage",
        "worst": {
            "coverage": min((c["coverage"] for c in cells), default=None),
            "false_proof_from_20_times": max(
                (c["false_proof"] for c in cells if c["n"] >= 20 * c["time"]), default=None
            ),
            "false_proof_below": max(
                (c["false_proof"] for c in cells if c["n"] < 20 * c["time"]), default=None
            ),
            "closed_from_100_times": min((c["closed"] for c in long), default=None),
            "width_from_100_times": max((c["width"] or 0.0 for c in long), default=None),
        },
        "powers": powers,
        "machine": machine_line(),
        "python": platform.python_version(),
        "cells": cells,
    }


def table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown tables, one per set of run lengths: covered / false proofs in %, a row per process
    and percentile."""
    lines: list[str] = []
    heading: tuple[int, ...] = ()
    for (case, quantile), group in groupby(cells, lambda cell: (_case(cell), cell["quantile"])):
        row = sorted(group, key=lambda cell: cell["n"])
        sizes = tuple(cell["n"] for cell in row)
        if sizes != heading:
            titles = [f"n = {n:,}".replace(",", " ") for n in sizes]
            lines += [""] * bool(lines)
            lines += ["| process | percentile | τ | runs | " + " | ".join(titles) + " |"]
            lines += ["|---|---|--:|--:|" + "--:|" * len(sizes)]
            heading = sizes
        found = [f"{100 * c['coverage']:.0f} / {100 * c['false_proof']:.0f}" for c in row]
        values = [TITLES[case], f"p{100 * quantile:g}", f"{row[0]['time']:.0f}", row[0]["n_runs"]]
        lines.append("| " + " | ".join(map(str, [*values, *found])) + " |")
    return lines


def is_long(cell: Mapping[str, Any]) -> bool:
    """At least 100 autocorrelation times, of which as many independent samples have both bounds."""
    worth = cell["n"] / cell["time"]
    return bool(worth >= 100 and cell["quantile"] ** worth <= (1 - CONFIDENCE) / 2)


def cells_of(
    name: str, seeds: range, pool: ProcessPoolExecutor, chosen: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    sizes = chosen or (ENGINE_SIZES if "engine" in name else SIZES)
    truths = true_percentiles(name, pool)
    runs = list(pool.map(partial(judge, name, truths, sizes), seeds, chunksize=8))
    cells = []
    for at, quantile in enumerate(QUANTILES):
        shares = [run[-1][at]["share"] for run in runs]
        independent_variance = quantile * (1 - quantile) / sizes[-1]
        time = max(
            1.0, float(np.mean(np.square(np.array(shares) - quantile))) / independent_variance
        )
        for place, n in enumerate(sizes):
            rows = [run[place][at] for run in runs]
            closed = [row for row in rows if row["is_closed"]]
            cells.append(
                {"case": name, "n": n, "quantile": quantile, "time": round(time, 1)}
                | {key: share_of(rows, key) for key in KEYS}
                | {"closed": round(len(closed) / len(seeds), 4)}
                | {"width": median_width(closed, time), "n_runs": len(seeds)}
                | {"first_seed": seeds[0]}
            )
    return cells


KEYS = ("coverage", "false_proof", "false_miss", "share_coverage", "share_false_proof")


def share_of(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return round(float(np.mean([row[key] for row in rows])), 4)


def median_width(rows: Sequence[Mapping[str, Any]], time: float) -> float | None:
    if not rows:
        return None
    return round(float(np.median([math.sqrt(row["time_used"] / time) for row in rows])), 3)


def judge(
    name: str, truths: Sequence[float], sizes: Sequence[int], seed: int
) -> list[list[dict[str, Any]]]:
    """A run of the largest size, and its beginnings: [size][quantile] → what was found."""
    values, in_flight = draw_loaded(name, sizes[-1], seed)
    return [
        [
            judged(values[:n], quantile, truth, None if in_flight is None else Load(in_flight[:n]))
            for quantile, truth in zip(QUANTILES, truths, strict=True)
        ]
        for n in sizes
    ]


def judged(values: Values, quantile: float, truth: float, load: Load | None) -> dict[str, Any]:
    population = of_requests(values, load)
    interval = population.percentile(quantile, CONFIDENCE)
    bounds = population.percentile_bounds(quantile, CONFIDENCE)
    times = population.dependence(quantile).bound_times(CONFIDENCE)
    hits = values <= truth
    assert population.series is not None
    found = of_share(hits, [population.series])
    n, n_hits = len(hits), int(hits.sum())
    times_of_hits = found.hit_times(CONFIDENCE, n - n_hits)
    share = wilson(n_hits, n, CONFIDENCE, found.hit_times(CONFIDENCE))
    proof = exact_bounds(n_hits, n, CONFIDENCE, times_of_hits)
    return {
        "share": n_hits / n,
        "coverage": (interval.low is None or interval.low <= truth)
        and (interval.high is None or truth <= interval.high),
        "false_proof": bounds.high is not None and bounds.high < truth,
        "false_miss": bounds.low is not None and bounds.low > truth,
        "share_coverage": (share.low is None or share.low <= quantile)
        and (share.high is None or quantile <= share.high),
        "share_false_proof": proof.low is not None and proof.low > quantile,
        "is_closed": interval.low is not None and interval.high is not None,
        "time_used": math.nan
        if times is None
        else (math.sqrt(times[0]) / 2 + math.sqrt(times[1]) / 2) ** 2,
    }


def draw(name: str, n: int, seed: int) -> Values:
    return draw_loaded(name, n, seed)[0]


def draw_loaded(name: str, n: int, seed: int) -> tuple[Values, Values | None]:
    """Values, and of the engine the numbers in flight, which every run knows. Those of the queues
    are left out: their intervals must hold by the values alone."""
    if name in PROCESSES:
        return PROCESSES[name](n, np.random.default_rng([20261123, seed])), None
    return engine(float(name.split("-")[1]), n, seed)


def engine(rate: float, n: int, seed: int) -> tuple[Values, Values]:
    """TTFTs of the simulated engine in order of release, after 30 s of warm-up, and the numbers of
    other requests in flight at the releases."""
    scenario = Scenario.model_validate(
        {
            "name": "dependent_coverage",
            "seed": seed,
            "phases": {"warmup": "30s", "measure": f"{1.2 * n / rate + 10:g}s"},
            "arrivals": {"kind": "poisson", "rate": f"{rate:g}/s"},
            "requests": {
                "input_tokens": {"kind": "lognormal", "median": 220, "sigma": 0.9, "max": 4096},
                "output_tokens": {"kind": "lognormal", "median": 80, "sigma": 0.8, "max": 600},
            },
            "stop_when": "never",
        }
    )
    run = simulate(scenario, **ENGINE)
    columns = per_request(run)
    order = columns.release_order
    rows = order[(run.request_rows["released_s"] >= 30.0)[order] & columns.is_ok[order]]
    return columns.ttft_s[rows][:n], columns.in_flight[rows][:n]


def true_percentiles(name: str, pool: ProcessPoolExecutor) -> list[float]:
    """In closed form for M/M/1 and AR(1), else from long runs of other seeds."""
    if name == "independent" or name.startswith("mm1"):
        load = 0.0 if name == "independent" else float(name.split("-")[1])
        return [-math.log(1 - quantile) / (1 - load) for quantile in QUANTILES]
    if name.startswith("ar"):
        return [float(ndtri(quantile)) for quantile in QUANTILES]
    n, n_runs = (4000, 24) if "engine" in name else (1_000_000, 8)
    parts = list(pool.map(partial(draw, name, n), range(FAR, FAR + n_runs)))
    return [float(value) for value in np.quantile(np.concatenate(parts), QUANTILES)]


POWERS = {
    "99.9 % against 99 %, mm1-0.7, n 30000": ("mm1-0.7", 30_000, 0.99, 0.999, 1.0),
    "p50 at half its limit, mm1-0.7, n 1500": ("mm1-0.7", 1500, 0.5, 0.5, 2.0),
    "99.8 % against 99 %, independent, n 500": ("independent", 500, 0.99, 0.998, 1.0),
}


def power(case: str, seeds: range, pool: ProcessPoolExecutor) -> dict[str, float]:
    """The share of runs that prove it, and of runs whose count would prove it if requests were
    independent."""
    name, n, quantile, level, factor = POWERS[case]
    load = 0.0 if name == "independent" else float(name.split("-")[1])
    limit = -math.log(1 - level) / (1 - load) * factor
    rows = list(pool.map(partial(proves, name, n, quantile, limit), seeds, chunksize=8))
    ours, by_count = np.mean(rows, axis=0)
    return {
        "proven": round(float(ours), 4),
        "proven_as_independent": round(float(by_count), 4),
        "n_runs": len(seeds),
    }


def proves(name: str, n: int, quantile: float, limit: float, seed: int) -> tuple[bool, bool]:
    values = draw(name, n, seed)
    population = of_requests(values)
    bound = population.percentile_bounds(quantile, CONFIDENCE).high
    plain = exact_bounds(int((values <= limit).sum()), n, CONFIDENCE).low
    return bound is not None and bound <= limit, plain is not None and plain >= quantile


def report(cells: Sequence[Mapping[str, Any]]) -> None:
    for cell in cells:
        print(
            f"{cell['case']:16} n {cell['n']:6} p{100 * cell['quantile']:<4g} "
            f"n/τ {cell['n'] / cell['time']:8.1f}  covered {100 * cell['coverage']:5.1f}  "
            f"false proof {100 * cell['false_proof']:4.1f}  miss {100 * cell['false_miss']:4.1f}  "
            f"closed {100 * cell['closed']:4.0f}  width {cell['width'] or math.nan:.2f}  "
            f"share {100 * cell['share_coverage']:5.1f} {100 * cell['share_false_proof']:4.1f}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
