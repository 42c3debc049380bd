"""Measures how often the interval of a capacity search holds, and the cost of a search and a sweep.

    python benchmarks/capacity_search.py [--seeds 100] [--servers md1,mm8] [--attainment 0.9]
        [--precision 0.05] [--gaps 1.0] [--budget 3000] [--requests 2000] [--engine-seeds 0]
        [--keep]

Servers are queues whose capacity is known (closed form for Poisson arrivals at M/D/1 and M/M/c,
else bisection over ten runs of a million arrivals). The search is that of `slobench capacity`: the
same probes, early ends and answers, on outcomes from the queue. `--engine-seeds N` also searches
the bundled engine's simulator through all of `slobench capacity`; its truth is a bisection over
long runs. `--budget` ends each search after so many (virtual) seconds, `--requests` after the time
in which so many requests arrive at the capacity (with warm-ups of 2 s and windows of at least 5 s);
no sweep is made then.

The fixed sweep has ten rates, evenly spaced in their logarithm from half to twice the true capacity
(a hint that a search does not get), each measured equally long after the same warm-up as a search's
longest probe. It interpolates: attainment at each rate has an interval by batch means (Student's t
over 16 blocks), and the capacity interval is where the lines through the lower and the upper bounds
cross the target, in log-odds over the logarithm of the rate. The length is doubled until the median
width over 40 seeds is no more than the searches' median width; the cost is then taken between the
last two lengths, where width² · length is constant. Lines between grid points are taken as true,
which favours the sweep.

`sweep_covered` is the number of the sweep's intervals that hold (of 40): its blocks miss a queue
that remembers longer than they last, so that the interval may be as narrow long before it is right.
`honest_sweep_time_s` is the time of the first length from there on at which 36 of 40 hold.

Variants of the search (decision 44). Without longer probes for long queues, 3 of 20
searches of an M/M/8 queue ended after seven short probes, 10 to 28 % too high. Keeping probes near
the region in doubt saved a tenth of the requests, but a wrong probe then cost 76 000 s of probes
instead of 25 000. Counting probes up to 1.1 log-odds from the answer instead of 0.8 takes a fifth
less time (M/M/8: 0.37 instead of 0.46 of a sweep's time) at equal coverage; probes at 0.75 instead
of 0.5 log-odds took twice as long where attainment stops falling at 80 %, and held in 24 instead of
30 of 30. Probes off the middle of a clean cliff settle it in 9 to 24 probes instead of more than
80.

`long_run` is the queue itself at its capacity: the prior of slope and design effect rests on it.
`consistent_probes` are the probes of all searches that agree with the probes before them, and
`widened_by_5_percent` those after which the interval was more than 5 % wider than before.

With `--requests 3000`, 180 s at some 17 requests per second, drains count as spent. A search
without an interval, or with contradictory probes, is not covered; `by_schedule` counts the
intervals that the schedule gave, the others come from the curve (decision 64).
`below_a_proven_load` counts estimates below a rate at which a probe's own bound proves the target.

Where the budget ends a search before long probes confirm it, 82 to 90 of 100 intervals covered
(M/D/1, M/M/8, M/D/64), nearly all misses too high; with the lower bound moved down, 98 to 100.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rig.machine import RESULTS, keep, machine_line
from rig.queues import Queue, search
from rig.servers import Batching, Bursty, RateLimited, TwoClasses
from scipy.special import stdtrit

from loadgen.lab.simulate import simulate
from loadgen.measure.aggregate import summarize
from loadgen.run.run_options import RunOptions
from loadgen.studies.capacity.next_probe import Question, judge
from loadgen.studies.capacity.probe import Probe, in_blocks
from loadgen.studies.capacity.result import Capacity
from loadgen.studies.capacity.run import search as whole_search
from loadgen.studies.capacity.spec import CapacitySpec
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario, load_scenario

SERVERS = {
    "md1": Queue(),
    "md1-loose": Queue(limit_s=6.0),
    "mm1": Queue(service=1),
    "mm8": Queue(servers=8, service=1, limit_s=1.0),
    "mm12": Queue(servers=12, service=1, limit_s=1.0),
    "gg4": Queue(servers=4, service=1.5, gaps=1.4, limit_s=2.0),
    "mm8-loose": Queue(servers=8, service=1, limit_s=4.0),
    "md64": Queue(servers=64, limit_s=0.3),
    "lognormal": Queue(service=2, limit_s=6.0),
    "ps": Queue(service=1, order="ps", limit_s=4.0),
    "pauses": Queue(servers=4, service=1, limit_s=1.0, pause_s=2.0, period_s=60.0),
    "mmpp6": Bursty(servers=6, service=1, limit_s=2.0),
    "batching": Batching(),
    "two-classes": TwoClasses(),
    "rate-limited": RateLimited(),
    "md2": Queue(servers=2, limit_s=2.0),
    "mg3-pauses": Queue(servers=3, service=1.5, limit_s=1.5, pause_s=1.5, period_s=45.0),
}
CAPACITIES = {
    "gg4": 2.641,
    "ps": 0.590,
    "pauses": 2.474,
    "mmpp6": 3.572,
    "batching": 17.01,
    "two-classes": 11.61,
    "rate-limited": 21.78,
    "mg3-pauses": 1.723,
}
"""Capacities at 90 %, per second: bisections over two runs of 1.5 million arrivals (200 000 for
rate-limited), whose difference is below 0.5 %."""
_LONG_RUN, _BATCH, _APART = 200_000, 2_000, 0.03
_SWEEP_SEEDS, _SWEEP_POINTS = 40, 10
_SWEEP_HOLDS = 0.9  # of its intervals, for one that can be trusted
_MOST_DOUBLINGS = 9


def truth(queue: Queue, target: float) -> float:
    is_plain = type(queue) is Queue
    is_plain &= (queue.gaps, queue.order, queue.pause_s) == (1, "fcfs", 0)
    if is_plain and (queue.service == 1 or (queue.servers, queue.service) == (1, 0)):
        return queue.capacity(target)
    rng = np.random.default_rng(77)
    known = [name for name, server in SERVERS.items() if server == queue and name in CAPACITIES]
    if known and target == 0.9:
        return CAPACITIES[known[0]]
    n = 1_000_000 if queue.servers == 1 or queue.service == 0 else 200_000
    return statistics.fmean(queue.found_capacity(target, n, rng) for _ in range(10))


def named(name: str, gaps: float = 1.0) -> Queue:
    """The server of this name; gaps of another cv replace its own."""
    plain = SERVERS[name]
    return plain if gaps == 1 else replace(plain, gaps=gaps)


def long_run(queue: Queue, target: float, capacity: float) -> dict[str, float]:
    """The curve at the capacity in 200 000 requests: its slope, its fall up to the load at which
    the queue grows without end (both in log-odds), and the design effect from batches of 2 000."""

    def met(level: float, number: int) -> np.ndarray[Any, Any]:
        kept = queue.arrive(level, _LONG_RUN / level, np.random.default_rng([number, 31]))[1]
        return kept[len(kept) // 20 :].astype(float)

    odds = []
    for level in (capacity * (1 - _APART), capacity * (1 + _APART)):
        share = met(level, 0).mean()
        odds.append(math.log(share / (1 - share)))
    slope = (odds[0] - odds[1]) / math.log((1 + _APART) / (1 - _APART))
    endless = queue.servers * (1 - queue.pause_s / queue.period_s)
    kept = met(capacity, 1)
    n_batches = len(kept) // _BATCH
    shares = kept[: n_batches * _BATCH].reshape(n_batches, _BATCH).mean(axis=1)
    return {
        "slope": slope,
        "fall": slope * math.log(endless / capacity),
        "usual_fall": math.log(1 / (1 - target)) / target,
        "design_effect": shares.var(ddof=1) * _BATCH / (shares.mean() * (1 - shares.mean())),
        "memory_by_slope": 2 * (slope * target / math.log(1 / (1 - target))) ** 2,
    }


def searches(
    queue: Queue,
    target: float,
    precision: float,
    n_seeds: int,
    budget_s: float = math.inf,
    n_requests: int = 0,
    first_seed: int = 0,
    by_schedule: bool = True,
) -> dict[str, Any]:
    """Coverage, widths and costs of `n_seeds` searches from starts between an eighth of and just
    above the capacity."""
    capacity = truth(queue, target)
    warmup_s, measure_s = (2.0, 5.0) if n_requests else (10.0, 20.0)
    if n_requests:
        budget_s = n_requests / capacity
    hits, below, n_found, widths, costs, n_probes, longest, values = 0, 0, 0, [], [], [], [], []
    grown: list[float] = []
    began_s = time.process_time()
    methods: list[str] = []
    contradicted = refuted = 0
    law = lru_cache(64)(queue.law) if by_schedule else None
    for seed in range(first_seed, first_seed + n_seeds):
        rng = np.random.default_rng([seed, 4711])
        start = capacity * math.exp(rng.uniform(-2.0, 0.2))
        question = Question(
            target, start, precision, warmup_s=warmup_s, measure_s=measure_s, law=law
        )
        state, probes = search(queue, question, rng, budget_s, drains=bool(n_requests))
        n_found += state.outcome == "found"
        contradicted += state.outcome == "contradictory"
        if not n_requests:
            grown += widened(question, probes)
        if state.value is None or state.low is None or state.high is None:
            continue
        methods.append(state.method)
        refuted += any(
            p.low is not None
            and p.low >= target
            and min(p.level, p.n_due / p.measured_s) > state.value * (1 + 1e-9)
            for p in probes
        )
        hits += state.low <= capacity <= state.high
        below += capacity < state.low
        widths.append(state.half_width)
        costs.append(sum(probe.spent_s for probe in probes))
        n_probes.append(len(probes))
        longest.append(max(probe.warmup_s for probe in probes))
        values.append(math.log(state.value / capacity))
    return {
        "capacity_per_s": capacity,
        "covered": hits,
        "capacity_below_the_interval": below,
        "searches": n_seeds,
        "with_an_interval": len(widths),
        "by_schedule": methods.count("schedule"),
        "contradictory": contradicted,
        "below_a_proven_load": refuted,
        "as_narrow_as_asked": n_found,
        "median_half_width": statistics.median(widths),
        "median_probe_time_s": statistics.median(costs),
        "median_probes": statistics.median(n_probes),
        "median_error": statistics.median(values),
        "median_absolute_error": statistics.median(map(abs, values)),
        "bias": statistics.fmean(math.expm1(value) for value in values),
        "sd_of_error": statistics.pstdev(values),
        "rms_error": math.sqrt(statistics.fmean(math.expm1(value) ** 2 for value in values)),
        "warmup_s": statistics.median(longest),
        "consistent_probes": len(grown),
        "widened_by_5_percent": sum(times > 1.05 for times in grown),
        "most_widened": max(grown, default=None),
        "cpu_s_per_search": (time.process_time() - began_s) / n_seeds,
    } | ({} if n_requests else {"long_run": long_run(queue, target, capacity)})


def widened(question: Question, probes: list[Probe]) -> list[float]:
    """The factor by which the half-width changes with each probe that is consistent with the
    earlier probes: its attainment lies within two standard errors of the attainment that they
    predict at its load (their posterior's, and n / design effect independent requests)."""
    factors = []
    for k in range(2, len(probes)):
        before = judge(question, probes[:k])
        added = probes[k]
        if before.posterior is None or not math.isfinite(before.half_width):
            continue
        known = before.posterior
        goal = math.log(question.target / (1 - question.target))
        distance = np.log(added.level) - known.log_levels[:, None]
        shares = 1 / (1 + np.exp(np.clip(known.slopes[None, :] * distance - goal, -50, 50)))
        mean = float((known.joint * shares).sum())
        variance = float((known.joint * np.square(shares - mean)).sum())
        variance += mean * (1 - mean) * known.dispersion.effect / max(1, added.n_due)
        if abs(added.attainment - mean) <= 2 * math.sqrt(variance):
            after = judge(question, probes[: k + 1])
            factors.append(after.half_width / before.half_width)
    return factors


def sweep_interval(
    queue: Queue, target: float, capacity: float, warmup_s: float, length_s: float, seed: int
) -> tuple[float, float]:
    """What a ten-point sweep says of the capacity."""
    rng = np.random.default_rng([seed, 815])
    levels = np.geomspace(capacity / 2, capacity * 2, _SWEEP_POINTS)
    lows, highs = [], []
    for level in levels.tolist():
        instants_s, kept, _ = queue.arrive(level, warmup_s + length_s, rng)
        counted = instants_s >= warmup_s
        due, met = in_blocks(instants_s[counted], kept[counted], warmup_s, warmup_s + length_s)
        probe = Probe(level, due, met, warmup_s, length_s, warmup_s + length_s)
        low, high = _odds(probe)
        lows.append(low)
        highs.append(high)
    goal = math.log(target / (1 - target))
    first, last = (_crossing(np.log(levels), np.array(odds), goal) for odds in (lows, highs))
    return math.exp(first), math.exp(last)


def _odds(probe: Probe) -> tuple[float, float]:
    """Both ends of the log-odds of attainment, by batch means."""
    due, met = np.array(probe.due, float), np.array(probe.met, float)
    n, share = due.sum(), (met.sum() + 0.5) / (due.sum() + 1)
    spread = np.square(met - met.sum() / n * due).sum() * len(due) / (len(due) - 1)
    sd = max(math.sqrt(spread) / n, math.sqrt(share * (1 - share) / n))
    half = float(stdtrit(len(due) - 1, 0.975)) * sd / (share * (1 - share))
    middle = math.log(share / (1 - share))
    return middle - half, middle + half


def _crossing(x: np.ndarray[Any, Any], odds: np.ndarray[Any, Any], goal: float) -> float:
    """Where the falling line through the points first passes below the goal; an end if nowhere."""
    below = np.flatnonzero(odds < goal)
    if not len(below):
        return float(x[-1])
    place = int(below[0])
    if place == 0:
        return float(x[0])
    before, after = odds[place - 1], odds[place]
    return float(x[place - 1] + (x[place] - x[place - 1]) * (before - goal) / (before - after))


def sweeps(queue: Queue, target: float, found: dict[str, Any]) -> dict[str, Any]:
    """The time of a sweep as narrow as the searches, how often it holds, and the time of one that
    does; None where no length tried gets there."""
    capacity, wanted = found["capacity_per_s"], found["median_half_width"]
    warmup_s, length_s, before = found["warmup_s"], 200 / found["capacity_per_s"], math.inf
    said: dict[str, Any] = {"sweep_time_s": None, "sweep_covered": None}
    for _ in range(_MOST_DOUBLINGS):
        ends = [
            sweep_interval(queue, target, capacity, warmup_s, length_s, seed)
            for seed in range(_SWEEP_SEEDS)
        ]
        width = statistics.median((high - low) / 2 / capacity for low, high in ends)
        n_covered = sum(low <= capacity <= high for low, high in ends)
        holds = n_covered >= _SWEEP_HOLDS * _SWEEP_SEEDS
        time_s = _SWEEP_POINTS * (warmup_s + length_s)
        if said["sweep_time_s"] is None and width <= wanted:
            if math.isfinite(before):
                time_s = _SWEEP_POINTS * (
                    warmup_s + max(length_s / 2, length_s * (width / wanted) ** 2)
                )
            said |= {"sweep_time_s": time_s, "sweep_covered": n_covered}
        if said["sweep_time_s"] is not None and holds:
            return said | {"honest_sweep_time_s": time_s}
        before, length_s = width, length_s * 2
    return said | {"honest_sweep_time_s": None}


_ENGINE: dict[str, Any] = {"shape": "8b", "hardware": "h200", "max_num_seqs": 8}
_TRAFFIC = [
    "requests.input_tokens={kind: lognormal, median: 220, sigma: 0.9, max: 4096}",
    "requests.output_tokens={kind: lognormal, median: 16, sigma: 0.8, max: 100}",
    "phases.warmup=2s",
    "phases.measure=20s",
    "stop_when=never",
]


def engine(n_seeds: int, target: float, precision: float) -> dict[str, Any]:
    """The bundled engine's simulator through `slobench capacity`, against long runs of the same."""
    with ProcessPoolExecutor() as pool:
        capacity = engine_truth(target, pool)
        asked = (range(n_seeds), [target] * n_seeds, [precision] * n_seeds)
        found = list(pool.map(engine_search, *asked))
    return {
        "capacity_per_s": capacity,
        "covered": sum((one.low or math.inf) <= capacity <= (one.high or 0.0) for one in found),
        "searches": n_seeds,
        "median_half_width": statistics.median(one.half_width or math.nan for one in found),
        "median_probe_time_s": statistics.median(one.spent_s for one in found),
        "intervals": [[one.low, one.high] for one in found],
    }


def engine_truth(target: float, pool: ProcessPoolExecutor) -> float:
    low, high = 2.0, 200.0
    for step in range(12):  # the same seeds at every rate: what is luck in them cancels out
        middle = math.sqrt(low * high)
        n_runs, n_requests = (1, 4000) if step < 6 else (10, 20_000)
        asked = ([middle] * n_runs, [n_requests] * n_runs, range(n_runs))
        attained = statistics.fmean(pool.map(engine_attains, *asked))
        low, high = (middle, high) if attained >= target else (low, middle)
    return math.sqrt(low * high)


def engine_attains(rate: float, n_requests: int, number: int) -> float:
    """The share of a long run's promises that are kept."""
    probing = scaled(load_scenario("capacity_search", _TRAFFIC), rate, "rate")
    run = simulate(with_window(probing, 10.0, n_requests / rate, 10**6 + number), **_ENGINE)
    return summarize(run).attainment.value


def engine_search(seed: int, target: float, precision: float) -> Capacity:
    """The answer for the bundled engine."""
    scenario = load_scenario("capacity_search", _TRAFFIC)
    return answer_of(scenario, seed, _ENGINE, attainment=target, precision=precision)


def answer_of(
    scenario: Scenario, seed: int, engine: Mapping[str, Any], **settings: Any
) -> Capacity:
    """The answer of one whole `slobench capacity` on a simulated engine; `settings` are those of
    CapacitySpec."""
    values = scenario.resolved() | {"seed": seed}
    words = ",".join(f"{key}={value}" for key, value in engine.items())
    options = RunOptions(engine=words, cache_dir=Path(tempfile.gettempdir()))
    asked = CapacitySpec(Scenario.model_validate(values), "sim", options, **settings)
    with tempfile.TemporaryDirectory() as directory:
        return whole_search(asked, Path(directory) / "s", Console(quiet=True), resume=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--servers", default="md1,mm8")
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--gaps", type=float, default=1.0)
    parser.add_argument("--budget", type=float, default=math.inf)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--by-curve", action="store_true", help="without the schedule")
    parser.add_argument("--engine-seeds", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    print(machine_line())
    results: dict[str, Any] = {}
    for name in filter(None, asked.servers.split(",")):
        queue = named(name, asked.gaps)
        share, precision, n = asked.attainment, asked.precision, asked.requests
        found = searches(
            queue,
            share,
            precision,
            asked.seeds,
            asked.budget,
            n,
            asked.first_seed,
            not asked.by_curve,
        )
        if not n and not math.isfinite(asked.budget):
            found |= sweeps(queue, asked.attainment, found)
            for name_of, over in (("sweep", "over_the_sweep"), ("honest_sweep", "over_an_honest")):
                time_s = found[f"{name_of}_time_s"]
                found[over] = None if time_s is None else found["median_probe_time_s"] / time_s
        results[name] = found
        print(
            name,
            {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()},
            flush=True,
        )
        if asked.keep and asked.requests:
            kept(asked, results)
    if asked.engine_seeds:
        results["engine"] = engine(asked.engine_seeds, asked.attainment, asked.precision)
        print("engine", results["engine"], flush=True)
    if asked.keep and not asked.requests:
        print(keep("capacity_search", vars(asked), {"servers": results}))


def kept(asked: argparse.Namespace, results: dict[str, Any]) -> None:
    """Keeps the results so far, beside those of other queues that are stored with the same
    settings: a hundred searches take minutes to hours."""
    at = "" if asked.attainment == 0.9 else f"_at_{100 * asked.attainment:g}"
    name = f"capacity_of_{asked.requests}{at}"
    path, same = RESULTS / f"{name}.json", ("attainment", "precision", "first_seed", "by_curve")
    stored = json.loads(path.read_text()) if path.exists() else {"asked": {}, "servers": {}}
    is_same = all(stored["asked"].get(key) == vars(asked)[key] for key in same)
    earlier = stored["servers"] if is_same else {}
    print(keep(name, vars(asked), {"servers": earlier | results}), flush=True)


if __name__ == "__main__":
    main()
