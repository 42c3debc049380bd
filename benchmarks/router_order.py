"""The order of routers by p99 TPOT, in simulation and over HTTP behind existing routers.

    python benchmarks/router_order.py [--program litellm=PATH] [--schedules 3] [--out DIR] [--write]

Four replicas simulated in real time (a step takes at least 20 ms) serve the same requests behind
each router that is installed. Each policy is also simulated in virtual time, under 20 schedules.
Two policies are a pair to compare if the 95 % intervals of their mean p99 TPOT do not overlap in
simulation; over HTTP, the mean p99 TPOT must then have the same order for every two routers with
these policies. Finished runs in `--out` are kept: the same command continues, `--most 5` stops
after five runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rig.fleet import COSTS, KEY, ROUTERS, Router, in_front, installed, measured_on, replicas
from rig.machine import RESULTS, machine
from scipy.stats import t as student

from loadgen.archive.store import read_run
from loadgen.lab.simulate import simulate
from loadgen.records import Phase, Run, Status
from loadgen.workload.scenario import Scenario, load_scenario

N_REPLICAS = 4
N_SIMULATED = 20
LEAST_TOKENS = 10
SCENARIO = """\
# Open traffic for a few slow replicas: a batch of five takes 36 ms a step.
schema: 1
name: router_order
seed: SEED
arrivals: {kind: poisson, rate: 6/s}
requests:
  input_tokens: {kind: lognormal, median: 150, sigma: 0.8, min: 8, max: 1500}
  output_tokens: {kind: lognormal, median: 48, sigma: 0.8, min: 10, max: 400}
phases: {warmup: 5s, measure: 45s, drain: 30s}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--schedules", type=int, default=3)
    parser.add_argument("--most", type=int, default=1000, help="runs over HTTP in this call")
    parser.add_argument("--out", type=Path, default=Path("runs") / "router_order")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    hardware = out / "known.yaml"
    hardware.write_text(COSTS)
    programs = installed({k: Path(v) for k, _, v in (w.partition("=") for w in options.program)})
    routers = [router for router in ROUTERS.values() if router.program in programs]
    left: int = options.most
    for seed in range(1, options.schedules + 1):
        for router in routers:
            place = out / f"{router.name.replace(' ', '-')}-{seed}"
            if not (place / "run" / "summary.json").is_file() and left > 0:
                left -= 1
                over_http(router, programs[router.program], hardware, seed, place)
    simulated = {
        policy: [p99_tpot_s(virtual(policy, hardware, 100 + k, out)) for k in range(N_SIMULATED)]
        for policy in dict.fromkeys(router.simulated for router in routers)
    }
    measured: dict[str, list[float]] = {}
    kept_runs: list[Path] = []
    for router in routers:
        places = (
            out / f"{router.name.replace(' ', '-')}-{k}" for k in range(1, options.schedules + 1)
        )
        runs = [p / "run" for p in places if (p / "run" / "summary.json").is_file()]
        measured[router.name] = [p99_tpot_s(read_run(run)) for run in runs]
        kept_runs += runs
    result = judged(routers, simulated, measured)
    print_result(result)
    if options.write:
        content = {
            **measured_on(kept_runs),
            "machine": machine(),
            "costs": COSTS,
            "scenario": SCENARIO,
            **result,
        }
        (RESULTS / "router_order.json").write_text(json.dumps(content, indent=1) + "\n")


def scenario(seed: int, directory: Path) -> Path:
    path = directory / f"scenario-{seed}.yaml"
    path.write_text(SCENARIO.replace("SEED", str(seed)))
    return path


