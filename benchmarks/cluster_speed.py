"""Speed of the simulator of a cluster: 8 replicas of 8B on an H200 serve a Mooncake trace, repeated
end to end.

    SLOBENCH_SHARED=../shared python benchmarks/cluster_speed.py [--requests 20000] [--speedup 8]

Prints simulated requests per minute of real time. Blocks of 512 tokens that the trace repeats are
equal in the simulation, too, and so hit the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.lab.simulated_engine import build, sim_options
from reference_engine.simulator import SimulatedService
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request

HASHED_TOKENS = 512  # tokens per hash id of the trace


class Trace:
    """A client (`simulator.PatientClient`) that submits the requests of a trace, repeated until `n`
    are sent."""

    def __init__(self, lines: Sequence[dict[str, Any]], n: int, speedup: float) -> None:
        self._lines, self._n, self._speedup = lines, n, speedup
        stamps = [line["timestamp"] / 1000 for line in lines]
        self._at_s = np.array(stamps) / speedup
        self._period_s = float(self._at_s[-1]) + 1.0 / speedup
        self._next = 0
        self.n_ended = self.n_refused = 0

    @property
    def is_closed(self) -> bool:
        return self._next >= self._n

    def next_s(self) -> float | None:
        if self.is_closed:
            return None
        lap, k = divmod(self._next, len(self._lines))
        return float(self._at_s[k]) + lap * self._period_s

    def quiet_until_s(self) -> float:
        next_s = self.next_s()
        return math.inf if next_s is None else next_s

    def act(self, engine: SimulatedService) -> None:
        while (at_s := self.next_s()) is not None and at_s <= engine.now_s:
            try:
                engine.submit(self._request(at_s))
            except AdmissionError as error:
                self.refuse(None, error)
            self._next += 1

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        self.n_ended += len(events.ends)

    def refuse(self, request: Request | None, error: AdmissionError) -> None:
        self.n_refused += 1

    def _request(self, at_s: float) -> Request:
        line = self._lines[self._next % len(self._lines)]
        tokens = list(chain.from_iterable(repeat(k, HASHED_TOKENS) for k in line["hash_ids"]))
        del tokens[line["input_length"] :]
        return Request(f"q{self._next}", tokens, max(1, line["output_length"]), at_s)


def requests_per_minute(
    path: Path, n: int, speedup: float, engine: dict[str, object]
) -> tuple[float, dict[str, float]]:
    """Simulated requests per minute of CPU time, and counts of the simulation."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    simulated = build(sim_options(engine), is_sharing=True)
    client = Trace(lines, n, speedup)
    began_s = time.process_time()
    simulated.simulator.run(client)
    took_s = time.process_time() - began_s
    n_steps = sum(r.state.counters.steps for r in simulated.simulator.replicas)
    counts = {
        "ended": client.n_ended,
        "refused": client.n_refused,
        "steps": n_steps,
        "simulated_s": simulated.simulator.now_s,
        "steps_per_s": n_steps / took_s,
    }
    return 60 * n / took_s, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--speedup", type=float, default=8.0)
    parser.add_argument("--router", default="jsq")
    parser.add_argument("--block-tokens", type=int, default=16)
    arguments = parser.parse_args()
    shared = Path(os.environ.get("SLOBENCH_SHARED", "../shared"))
    path = shared / "traces" / "mooncake_synthetic_trace.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is not there (set SLOBENCH_SHARED to the folder with traces/)")
    settings = {
        "replicas": 8,
        "router": arguments.router,
        "max_model_len": 131_072,
        "block_tokens": arguments.block_tokens,
    }
    rate, counts = requests_per_minute(path, arguments.requests, arguments.speedup, settings)
    print(f"{rate:,.0f} requests/min; {counts}")  # the output of this script


if __name__ == "__main__":
    main()
