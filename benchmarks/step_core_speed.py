"""Speed of the two cores of the simulator, Python and C, on the same requests.

    SLOBENCH_SHARED=../shared python benchmarks/step_core_speed.py [--rounds 3] [--write]

*Cluster*: 8 replicas of 8B on an H200 behind `jsq` serve the Mooncake trace, 8 times as fast,
repeated until `--requests` are sent, without accounts; with prefix caches (each lap has texts of
its own) and without. *Chat*: `slobench simulate` of Poisson arrivals with chat-like lengths on a
single replica, tables included, the plan excluded. *Dialogue*: the same for sessions of up to
eight turns with prefix caches. *256 running*: requests with answers of 100 to 900 tokens that all
arrive at once, 256 of them running.

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
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rig.machine import Goal, interleaved, keep, machine_line, show, spread, spreads

from loadgen.lab.compiled_core import core_settings, library
from loadgen.lab.sim_options import SimOptions, sim_options
from loadgen.lab.simulate import record
from loadgen.lab.simulated_engine import build
from loadgen.records import FIRST_PIECE, NO_PIECES, PIECES
from loadgen.workload.pieces import PieceTree, repeated
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from reference_engine.simulator import SimulatedService
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.run_keys import RunKeys, run_digest
from reference_engine.state.sequence import Request
from reference_engine.step_core.library import Outcome, SharedTexts, Status, Traffic, step_core

SIDES = ("python", "c")
CLUSTER = {"replicas": 8, "router": "jsq", "max_model_len": 131_072}
RUNNING, CHAT, DIALOGUES = 256, 10_000, 1_000
_OWN = 1 << 40  # the number of the text that only request 0 has
_HASH_TOKENS = 512  # of a block of the trace


class Columns:
    """Requests by arrival (s), prompt and answer (tokens); the first `n_shared` tokens of a prompt
    are those of the `pieces` up to `prefix_id`."""

    def __init__(self, *columns: np.ndarray) -> None:
        self.arrived_s, self.n_prompt, self.n_output = columns[:3]
        self.prefix_id, self.n_shared, self.pieces = columns[3:]
        self.tree = PieceTree(self.pieces)


class Arrivals:
    """A client (`simulator.PatientClient`) of requests by arrival (s), prompt and answer."""

    def __init__(self, traffic: Columns, block_tokens: int | None) -> None:
        columns = (traffic.arrived_s, traffic.n_prompt, traffic.n_output)
        self._requests = list(zip(*(column.tolist() for column in columns), strict=True))
        self._traffic, self._block_tokens = traffic, block_tokens
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
            request = Request(str(self._next), [1] * n_prompt, n_output, arrived_s)
            if self._block_tokens is not None:
                request.chain = self._keys(self._next, n_prompt, self._block_tokens)
            engine.submit(request)
            self._next += 1

    def _keys(self, row: int, n_prompt: int, block_tokens: int) -> RunKeys:
        """The keys of a prompt's blocks, as `lab.prompt_ids` makes them."""
        n_shared = int(self._traffic.n_shared[row])
        spans = self._traffic.tree.path(int(self._traffic.prefix_id[row]), n_shared)
        starts, digests, before = list[int](), list[bytes](), b"0"
        for text, start, _ in spans:
            before = run_digest(before, text)
            starts.append(start // block_tokens)
            digests.append(before)
        own = run_digest(before, _OWN + row)
        starts.append(n_shared // block_tokens)
        return RunKeys(starts, [*digests, own], n_prompt // block_tokens)

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        for request in events.ends:
            self.done_s[int(request.id)] = engine.now_s

    def refuse(self, request: Request, error: AdmissionError) -> None:
        self.done_s[int(request.id)] = math.nan


def in_python(options: SimOptions, traffic: Columns) -> tuple[float, int, list[float]]:
    """CPU seconds, steps, and the instants at which the requests ended."""
    engine = build(options, False)
    kv = engine.simulator.replicas[0].state.kv
    client = Arrivals(traffic, kv.block_tokens if kv.prefix_cache else None)
    began_s = time.process_time()
    engine.simulator.run(client)
    took_s = time.process_time() - began_s
    n_steps = sum(replica.totals.steps for replica in engine.simulator.replicas)
    return took_s, n_steps, client.done_s


def compiled(options: SimOptions, columns: Columns) -> tuple[float, int, list[float]]:
    engines, router = core_settings(build(options, False), options.cluster)
    rng = np.random.default_rng(options.cluster.router_seed)
    texts, n = None, len(columns.arrived_s)
    began_s = time.process_time()
    if len(columns.pieces):
        tenant = np.zeros(n, np.uint32)
        after, tokens = columns.pieces["after"], columns.pieces["tokens"]
        texts = SharedTexts(
            *(tenant, columns.prefix_id, columns.n_shared),
            first_piece=FIRST_PIECE,
            after=after,
            tokens=tokens,
        )
    lengths = (columns.n_prompt, columns.n_output, columns.n_output)
    traffic = Traffic(columns.arrived_s, *lengths, has_times=False, texts=texts)
    with step_core(library(), traffic, engines, router, rng) as core:
        assert core.run(1 << 62) is Status.done
        n_steps = sum(total.n_steps for total in core.totals())
    took_s = time.process_time() - began_s
    is_refused = traffic.outcome == Outcome.refused
    return took_s, n_steps, np.where(is_refused, math.nan, traffic.done_s).tolist()


def trace(path: Path, n: int, speedup: float) -> Columns:
    """A trace that is repeated end to end; each lap has texts of its own."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    at_s = np.array([line["timestamp"] for line in lines]) / 1000 / speedup
    lap, k = np.divmod(np.arange(n), len(lines))
    lengths = np.array([(line["input_length"], max(1, line["output_length"])) for line in lines])
    arrived_s = at_s[k] + lap * (at_s[-1] + 1.0 / speedup)
    number: dict[int, int] = {}  # of a piece, by the hash of its block
    after: list[int] = []
    last: list[tuple[int, int]] = []
    for line in lines:
        before = 0
        n_full = (line["input_length"] - 1) // _HASH_TOKENS
        for text in line["hash_ids"][:n_full]:
            if text not in number:
                number[text] = len(after)
                after.append(before)
            before = FIRST_PIECE + number[text]
        last.append((before, n_full * _HASH_TOKENS))
    pieces = np.zeros(len(after), PIECES)
    pieces["after"], pieces["tokens"] = after, _HASH_TOKENS
    ends = np.array(last, np.int64)
    n_laps = int(lap[-1]) + 1
    prefix_id = np.where(ends[k, 0], ends[k, 0] + lap * len(pieces), 0)
    return Columns(
        arrived_s,
        lengths[k, 0].astype(np.int32),
        lengths[k, 1].astype(np.int32),
        prefix_id.astype(np.uint32),
        ends[k, 1].astype(np.uint32),
        repeated(pieces, n_laps),
    )


def without_texts(arrived_s: np.ndarray, n_prompt: np.ndarray, n_output: np.ndarray) -> Columns:
    nothing = np.zeros(len(arrived_s), np.uint32)
    return Columns(arrived_s, n_prompt, n_output, nothing, nothing, NO_PIECES)


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


def dialogue_scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "dialogue",
            "arrivals": {"kind": "poisson", "rate": "2/s"},
            "requests": {
                "input_tokens": {"kind": "lognormal", "median": 120, "sigma": 0.7, "max": 2000},
                "output_tokens": {"kind": "lognormal", "median": 150, "sigma": 0.6, "max": 600},
                "shared_prefix": {"tokens": 1200},
            },
            "session": {
                "turns": {"kind": "uniform", "min": 2, "max": 8},
                "think": {"kind": "lognormal", "median": "6s", "sigma": 0.8},
                "context": "real",
            },
            "phases": {"measure": f"{DIALOGUES / 2}s"},
        }
    )


SCENARIOS = {"chat": chat_scenario(), "dialogue": dialogue_scenario()}


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
    cluster = trace(path, chosen.requests, 8.0)
    plans = {name: make_plan(of) for name, of in SCENARIOS.items()}
    quiet, n = Console(quiet=True), 40 * RUNNING
    answers = np.random.default_rng(1).integers(100, 901, n).astype(np.int32)
    crowd = without_texts(np.zeros(n), np.full(n, 200, np.int32), answers)
    ends = defaultdict[str, list[object]](list)
    rounds = defaultdict[str, list[dict[str, float]]](list)

    def measure(side: str, _: int) -> None:
        run: Callable[..., tuple[float, int, list[float]]]
        run = in_python if side == "python" else compiled
        figures, done = {}, list[object]()
        for name, is_cached in (("cached", True), ("cluster", False)):
            took_s, _, done_s = run(sim_options({**CLUSTER, "prefix_cache": is_cached}), cluster)
            figures[f"{name}, requests/min"] = 60 * chosen.requests / took_s
            done.append(done_s)
        options = sim_options({"max_num_seqs": RUNNING, "prefix_cache": False})
        crowd_s, n_steps, crowd_done_s = run(options, crowd)
        figures["256 running, steps/s"] = n_steps / crowd_s
        options = sim_options({"core": "python" if side == "python" else "auto"})
        for name, plan in plans.items():
            began_s = time.process_time()
            recorded = record(SCENARIOS[name], plan, options, quiet)
            took_s = time.process_time() - began_s
            figures[f"{name}, requests/min"] = 60 * len(plan.schedule) / took_s
            done.append(recorded.chunk_rows["received_s"].tolist())
        ends[side].append((*done, crowd_done_s))
        rounds[side].append(figures)

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
        options = sim_options({**CLUSTER, "prefix_cache": True})
        took_s, *_ = compiled(options, trace(path, chosen.long, 8.0))
        print(f"\n{chosen.long} cached requests: {60 * chosen.long / took_s:,.0f}/min")
    median = {name: figures["median"] for name, figures in table["c"].items()}
    goals = [
        Goal("cached, requests/min", median["cached, requests/min"], 1e6, is_floor=True),
        Goal("256 running, steps/s", median["256 running, steps/s"], 2e5, is_floor=True),
    ]
    for goal in goals:
        print(goal)
    if chosen.write:
        asked = {"rounds": chosen.rounds, "requests": chosen.requests, "chat": CHAT}
        asked |= {"dialogues": DIALOGUES}
        found = {"sides": table, "ratios": ratios, "goals": [goal.to_json() for goal in goals]}
        print(keep("step_core_speed", asked, found))
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
