"""Measures `slobench capacity --budget` end to end on simulated engines of known capacity.

    python benchmarks/capacity_budget.py [--seeds 10] [--budget 150] [--attainment 0.9] [--keep]

Each search is all of `slobench capacity` with the scenario capacity_search as it is (5 requests per
second, 15 s of warm-up), in virtual time. The true capacity is the crossing of two draws of 10 000
requests. `bracketed` counts the searches that saw both sides of the target.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from capacity_search import answer_of
from rig.machine import keep, machine_line

from loadgen.lab.simulate import simulate
from loadgen.measure.aggregate import summarize
from loadgen.studies.capacity.result import Capacity
from loadgen.studies.modes.seed_capacity import Tried, capacity_of, next_level
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import load_scenario

ENGINES: dict[str, Mapping[str, Any]] = {
    "8b on h100, 8 sequences": {"shape": "8b", "hardware": "h100", "max_num_seqs": 8},
    "8b on h200": {"shape": "8b", "hardware": "h200"},
    "8b on a100, prefill first": {"shape": "8b", "hardware": "a100", "mode": "prefill_first"},
    "tiny on cpu": {"shape": "tiny", "hardware": "cpu"},
}
_DRAWS, _LONG, _WARM = 2, 10_000, 1_000


def truth_of_draw(engine: str, target: float, number: int) -> float:
    """The capacity for a long draw."""
    scenario = load_scenario("capacity_search", ["stop_when=never"])
    tried: list[Tried] = []
    while (level := next_level(tried, target, 10.0)) is not None:
        at_level = scaled(scenario, level, "rate")
        probing = with_window(at_level, _WARM / level, _LONG / level, 10**6 + number)
        summary = summarize(simulate(probing, **ENGINES[engine]))
        n_due = summary.counts["due"]
        tried.append(Tried(level, n_due, round(n_due * (summary.attainment.value or 0.0))))
    return capacity_of(tried, target).value


def answer(engine: str, target: float, budget_s: float, seed: int) -> Capacity:
    scenario = load_scenario("capacity_search")
    return answer_of(scenario, seed, ENGINES[engine], attainment=target, budget_s=budget_s)


def measured(engine: str, target: float, budget_s: float, n_seeds: int) -> dict[str, Any]:
    with ProcessPoolExecutor() as pool:
        draws = pool.map(
            truth_of_draw, *zip(*[(engine, target, k) for k in range(_DRAWS)], strict=True)
        )
        logs = [math.log(value) for value in draws]
        tasks = [(engine, target, budget_s, 100 + seed) for seed in range(n_seeds)]
        answers = list(pool.map(answer, *zip(*tasks, strict=True)))
    truth = math.exp(statistics.fmean(logs))
    found = [(a.low, a.value, a.high) for a in answers if a.value and a.low and a.high]
    return {
        "capacity_per_s": truth,
        "searches": n_seeds,
        "bracketed": len(found),
        "covered": sum(low <= truth <= high for low, _, high in found),
        "median_half_width": statistics.median((h - low) / 2 / v for low, v, h in found),
        "rms_error": math.sqrt(statistics.fmean((v / truth - 1) ** 2 for _, v, _ in found)),
        "median_probes": statistics.median(len(a.probes) for a in answers),
        "median_spent_s": statistics.median(a.spent_s for a in answers),
        "most_spent_s": max(a.spent_s for a in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=150.0)
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    print(machine_line())
    engines = {}
    for name in ENGINES:
        engines[name] = measured(name, asked.attainment, asked.budget, asked.seeds)
        print(name, engines[name], flush=True)
    if asked.keep:
        print(keep("capacity_budget", vars(asked), {"engines": engines}))


if __name__ == "__main__":
    main()
