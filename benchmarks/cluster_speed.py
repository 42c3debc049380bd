"""Speed of the simulator of a cluster: 8 replicas of 8B on an H200 serve a Mooncake trace, repeated
end to end.

    SLOBENCH_SHARED=../shared python benchmarks/cluster_speed.py [--requests 20000] [--speedup 8]

Prints simulated requests per minute of CPU time. Blocks of 512 tokens that the trace repeats are
equal in the simulation, too, and so hit the prefix cache: their keys are computed once per block of
the trace. `--hash-tokens` hashes the tokens of every request instead, with the same results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import chain as chained
from itertools import repeat
from pathlib import Path
from typing import Any

from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulated_engine import build
from reference_engine.simulator import SimulatedService
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.run_keys import RunKeys, run_digest
from reference_engine.state.sequence import Request

HASHED_TOKENS = 512  # tokens per hash id of the trace
_FIRST_ID = 1 << 20  # token of hash id 0; smaller tokens are a model's output


class BlockKeys:
    """Keys of KV blocks for prompts of hashed blocks, each of which is digested once."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._digests: dict[tuple[bytes, int], bytes] = {}

    def of(self, hash_ids: Sequence[int], n_tokens: int) -> RunKeys:
        """The keys of the full blocks. A hashed block holds a whole number of blocks; of the last,
        which may be shorter, the first keys are used."""
        before, digests, known = b"", list[bytes](), self._digests
        for hash_id in hash_ids:
            digest = known.get((before, hash_id))
            if digest is None:
                digest = known[before, hash_id] = run_digest(before, _FIRST_ID + hash_id)
            digests.append(digest)
            before = digest
        each = HASHED_TOKENS // self._size
        return RunKeys(range(0, each * len(digests), each), digests, n_tokens // self._size)


class Trace:
    """A client (`simulator.PatientClient`) that submits the requests of a trace, repeated until `n`
    are sent. Without `keys`, the engines hash their tokens. `on_end` receives each request that
    has ended."""

    def __init__(
        self,
        lines: Sequence[dict[str, Any]],
        n: int,
        speedup: float,
        keys: BlockKeys | None = None,
        on_end: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._lines, self._n, self._speedup = lines, n, speedup
        self._keys, self._on_end = keys, on_end
        self._at_s = [line["timestamp"] / 1000 / speedup for line in lines]
        self._period_s = self._at_s[-1] + 1.0 / speedup
        self._next, self._next_s = 0, self._at_s[0]
        self.n_ended = self.n_refused = 0

    @property
    def is_closed(self) -> bool:
        return self._next >= self._n

    def next_s(self) -> float | None:
        return None if self._next >= self._n else self._next_s

    def quiet_until_s(self) -> float:
        return math.inf if self._next >= self._n else self._next_s

    def act(self, engine: SimulatedService) -> None:
        while (at_s := self.next_s()) is not None and at_s <= engine.now_s:
            try:
                engine.submit(self._request(at_s))
            except AdmissionError as error:
                self.refuse(None, error)
            self._next += 1
            lap, k = divmod(self._next, len(self._lines))
            self._next_s = self._at_s[k] + lap * self._period_s

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        self.n_ended += len(events.ends)
        for request in events.ends:
            self._on_end(request)

    def refuse(self, request: Request | None, error: AdmissionError) -> None:
        self.n_refused += 1

    def _request(self, at_s: float) -> Request:
        line = self._lines[self._next % len(self._lines)]
        hash_ids, n_tokens = line["hash_ids"], line["input_length"]
        chain: list[bytes] | RunKeys = []
        if self._keys is None:
            tokens = list(
                chained.from_iterable(repeat(_FIRST_ID + k, HASHED_TOKENS) for k in hash_ids)
            )
            del tokens[n_tokens:]
        else:  # only tokens behind the last key are read: those of the last hashed block
            chain = self._keys.of(hash_ids, n_tokens)
            tokens = [_FIRST_ID + hash_ids[-1]] * n_tokens
        return Request(f"q{self._next}", tokens, max(1, line["output_length"]), at_s, chain=chain)


def requests_per_minute(
    path: Path, n: int, speedup: float, engine: dict[str, object], is_hashing: bool = False
) -> tuple[float, dict[str, object]]:
    """Simulated requests per minute of CPU time, and counts of the simulation."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    simulated = build(sim_options(engine), is_sharing=True)
    block_tokens = simulated.simulator.replicas[0].state.kv.block_tokens
    assert HASHED_TOKENS % block_tokens == 0, f"{block_tokens} tokens per block"
    sha = hashlib.sha256()

    def add(request: Request) -> None:
        ended = (request.id, request.first_token_s, request.finished_s, request.n_cached)
        sha.update(repr(ended).encode())

    client = Trace(lines, n, speedup, None if is_hashing else BlockKeys(block_tokens), add)
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
        "cached_tokens": sum(r.state.counters.cached_tokens for r in simulated.simulator.replicas),
        "ends": sha.hexdigest()[:16],
    }
    return 60 * n / took_s, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--speedup", type=float, default=8.0)
    parser.add_argument("--router", default="jsq")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--hash-tokens", action="store_true")
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
    rate, counts = requests_per_minute(
        path, arguments.requests, arguments.speedup, settings, arguments.hash_tokens
    )
    print(f"{rate:,.0f} requests/min; {counts}")  # the output of this script


if __name__ == "__main__":
    main()
