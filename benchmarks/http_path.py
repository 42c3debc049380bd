"""Measures the share of the engine's throughput that leaves its HTTP server, from a thread and from
HTTP workers.

    python benchmarks/http_path.py [--shape 8b] [--streams 256] [--http-workers 1] [--rounds 5]
        [--quick] [--write]

Steps last as long as estimated for an H200 and compute nothing (device `sim`), so that the
processor is free during a step, as it is next to a GPU. `alone` is a loop of steps in one process,
without texts or sockets; `thread` is the server with HTTP in the engine's process, and `workers`
the server with HTTP in separate processes. All have `--streams` requests of 1 000 tokens at any
time, each followed by another. `of alone` is a round's tokens per second over those of `alone` in
the same round. CPU time per token is listed for the engine's process, its event loop's thread, and
all HTTP workers together. The callers take one more core.

With 256 streams on two cores, the event loop of the engine's process takes 1.0 to 1.2 µs per token
with HTTP workers instead of 7 to 9, and an HTTP worker 6 to 9 µs (decision 55).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rig.machine import interleaved, keep, machine_line, show, spreads
from token_path import N_PROMPT, N_TOKENS, ROOT, Server, commit, one_round, server

from reference_engine.core.core import step
from reference_engine.serving.build import build
from reference_engine.serving.serve_options import choose
from reference_engine.state.sequence import Request, Sampling


@dataclass(frozen=True)
class Split(Server):
    """A server with its HTTP workers as child processes."""

    def cpu_s(self) -> dict[str, float]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        spent = Server(self.port, self.pid).cpu_s()
        workers = [sum(Server(self.port, int(pid)).cpu_s().values()) for pid in children]
        return {"engine": sum(spent.values()), "its loop": spent["loop"], "workers": sum(workers)}


def alone(words: list[str], n_streams: int, for_s: float) -> dict[str, float]:
    """Tokens per second of the bare engine, and its CPU time per token."""
    engine = build(choose({"mode": "continuous"}, words))
    state, n_begun = engine.state, 0

    def begin() -> None:
        nonlocal n_begun
        n_begun += 1
        now_s, how = engine.clock.now_s(), Sampling(1.0)
        state.admit(Request(f"req-{n_begun}", [1] * N_PROMPT, N_TOKENS, now_s, sampling=how))

    def work(until_s: float) -> int:
        n_tokens = 0
        while time.monotonic() < until_s:
            for _, _, finish, _ in step(state, engine.executor):
                n_tokens += 1
                if finish is not None:
                    begin()
        return n_tokens

    for _ in range(n_streams):
        begin()
    work(time.monotonic() + 1.0)
    began_s, cpu_s = time.monotonic(), time.process_time()
    n_tokens = work(began_s + for_s)
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    return {"engine us": cpu_s / n_tokens * 1e6, "tokens/s": n_tokens / seconds}


def measured(given: argparse.Namespace, words: list[str]) -> dict[str, list[dict[str, float]]]:
    """What each side did, round by round; the servers are up all the while."""
    sides = {"thread": 0, "workers": given.http_workers}
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in ("alone", *sides)}
    with ExitStack() as stack:
        up = {
            side: stack.enter_context(server(ROOT, [*words, f"http_workers={n}"]))
            for side, n in sides.items()
        }

        def run(side: str, number: int) -> None:
            if side == "alone":
                command = [sys.executable, __file__, "--alone", *sys.argv[1:]]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                rounds[side].append(json.loads(done.stdout))
                return
            split = Split(up[side].port, up[side].pid)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rounds[side].append(runner.run(one_round(split, given.streams, given.for_s)))

        interleaved(given.rounds, list(rounds), run)
    for side, of_side in rounds.items():
        for one, beside in zip(of_side, rounds["alone"], strict=True):
            if side != "alone":
                one["of alone"] = one["tokens/s"] / beside["tokens/s"]
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--for", dest="for_s", type=float, default=4.0, metavar="S")
    parser.add_argument("--quick", action="store_true", help="two rounds of two seconds")
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.for_s = 2, 2.0
    words = ["device=sim", f"shape={given.shape}", f"max_num_seqs={given.streams}"]
    if given.alone:
        print(json.dumps(alone(words, given.streams, given.for_s)))
        return
    load_before = round(os.getloadavg()[0], 2)
    print(machine_line())
    found = {side: spreads(of_side) for side, of_side in measured(given, words).items()}
    show(f"{given.shape}, {given.streams} streams: median [min, max]", list(found), found)
    if given.write:
        names = ("shape", "streams", "http_workers", "rounds", "for_s")
        asked = {name: getattr(given, name) for name in names}
        asked["commit"] = commit(ROOT)
        keep("http_path", asked, {"load_before": load_before, "sides": found})


if __name__ == "__main__":
    main()