def over_http(router: Router, program: Path, hardware: Path, seed: int, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    print(f"{router.name}, schedule {seed}", flush=True)
    target = place / "target.yaml"
    with (
        replicas(N_REPLICAS, hardware, place / "replicas", ["prefix_cache=false"]) as urls,
        in_front(router, program, urls, place) as (url, environ),
    ):
        target.write_text(f"url: {url}\nmodel: tiny\napi_key_env: {KEY}\n")
        words = ["run", scenario(seed, place), "--target", target, "--out", place / "run"]
        words += ["--force", "--no-scrape"]
        done = subprocess.run(
            [sys.executable, "-m", "loadgen", *map(str, words)],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, 1, 3):
        sys.exit(f"{router.name}: slobench run: {done.returncode}\n{done.stderr}")


def virtual(policy: str, hardware: Path, seed: int, directory: Path) -> Run:
    chosen: Scenario = load_scenario(scenario(seed, directory))
    return simulate(
        chosen, hardware=str(hardware), shape="tiny", replicas=str(N_REPLICAS), router=policy
    )


def p99_tpot_s(run: Run) -> float:
    """Of the requests of the measured window with at least ten output tokens."""
    rows = run.request_rows
    is_counted = (run.schedule_rows["phase"] == Phase.measure) & (rows["status"] == Status.ok)
    n_failed = int(((run.schedule_rows["phase"] == Phase.measure) & ~is_counted).sum())
    assert n_failed <= 0.01 * len(rows), f"{n_failed} of {len(rows)} requests failed"
    rows = rows[is_counted & (rows["output_tokens"] >= LEAST_TOKENS)]
    tpot_s = (rows["last_token_s"] - rows["first_token_s"]) / (rows["output_tokens"] - 1)
    return float(np.quantile(tpot_s, 0.99))


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean."""
    n, mean = len(values), float(np.mean(values))
    half = float(student.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else np.inf
    return mean, mean - half, mean + half


def judged(
    routers: list[Router], simulated: dict[str, list[float]], measured: dict[str, list[float]]
) -> dict[str, Any]:
    """The means, and for each pair of routers whose simulated intervals do not overlap, whether the
    order over HTTP is the same."""
    of_policy = {policy: interval(values) for policy, values in simulated.items()}
    pairs = []
    for first, second in itertools.combinations(routers, 2):
        a, b = of_policy[first.simulated], of_policy[second.simulated]
        if not (a[1] > b[2] or b[1] > a[2]) or not (measured[first.name] and measured[second.name]):
            continue
        slow, fast = (first, second) if a[0] > b[0] else (second, first)
        slow_s, fast_s = measured[slow.name], measured[fast.name]
        pairs.append(
            {
                "slower": slow.name,
                "faster": fast.name,
                "simulated_ratio": of_policy[slow.simulated][0] / of_policy[fast.simulated][0],
                "http_ratio": float(np.mean(slow_s) / np.mean(fast_s)),
                "http_ratio_by_schedule": [x / y for x, y in zip(slow_s, fast_s, strict=False)],
            }
        )
    return {
        "simulated_s": {policy: list(values) for policy, values in of_policy.items()},
        "http_s": measured,
        "pairs": pairs,
    }


def print_result(result: dict[str, Any]) -> None:
    print("p99 TPOT in simulation, mean over schedules with its 95 % interval:")
    for policy, (mean, low, high) in result["simulated_s"].items():
        print(f"  {policy:24} {mean * 1e3:6.1f} ms [{low * 1e3:.1f}, {high * 1e3:.1f}]")
    print("over HTTP, by schedule:")
    for name, values in result["http_s"].items():
        shown = ", ".join(f"{value * 1e3:.1f}" for value in values)
        print(f"  {name:24} {shown} ms")
    n_equal = sum(pair["http_ratio"] > 1 for pair in result["pairs"])
    print(f"{n_equal} of {len(result['pairs'])} pairs have the same order over HTTP:")
    for pair in result["pairs"]:
        word = "same" if pair["http_ratio"] > 1 else "OTHER ORDER"
        print(
            f"  {pair['slower']:24} > {pair['faster']:24} simulated × "
            f"{pair['simulated_ratio']:.2f}, over HTTP × {pair['http_ratio']:.2f} ({word})"
        )


if __name__ == "__main__":
    main()
