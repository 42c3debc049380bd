"""Measures how often a run is called clear of its limit: with wide margins, at a limit that the
true share meets exactly, under a growing load, and with a slow kind of request that hardly occurs.

Run: python benchmarks/clear_coverage.py [--repetitions 40] [--first-seed 91000] \
         [--cells margin,exact,growth,absent,steady] [--into benchmarks/results/clear_coverage.json]

Each cell (process, n, limit) draws `--repetitions` runs; no constant of the rule was chosen on
these seeds. `clear` is the share of runs that are clear at "95 % within the limit" (`exact`: also
99 %), `without_growth_rule` the same without the rules against a growing load, `proven` the share
that the bound alone proves. In `exact`, `growth` and `absent` every clear run is false: the limit
is the true percentile; the load exceeds the capacity, so that no limit holds; or 8 % of the
requests, in runs of 10, take 20 times as long. `steady` has queues below their capacity. `--table
FILE` prints the cells of a file as the Markdown table of benchmarks/results/clear_coverage.md.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rig.machine import machine_line
from rig.processes import Values, autoregression, lindley
from scipy.special import ndtr, ndtri

from loadgen.measure.statistics.dependence import Load, Series
from loadgen.measure.statistics.margin import growth, is_clear, margin_ratios
from loadgen.measure.statistics.population import of_requests
from loadgen.measure.statistics.proportions import exact_bounds

CONFIDENCE = 0.95
SIZES = (62, 125, 300, 1000, 2000)
SPREAD = 0.3  # of the logarithm of a latency
Draw = Callable[[int, np.random.Generator], tuple[Values, Values]]
"""n latencies in order of arrival, and the requests in flight at each arrival."""


def in_flight(arrivals: Values, values: Values) -> Values:
    ended = np.searchsorted(np.sort(arrivals + values), arrivals, side="right")
    return np.arange(len(arrivals), dtype=np.float64) - ended


def open_loop(latencies: Callable[[int, np.random.Generator], Values], rate: float) -> Draw:
    def draw(n: int, rng: np.random.Generator) -> tuple[Values, Values]:
        values = latencies(n, rng)
        return values, in_flight(np.cumsum(rng.exponential(1 / rate, n)), values)

    return draw


def noise(factor: float) -> Draw:
    draw = autoregression(factor)
    return open_loop(lambda n, rng: np.exp(SPREAD * draw(n, rng)), 0.1)


def pareto(exponent: float, factor: float) -> Draw:
    draw = autoregression(factor)

    def latencies(n: int, rng: np.random.Generator) -> Values:
        above = 1 - np.clip(ndtr(draw(n, rng)), 0, 1 - 1e-12)
        values: Values = above ** (-1 / exponent)
        return values

    return open_loop(latencies, 0.02)


def queue(load: float, n_run_in: int = 3000, base: float = 0.0) -> Draw:
    """M/M/1 after a run-in; it starts empty without one."""

    def draw(n: int, rng: np.random.Generator) -> tuple[Values, Values]:
        total = n + n_run_in
        gaps, services = rng.exponential(1 / load, total), rng.exponential(size=total)
        values = lindley(services, gaps) + services
        arrivals = np.concatenate([[0.0], np.cumsum(gaps[:-1])])
        flight = in_flight(arrivals, values)
        return values[n_run_in:] + base, flight[n_run_in:]

    return draw


def servers(n_servers: int, load: float, base: float = 0.1) -> Draw:
    """The waits for one of several servers, empty at first, and a constant time to first token."""

    def draw(n: int, rng: np.random.Generator) -> tuple[Values, Values]:
        arrivals = np.cumsum(rng.exponential(1 / (load * n_servers), n))
        services, free = rng.exponential(size=n), [0.0] * n_servers
        starts = np.empty(n)
        for k in range(n):
            starts[k] = max(heapq.heappop(free), arrivals[k])
            heapq.heappush(free, starts[k] + services[k])
        flight = in_flight(arrivals, starts + services - arrivals)
        return starts - arrivals + base, flight

    return draw


def many_in_flight(mean: float) -> Draw:
    """Independent noise of first tokens, and answers that keep `mean` requests in flight."""

    def draw(n: int, rng: np.random.Generator) -> tuple[Values, Values]:
        n_run_in = math.ceil(20 * mean)
        arrivals = np.cumsum(rng.exponential(1 / mean, n + n_run_in))
        flight = in_flight(arrivals, rng.exponential(size=n + n_run_in))
        return np.exp(SPREAD * rng.normal(size=n)), flight[n_run_in:]

    return draw


def slow_kind(factor: float, stay: float, share: float = 0.08, times: float = 20.0) -> Draw:
    """Noise, and a share of the requests, in runs of `stay` on average, that take longer."""
    draw = autoregression(factor)

    def latencies(n: int, rng: np.random.Generator) -> Values:
        is_slow, at, state = np.zeros(n, bool), 0, bool(rng.random() < share)
        while at < n:
            mean = stay if state else stay * (1 - share) / share
            length = int(rng.geometric(min(1.0, 1 / mean)))
            is_slow[at : at + length] = state
            at, state = at + length, not state
        values: Values = np.exp(SPREAD * draw(n, rng)) * np.where(is_slow, times, 1.0)
        return values

    return open_loop(latencies, 0.05)


def lognormal_percentile(share: float) -> float:
    return math.exp(SPREAD * float(ndtri(share)))


NOISES: Mapping[str, Draw] = {
    "noise, independent": noise(0.0),
    "noise, AR 0.5": noise(0.5),
    "noise, AR 0.9": noise(0.9),
    "noise, AR 0.97": noise(0.97),
}
QUEUES = {f"M/M/1, load {load:g}": load for load in (0.5, 0.7, 0.9)}
OVERLOADS = {f"M/M/1 from empty, load {load:g}": load for load in (1.02, 1.05, 1.1, 1.2)}
FROM_EMPTY = {f"M/M/1 from empty, load {load:g}": load for load in (0.7, 0.9)}
ABSENT = {
    "slow kind, independent": (0.0, 1.0),
    "slow kind in runs of 10, AR 0.9": (0.9, 10.0),
    "slow kind in runs of 30, AR 0.9": (0.9, 30.0),
}


def cells() -> list[tuple[str, str, Draw, float, dict[str, float]]]:
    """(cells, process, its draw, share, limits by name)."""
    found: list[tuple[str, str, Draw, float, dict[str, float]]] = []
    p99 = lognormal_percentile(0.99)
    margins = {f"{times} × p99": times * p99 for times in (3, 10, 100)}
    found += [("margin", name, draw, 0.95, margins) for name, draw in NOISES.items()]
    for share in (0.95, 0.99):
        limit = {"exact": lognormal_percentile(share)}
        found += [("exact", name, draw, share, limit) for name, draw in NOISES.items()]
        for name, load in QUEUES.items():
            exact = {"exact": -math.log(1 - share) / (1 - load)}
            found.append(("exact", name, queue(load), share, exact))
        for exponent, factor in ((1.5, 0.9), (1.5, 0.97), (1.0, 0.9)):
            title = f"Pareto {exponent:g}, AR {factor:g}"
            exact = {"exact": (1 - share) ** (-1 / exponent)}
            found.append(("exact", title, pareto(exponent, factor), share, exact))
    for name, load in FROM_EMPTY.items():  # of the lasting law, which the run approaches from below
        exact = {"exact": -math.log(0.05) / (1 - load)}
        found.append(("exact", name, queue(load, 0), 0.95, exact))
    for name, load in OVERLOADS.items():
        services = (20, 50, 200, 1000)
        limits = {f"{times} services": float(times) for times in services}
        found.append(("growth", name, queue(load, 0), 0.95, limits))
    for name, (factor, stay) in ABSENT.items():
        limits = {f"{times} × p99": times * p99 for times in (2, 5)}
        found.append(("absent", name, slow_kind(factor, stay), 0.95, limits))
    for name, load in OVERLOADS.items():
        limits = {f"{times} services": float(times) for times in (5, 20, 1000)}
        found.append(("growth", name.replace("M/M/1", "M/M/12"), servers(12, load), 0.95, limits))
    for load in (0.5, 0.7, 0.9):
        limits = {f"{times} × p99": times * math.log(100) / (1 - load) for times in (10, 100)}
        found.append(("steady", f"M/M/1, load {load:g}", queue(load), 0.95, limits))
    limits = {f"{times} services": float(times) for times in (20, 1000)}
    found.append(("steady", "M/M/12 from empty, load 0.7", servers(12, 0.7), 0.95, limits))
    for n in (10, 100):
        limits = {"10 × p99": 10 * p99}
        title = f"noise, {n} in flight"
        found.append(("steady", title, many_in_flight(float(n)), 0.95, limits))
    return found


def judge(at: int, seed: int) -> list[dict[str, Any]]:
    """The largest run of a cell and its beginnings: a row per n and limit."""
    kind, name, draw, share, limits = cells()[at]
    values, flight = draw(SIZES[-1], np.random.default_rng([seed, at]))
    rows = []
    for n in SIZES:
        population = of_requests(values[:n], Load(flight[:n]))
        time = Series(values[:n], Load(flight[:n])).at(share).time_requests
        found = population.dependence(share)
        for title, limit in limits.items():
            late = int(population.n_beyond(limit))
            ratios = margin_ratios(values[:n], limit)
            by_margin = is_clear(n, float(ratios.max()), share, time, CONFIDENCE)
            growing = by_margin and growth(values[:n], ratios, flight[:n], is_wait=True)
            high = exact_bounds(late, n, CONFIDENCE, found.bound_times(CONFIDENCE)).high
            rows.append(
                {"cells": kind, "process": name, "share": share, "limit": title, "n": n}
                | {"clear": bool(by_margin and not growing), "without_growth_rule": by_margin}
                | {"proven": high is not None and high <= 1 - share, "no_miss": late == 0}
            )
    return rows


KEYS = ("clear", "without_growth_rule", "proven", "no_miss")


def measured(at: int, seeds: range, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    runs = list(pool.map(partial(judge, at), seeds, chunksize=10))
    return [
        {**rows[0], **{key: round(float(np.mean([row[key] for row in rows])), 4) for key in KEYS}}
        | {"n_runs": len(seeds), "first_seed": seeds[0]}
        for rows in zip(*runs, strict=True)
    ]


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Clear / without the rule against growth, in % of the runs, a row per process and limit."""
    lines = ["| cells | process | share | limit | " + " | ".join(f"n = {n}" for n in SIZES) + " |"]
    lines += ["|---|---|--:|---|" + "--:|" * len(SIZES)]
    row_of = ("cells", "process", "share", "limit")
    ordered = sorted(found, key=lambda cell: [str(cell[key]) for key in row_of])
    for keys, row in groupby(ordered, lambda cell: [cell[key] for key in row_of]):
        values = sorted(row, key=lambda cell: int(cell["n"]))
        shown = [f"{100 * c['clear']:.0f} / {100 * c['without_growth_rule']:.0f}" for c in values]
        lines.append("| " + " | ".join([*map(str, keys), *shown]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=91_000)
    parser.add_argument("--cells", default="margin,exact,growth,absent,steady")
    parser.add_argument("--into", type=Path, help="the file of the results")
    parser.add_argument("--table", type=Path, help="a file of results to print as a table")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(json.loads(options.table.read_text())["cells"])))
        return
    seeds = range(options.first_seed, options.first_seed + options.repetitions)
    chosen = options.cells.split(",")
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for at, (kind, *_) in enumerate(cells()):
            if kind in chosen:
                found += measured(at, seeds, pool)
    result = {"benchmark": "clear_coverage", "machine": machine_line()}
    text = json.dumps({**result, "python": platform.python_version(), "cells": found}, indent=1)
    if options.into:
        options.into.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
