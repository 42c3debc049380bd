"""The number of replicas that `slobench size` returns, checked on real-time simulated replicas.

    python benchmarks/size_replicas.py [--runs 20] [--window 120] [--jobs 4] [--out DIR] [--write]

The capacity of a replica is searched in virtual time. `slobench size` then computes N for a peak of
(replicas - 0.4) times this capacity, without headroom and without failures. N replicas behind
HAProxy, and one less, serve the peak in real time under schedules that neither the search nor the
sizing used; a step takes at least 20 ms. The same schedules are also simulated in virtual time.
Targets: N keeps the SLO in 19 of 20 runs, N - 1 misses it in 15. A short window holds few busy
periods, so that N - 1 keeps the SLO by chance more often. Finished runs in `--out` are kept: the
same command continues, `--most 10` stops after ten, `--most 0` simulates only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rig.fleet import COSTS, KEY, ROUTERS, in_front, installed, measured_on, replicas
from rig.machine import RESULTS, machine

from loadgen.archive.store import read_run
from loadgen.lab.simulate import simulate
from loadgen.studies.size.run import attainment
from loadgen.workload.scenario import load_scenario

ROUTER = ROUTERS["haproxy leastconn"]
LEAST_KEPT, LEAST_MISSED = 0.95, 0.75  # of the runs
TARGET = 0.9
SCENARIO = """\
# Open traffic with an SLO that a replica of 20 ms steps keeps for a batch of about eight.
schema: 1
name: size_replicas
seed: SEED
arrivals: {kind: poisson, rate: RATE/s}
requests:
  input_tokens: {kind: lognormal, median: 150, sigma: 0.8, min: 8, max: 1500}
  output_tokens: {kind: lognormal, median: 48, sigma: 0.8, min: 10, max: 400}
