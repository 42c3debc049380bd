"""Measures how often the paired interval of `slobench modes --capacity` holds.

    python benchmarks/mode_capacity.py [--repeats 200] [--seeds 8] [--requests 4000]
        [--pairs 'identical;ps, 5 % faster'] [--attainment 0.9] [--keep]

Each pair is two queues under the same draws: the same gaps and the same amounts of work, so that
only the servers differ. Their long-run capacities are known (closed form for M/M/c, else from four
draws of 400 000 requests), and so is the ratio. Every repeat is a whole comparison: the search of
`slobench modes --capacity` for each draw and server, and the interval over the draws. `bias` is the
mean of ln(ratio found / true ratio), `own_bias` that of ln(capacity found / true capacity): a
window of few requests is not the long run. `four equal servers` (mm12 with four independent streams
of work) counts the comparisons in which all three intervals around the chosen best hold 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rig.machine import keep, machine_line
from rig.queues import Queue

from loadgen.measure.statistics.intervals import Values
from loadgen.studies.modes.seed_capacity import (
    FIRST_STEP,
    NEXT_STEP,
    REQUESTS,
    WARM_SHARE,
    Tried,
    capacity_of,
    compare_capacities,
    next_level,
)


@dataclass(frozen=True)
class Server:
    """A queue whose work is done `speed` times as fast."""

    queue: Queue
    speed: float = 1.0

    @property
    def has_closed_form(self) -> bool:
        queue = self.queue
        return (queue.gaps, queue.service, queue.order, queue.pause_s) == (1, 1, "fcfs", 0)

    def closed_form(self, target: float) -> float:
        """The long-run capacity: in units of 1 / speed, the limit alone differs."""
        scaled = replace(self.queue, limit_s=self.queue.limit_s * self.speed)
        return self.speed * scaled.capacity(target)


MM1, MM12 = Queue(service=1), Queue(servers=12, service=1, limit_s=1.0)
GG4 = Queue(servers=4, service=1.5, gaps=1.4, limit_s=2.0)
PS = Queue(service=1, order="ps", limit_s=4.0)
_LONG_RUNS, _LONG = 4, 400_000
PAIRS: dict[str, tuple[Server, ...]] = {
    "identical": (Server(MM12), Server(MM12)),
    "mm1, twice as fast": (Server(MM1, 2.0), Server(MM1)),
    "mm12, twice as fast": (Server(MM12, 2.0), Server(MM12)),
    "mm12, 12 against 11 servers": (Server(MM12), Server(replace(MM12, servers=11))),
    "gg4, 5 % faster": (Server(GG4, 1.05), Server(GG4)),
    "ps, 5 % faster": (Server(PS, 1.05), Server(PS)),
    "ps against mm1": (Server(PS), Server(replace(MM1, limit_s=4.0))),
}


@dataclass(frozen=True)
class Draw:
    """Gaps in units of the mean gap, and work in seconds of a server of speed 1."""

    gaps: Values
    work_s: Values

    @staticmethod
    def of(queue: Queue, n: int, rng: np.random.Generator) -> Draw:
        shape = 1 / queue.gaps**2
        return Draw(rng.gamma(shape, 1 / shape, n), queue.services_s(n, rng))

    def at(self, server: Server, level: float, n_warm: int) -> Tried:
        instants_s = np.cumsum(self.gaps) / level
        met = server.queue.met(instants_s, self.work_s / server.speed)[n_warm:]
        return Tried(level, len(met), int(np.count_nonzero(met)))


def capacity(
    draw: Draw, server: Server, target: float, start: float, step: float, n_warm: int
) -> tuple[float, int]:
    """The capacity of a server for a draw, and the number of rates tried."""
    tried: list[Tried] = []
    while (level := next_level(tried, target, start, step)) is not None:
        tried.append(draw.at(server, level, n_warm))
    found = capacity_of(tried, target)
    assert found.outcome == "found", found
    return found.value, len(tried)


def long_run(servers: Sequence[Server], target: float) -> list[float]:
    """The long-run capacities: in closed form, else from draws of 400 000 requests."""
    if all(server.has_closed_form for server in servers):
        return [server.closed_form(target) for server in servers]
    rng = np.random.default_rng(77)
    logs = []
    for _ in range(_LONG_RUNS):
        draw = Draw.of(servers[0].queue, _LONG, rng)
        logs.append(
            [
                math.log(capacity(draw, one, target, 0.5 * one.queue.servers, FIRST_STEP, 4000)[0])
                for one in servers
            ]
        )
    return [math.exp(statistics.fmean(log)) for log in zip(*logs, strict=True)]


def compared(
    servers: Sequence[Server],
    draws: Callable[[int], Sequence[Draw]],
    target: float,
    n_seeds: int,
    n_warm: int,
) -> tuple[dict[str, Any], float]:
    """A whole comparison, and the rates tried per draw and server."""
    found: dict[str, dict[int, float]] = {f"{k}": {} for k in range(len(servers))}
    n_tried = 0
    for seed in range(n_seeds):
        for k, (server, draw) in enumerate(zip(servers, draws(seed), strict=True)):
            known = found[f"{k}"]
            start = known[0] if known else 0.5 * server.queue.servers
            step = NEXT_STEP if known else FIRST_STEP
            known[seed], n = capacity(draw, server, target, start, step, n_warm)
            n_tried += n
    return compare_capacities(found, 0.95).to_json(), n_tried / n_seeds / len(servers)


def coverage(
    servers: tuple[Server, ...], target: float, n_repeats: int, n_seeds: int, n_requests: int
) -> dict[str, Any]:
    truths = long_run(servers, target)
    ratio = truths[0] / truths[1]
    n_warm = round(WARM_SHARE * n_requests)
    hits, halves, errors, own, own_errors, tried = 0, [], [], 0, [], []
    for repeat in range(n_repeats):
        rng = np.random.default_rng([repeat, 25])

        def draws(_: int, rng: np.random.Generator = rng) -> Sequence[Draw]:
            return [Draw.of(servers[0].queue, n_warm + n_requests, rng)] * 2

        found, n = compared(servers, draws, target, n_seeds, n_warm)
        (row,) = found["ratios"]
        value, low, high = row["value"], row["low"], row["high"]
        if row["best"] == "1":
            value, low, high = 1 / value, 1 / high, 1 / low
        hits += low * (1 - 1e-9) <= ratio <= high * (1 + 1e-9)
        halves.append((high - low) / 2 / value)
        errors.append(math.log(value / ratio))
        for row in found["modes"]:
            truth = truths[int(row["mode"])]
            own += row["low"] <= truth <= row["high"]
            own_errors.append(math.log(row["value"] / truth))
        tried.append(n)
    return {
        "ratio": ratio,
        "covered": hits,
        "repeats": n_repeats,
        "own_intervals_covered": own / 2,
        "own_bias": statistics.fmean(own_errors),
        "median_half_width": statistics.median(halves),
        "bias": statistics.fmean(errors),
        "rms_error": math.sqrt(statistics.fmean(error**2 for error in errors)),
        "rates_tried": statistics.fmean(tried),
    }


def four_equal(target: float, n_repeats: int, n_seeds: int, n_requests: int) -> dict[str, Any]:
    """Comparisons of four equal servers in which every printed interval holds 1."""
    n_warm = round(WARM_SHARE * n_requests)
    hits = 0
    for repeat in range(n_repeats):
        rng = np.random.default_rng([repeat, 26])

        def draws(_: int, rng: np.random.Generator = rng) -> Sequence[Draw]:
            first = Draw.of(MM12, n_warm + n_requests, rng)
            return [
                replace(first, work_s=rng.standard_exponential(len(first.gaps))) for _ in range(4)
            ]

        found, _ = compared([Server(MM12)] * 4, draws, target, n_seeds, n_warm)
        hits += all(row["low"] <= 1 <= row["high"] for row in found["ratios"])
    return {"covered": hits, "repeats": n_repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--pairs", default=";".join([*PAIRS, "four equal servers"]))
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    print(machine_line())
    results: dict[str, Any] = {}
    for name in filter(None, asked.pairs.split(";")):
        sizes = (asked.attainment, asked.repeats, asked.seeds, asked.requests)
        found = four_equal(*sizes) if name not in PAIRS else coverage(PAIRS[name], *sizes)
        results[name] = found
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
        print(name, rounded, flush=True)
    if asked.keep:
        name = f"mode_capacity_{100 * asked.attainment:g}"
        print(keep(name, vars(asked), {"pairs": results}))


if __name__ == "__main__":
    main()
