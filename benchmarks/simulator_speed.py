"""Speed of the simulated engine in virtual time.

    python benchmarks/simulator_speed.py [--rounds 3] [--before DIRECTORY] [--write]

*N running*: a closed loop keeps N requests running, each with a prompt of 200 tokens, and answers
of 100 to 900 (short) or 2000 to 6000 tokens (long); the figure is engine steps per CPU second.
*Chat*: `slobench simulate` on Poisson arrivals with chat-like lengths; the figure is requests per
CPU minute, plan and tables included.

Each measurement is a process of its own. `--before` is a checkout of another version: its runs
alternate with those of this version, and the ratios of rounds are printed. Exit status 1 where a
ratio misses its goal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rig.machine import Goal, interleaved, keep, machine_line, show, spread, spreads

from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulated_engine import build
from loadgen.lab.virtual_client import VirtualClient
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from reference_engine.state.sequence import Request

if TYPE_CHECKING:  # a version before may lack them
    from reference_engine.simulator import SimulatedService
    from reference_engine.state.batch import StepTokens
    from reference_engine.state.plan import AdmissionError

ROOT = Path(__file__).parent.parent
RUNNING, CHAT = (16, 256), 10_000
ANSWERS = {"short": (100, 900), "long": (2000, 6000)}
FLOOR = {16: 5.0, 256: 9.0}  # times the version before, long answers
_N_STEPS = 20_000  # of the closed loop, about


class Users:
    """A closed loop (`simulator.PatientClient`): each answer is followed by the next request of its
    user at once, until `n` requests are sent."""

    def __init__(self, n_users: int, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._free, self._next = n_users, 0

    @property
    def is_closed(self) -> bool:
        return self._next >= len(self._lengths)

    def next_s(self) -> float | None:
        return None

    def quiet_until_s(self) -> float:
        return math.inf

    def act(self, engine: SimulatedService) -> None:
        while self._free and not self.is_closed:
            request = Request(f"q{self._next}", [1] * 200, self._lengths[self._next], engine.now_s)
            engine.submit(request)
            self._next += 1
            self._free -= 1

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        self._free += len(events.ends)

    def refuse(self, request: Request, error: AdmissionError) -> None:
        raise AssertionError(f"{request.id} was refused: {error}")


def steps_per_s(n_running: int, least: int, most: int) -> float:
    simulated = build(sim_options({"max_num_seqs": n_running}), is_sharing=False)
    n = math.ceil(2 * n_running * _N_STEPS / (least + most))
    client = Users(n_running, np.random.default_rng(1).integers(least, most + 1, n).tolist())
    began_s = time.process_time()
    simulated.simulator.run(client)
    took_s = time.process_time() - began_s
    return sum(r.state.counters.steps for r in simulated.simulator.replicas) / took_s


def requests_per_min() -> float:
    scenario = Scenario.model_validate(
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
    began_s = time.process_time()
    plan = make_plan(scenario)
    simulated = build(sim_options({}), is_sharing=False)
    client = VirtualClient(scenario, plan)
    simulated.simulator.run(client)
    client.tables()
    return 60 * len(plan.schedule) / (time.process_time() - began_s)


def measured(root: Path) -> dict[str, float]:
    """The figures of a checkout."""
    command = [sys.executable, "-P", __file__, "--measure"]
    environ = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        command, cwd=root, env=environ, check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="a checkout of the version before")
    parser.add_argument("--write", action="store_true", help="keep the result")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        figures = {
            f"{n} running, {answers} answers, steps/s": steps_per_s(n, *lengths)
            for n in RUNNING
            for answers, lengths in ANSWERS.items()
        }
        print(json.dumps({**figures, "chat, requests/min": requests_per_min()}))
        return 0
    print(machine_line())
    roots = {"now": ROOT, **({"before": chosen.before} if chosen.before else {})}
    rounds = defaultdict[str, list[dict[str, float]]](list)
    interleaved(
        chosen.rounds, list(roots), lambda side, _: rounds[side].append(measured(roots[side]))
    )
    table = {side: spreads(rounds[side]) for side in roots}
    show("per CPU second or minute", list(roots), table)
    goals: list[Goal] = []
    ratios: dict[str, dict[str, float]] = {}
    if chosen.before:
        for name in rounds["now"][0]:
            pairs = zip(rounds["now"], rounds["before"], strict=True)
            ratios[name] = spread([now[name] / before[name] for now, before in pairs])
        show("now in relation to before, round by round", ["ratio"], {"ratio": ratios}, digits=4)
        for n, floor in FLOOR.items():
            name = f"{n} running, long answers, steps/s"
            goals.append(Goal(f"{name}, × before", ratios[name]["median"], floor, is_floor=True))
    for goal in goals:
        print(goal)
    if chosen.write:
        asked = {"rounds": chosen.rounds, "chat": CHAT, "before": bool(chosen.before)}
        found = {"sides": table, "ratios": ratios, "goals": [goal.to_json() for goal in goals]}
        print(keep("simulator_speed", asked, found))
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