phases: {warmup: 5s, measure: WINDOWs, drain: 30s}
slo: [ttft <= 400ms, tpot <= 45ms]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3, help="N, for a peak of N - 0.4")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--window", type=int, default=120, help="seconds measured in a run")
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    parser.add_argument("--most", type=int, default=1000, help="runs in this call")
    parser.add_argument("--out", type=Path, default=Path("runs") / "size_replicas")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    hardware = out / "known.yaml"
    hardware.write_text(COSTS)
    program = installed({}).get(ROUTER.program)
    if program is None:
        sys.exit(f"{ROUTER.program} is not installed")
    window_s: int = options.window
    capacity = searched(hardware, out)
    peak_per_s = (options.replicas - 0.4) * capacity["value"]
    size = sized(peak_per_s, hardware, out)
    n = size["n_serving"]
    if n is None or n < 2:
        sys.exit(f"size returned {n} replicas; a check needs at least 2")
    numbers = [(k, seed) for seed in range(1, options.runs + 1) for k in (n, n - 1)]
    places = {(k, seed): out / f"{k}-replicas-{window_s}s-{seed}" for k, seed in numbers}
    paths = {}
    for key, place in places.items():
        place.mkdir(parents=True, exist_ok=True)
        path = place / "scenario.yaml"
        paths[key] = scenario(peak_per_s, 5000 + key[1], window_s, path)
    missing = [key for key in numbers if not (places[key] / "run" / "summary.json").is_file()]
    with ThreadPoolExecutor(options.jobs) as pool:
        for _ in pool.map(
            lambda key: over_http(key[0], paths[key], hardware, program, places[key]),
            missing[: options.most],
        ):
            pass
    shares: dict[int, list[float]] = {n: [], n - 1: []}
    simulated: dict[int, list[float]] = {n: [], n - 1: []}
    kept_runs = []
    for key, place in places.items():
        simulated[key[0]].append(virtual(key[0], paths[key], hardware))
        if (place / "run" / "summary.json").is_file():
            kept_runs.append(place / "run")
            shares[key[0]].append(attainment(read_run(place / "run")))
    result = {
        "capacity_per_s": capacity,
        "peak_per_s": peak_per_s,
        "n_divided": size["n_divided"],
        "n": n,
        "target": TARGET,
        "window_s": window_s,
        "attainments": {str(k): values for k, values in shares.items()},
        "simulated_attainments": {str(k): values for k, values in simulated.items()},
    }
    is_met = print_result(n, capacity, peak_per_s, shares)
    for k, values in simulated.items():
        n_kept = sum(share >= TARGET for share in values)
        print(f"  {k} replicas in virtual time: SLO kept under {n_kept} of {len(values)} schedules")
    if options.write:
        content = {
            **measured_on(kept_runs),
            "machine": machine(),
            "jobs": options.jobs,
            "router": ROUTER.name,
            "costs": COSTS,
            "scenario": SCENARIO,
            **result,
        }
        (RESULTS / "size_replicas.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(0 if is_met else 1)


def scenario(rate_per_s: float, seed: int, window_s: int, path: Path) -> Path:
    text = SCENARIO.replace("SEED", str(seed)).replace("RATE", f"{rate_per_s:.6g}")
    text = text.replace("WINDOW", str(window_s))
    path.write_text(text)
    return path


def searched(hardware: Path, out: Path) -> dict[str, float]:
    """The capacity of a replica in virtual time, with its interval; searched once."""
    directory = out / "capacity"
    if not (directory / "capacity.json").is_file():
        words = ["capacity", scenario(2.0, 1, 30, out / "searched.yaml"), "--target", "sim"]
        words += ["--engine", engine(hardware), "--attainment", TARGET, "--budget", "24h"]
        slobench([*words, "--out", directory])
    answer = json.loads((directory / "capacity.json").read_text())["answer"]
    return {key: answer[key] for key in ("low", "value", "high")}


def sized(peak_per_s: float, hardware: Path, out: Path) -> dict[str, Any]:
    words = ["size", scenario(2.0, 1, 30, out / "searched.yaml"), "--capacity", out / "capacity"]
    words += ["--peak", f"{peak_per_s:.6g}/s", "--headroom", "0%", "--survive", 0]
    words += ["--router", ROUTER.simulated, "--attainment", TARGET, "--out", out / "size"]
    slobench(words)
    found: dict[str, Any] = json.loads((out / "size" / "size.json").read_text())
    return found


def engine(hardware: Path) -> str:
    return f"shape=tiny,hardware={hardware},prefix_cache=false"


def over_http(n: int, path: Path, hardware: Path, program: Path, place: Path) -> None:
    print(place.name, flush=True)
    target = place / "target.yaml"
    with (
        replicas(n, hardware, place / "replicas", ["prefix_cache=false"]) as urls,
        in_front(ROUTER, program, urls, place) as (url, environ),
    ):
        target.write_text(f"url: {url}\nmodel: tiny\napi_key_env: {KEY}\n")
        words = ["run", path, "--target", target, "--out", place / "run", "--force", "--no-scrape"]
        slobench(words, environ)


def virtual(n: int, path: Path, hardware: Path) -> float:
    """The attainment of the same schedule in virtual time."""
    run = simulate(
        load_scenario(path),
        hardware=str(hardware),
        shape="tiny",
        prefix_cache="false",
        replicas=str(n),
        router=ROUTER.simulated,
    )
    return attainment(run)


def slobench(words: list[Any], environ: Mapping[str, str] | None = None) -> None:
    """Runs a verb; exit codes of verdicts are no failure."""
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", *map(str, words)],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1, 3):
        raise RuntimeError(f"slobench {words}: {done.returncode}\n{done.stderr}")


def print_result(
    n: int, capacity: dict[str, float], peak_per_s: float, shares: dict[int, list[float]]
) -> bool:
    """The attainment of each run; whether both targets are met."""
    print(
        f"capacity of a replica {capacity['value']:.3f} req/s [{capacity['low']:.3f}, "
        f"{capacity['high']:.3f}]; peak {peak_per_s:.3f} req/s; size: {n} replicas"
    )
    for k, values in shares.items():
        n_kept = sum(share >= TARGET for share in values)
        shown = ", ".join(f"{100 * share:.1f}" for share in values)
        print(f"  {k} replicas: SLO kept in {n_kept} of {len(values)} runs; met by {shown} %")
    is_kept = bool(shares[n]) and sum(s >= TARGET for s in shares[n]) >= LEAST_KEPT * len(shares[n])
    is_missed = bool(shares[n - 1]) and sum(s < TARGET for s in shares[n - 1]) >= (
        LEAST_MISSED * len(shares[n - 1])
    )
    return is_kept and is_missed


if __name__ == "__main__":
    main()
