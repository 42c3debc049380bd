"""Speed of the two cores of the simulator, Python and C, on the same requests.

    SLOBENCH_SHARED=../shared python benchmarks/step_core_speed.py [--rounds 3] [--write]

*Cluster*: 8 replicas of 8B on an H200 behind `jsq` serve the Mooncake trace, 8 times as fast,
without a prefix cache, repeated until `--requests` are sent. *Chat*: `slobench simulate` of Poisson
arrivals with chat-like lengths on a single replica, tables included, the plan excluded. *256
running*: requests with answers of 100 to 900 tokens that all arrive at once, 256 of them running.

Figures are per CPU second or minute; the sides alternate in one process. Both must end every
request at the same instant. Exit status 1 where a figure of the compiled core misses its goal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rig.machine import Goal, interleaved, keep, machine_line, show, spread, spreads

from loadgen.lab.compiled_core import core_settings, library
from loadgen.lab.sim_options import SimOptions, sim_options
from loadgen.lab.simulate import record
from loadgen.lab.simulated_engine import build
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from reference_engine.simulator import SimulatedService
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request
from reference_engine.step_core.library import Outcome, Status, Traffic, step_core

SIDES = ("python", "c")
CLUSTER = {"replicas": 8, "router": "jsq", "max_model_len": 131_072, "prefix_cache": False}
RUNNING, CHAT = 256, 10_000


class Arrivals:
    """A client (`simulator.PatientClient`) of requests by arrival (s), prompt and answer."""

    def __init__(
        self, arrived_s: Sequence[float], n_prompt: Sequence[int], n_output: Sequence[int]
    ):
        self._requests = list(zip(arrived_s, n_prompt, n_output, strict=True))
        self._next = 0
        self.done_s = [math.nan] * len(self._requests)

    @property
    def is_closed(self) -> bool:
        return self._next >= len(self._requests)

    def next_s(self) -> float | None:
        return None if self.is_closed else self._requests[self._next][0]

    def quiet_until_s(self) -> float:
        return math.inf if self.is_closed else self._requests[self._next][0]

    def act(self, engine: SimulatedService) -> None:
        while not self.is_closed and self._requests[self._next][0] <= engine.now_s:
            arrived_s, n_prompt, n_output = self._requests[self._next]
            engine.submit(Request(str(self._next), [1] * n_prompt, n_output, arrived_s))
            self._next += 1

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        for request in events.ends:
            self.done_s[int(request.id)] = engine.now_s

    def refuse(self, request: Request, error: AdmissionError) -> None:
        self.done_s[int(request.id)] = math.nan


def in_python(options: SimOptions, *columns: np.ndarray) -> tuple[float, int, list[float]]:
    """CPU seconds, steps, and the instants at which the requests ended."""
    engine, client = build(options, False), Arrivals(*(column.tolist() for column in columns))
    began_s = time.process_time()
    engine.simulator.run(client)
    took_s = time.process_time() - began_s
    n_steps = sum(replica.totals.steps for replica in engine.simulator.replicas)
    return took_s, n_steps, client.done_s


def compiled(options: SimOptions, *columns: np.ndarray) -> tuple[float, int, list[float]]:
    arrived_s, n_prompt, n_output = columns
    engines, router = core_settings(build(options, False), options.cluster)
    rng = np.random.default_rng(options.cluster.router_seed)
    began_s = time.process_time()
    traffic = Traffic(arrived_s, n_prompt, n_output, n_output, has_times=False)
    with step_core(library(), traffic, engines, router, rng) as core:
        assert core.run(1 << 62) is Status.done
        n_steps = sum(total.n_steps for total in core.totals())
    took_s = time.process_time() - began_s
    is_refused = traffic.outcome == Outcome.refused
    return took_s, n_steps, np.where(is_refused, math.nan, traffic.done_s).tolist()


def trace(path: Path, n: int, speedup: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals (s), prompts and answers (tokens) of a trace that is repeated end to end."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    at_s = np.array([line["timestamp"] for line in lines]) / 1000 / speedup
    lap, k = np.divmod(np.arange(n), len(lines))
    lengths = np.array([(line["input_length"], max(1, line["output_length"])) for line in lines])
    arrived_s = at_s[k] + lap * (at_s[-1] + 1.0 / speedup)
    return arrived_s, lengths[k, 0].astype(np.int32), lengths[k, 1].astype(np.int32)


def chat_scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate": "10/s"},
            "requests": {
                "input_tokens": {"kind": "lognormal", "median": 400, "sigma": 1.0, "max": 8000},
                "output_tokens": {"kind": "lognormal", "median": 150, "sigma": 0.8, "max": 2000},
            },
            "phases": {"measure": f"{CHAT / 10}s"},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000, help="of the cluster")
    parser.add_argument("--long", type=int, default=0, help="so many of the cluster, C alone")
    parser.add_argument("--write", action="store_true", help="keep the result")
    chosen = parser.parse_args()
    shared = Path(os.environ.get("SLOBENCH_SHARED", "../shared"))
    path = shared / "traces" / "mooncake_synthetic_trace.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is not there (set SLOBENCH_SHARED to the folder with traces/)")
    print(machine_line())
    cluster, scenario = trace(path, chosen.requests, 8.0), chat_scenario()
    plan, quiet, n = make_plan(scenario), Console(quiet=True), 40 * RUNNING
    answers = np.random.default_rng(1).integers(100, 901, n).astype(np.int32)
    crowd = (np.zeros(n), np.full(n, 200, np.int32), answers)
    ends = defaultdict[str, list[object]](list)
    rounds = defaultdict[str, list[dict[str, float]]](list)

    def measure(side: str, _: int) -> None:
        run: Callable[..., tuple[float, int, list[float]]]
        run = in_python if side == "python" else compiled
        took_s, _, done_s = run(sim_options(CLUSTER), *cluster)
        crowd_s, n_steps, crowd_done_s = run(sim_options({"max_num_seqs": RUNNING}), *crowd)
        options = sim_options({"core": "python" if side == "python" else "auto"})
        began_s = time.process_time()
        recorded = record(scenario, plan, options, quiet)
        chat_s = time.process_time() - began_s
        ends[side].append((done_s, crowd_done_s, recorded.chunk_rows["received_s"].tolist()))
        rounds[side].append(
            {
                "cluster, requests/min": 60 * chosen.requests / took_s,
                "256 running, steps/s": n_steps / crowd_s,
                "chat, requests/min": 60 * len(plan.schedule) / chat_s,
            }
        )

    interleaved(chosen.rounds, SIDES, measure)
    assert repr(ends["python"]) == repr(ends["c"]), "the cores differ"
    table = {side: spreads(rounds[side]) for side in SIDES}
    show("per CPU second or minute", list(SIDES), table)
    ratios = {
        name: spread(
            [c[name] / py[name] for c, py in zip(rounds["c"], rounds["python"], strict=True)]
        )
        for name in rounds["c"][0]
    }
    show("C in relation to Python, round by round", ["ratio"], {"ratio": ratios}, digits=4)
    if chosen.long:
        took_s, *_ = compiled(sim_options(CLUSTER), *trace(path, chosen.long, 8.0))
        print(f"\n{chosen.long} requests of the cluster: {60 * chosen.long / took_s:,.0f}/min")
    median = {name: figures["median"] for name, figures in table["c"].items()}
    goals = [
        Goal("cluster, requests/min", median["cluster, requests/min"], 1e6, is_floor=True),
        Goal("256 running, steps/s", median["256 running, steps/s"], 2e5, is_floor=True),
    ]
    for goal in goals:
        print(goal)
    if chosen.write:
        asked = {"rounds": chosen.rounds, "requests": chosen.requests, "chat": CHAT}
        found = {"sides": table, "ratios": ratios, "goals": [goal.to_json() for goal in goals]}
        print(keep("step_core_speed", asked, found))
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
