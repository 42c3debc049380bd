"""Measures how the two ends of a run, and a worker's memory, grow with the number of requests.

    python benchmarks/growth.py [--requests 10000 100000] [--rate 1000] [--rounds 1]
                                [--before DIRECTORY] [--write]

Requests of 8 tokens at a constant rate against the truth server (TTFT and ITL 2 ms), by one worker.
Times of requests are the server's, on the clock by which the process is started and awaited. The
memory is the peak (VmHWM) of the worker. `--before` is a checkout of another version: its runs
alternate with those of this version, and the ratios are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

import numpy as np
from rig.machine import Goal, interleaved, keep, machine_line, show, spread

from targets.truth_server import truth_server

ROOT = Path(__file__).parent.parent
TOKENS = 8
MOST_BEFORE_S, MOST_AFTER_S, MOST_MB = 0.8, 1.5, 400.0
_LOOK_EVERY_S = 0.2


def one_run(root: Path, n: int, rate: int) -> dict[str, float]:
    """Seconds from the start of the process to the first request, and from the last token to its
    end; peak megabytes of the worker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with truth_server(
            folder, cache_dir=folder, pinned=False, ttft_s=0.002, itl_s=0.002
        ) as server:
            command = [
                sys.executable,
                "-m",
                "loadgen",
                "run",
                f"--target={server.url}",
                f"--rate={rate}/s",
                f"--duration={n / rate:g}s",
                "--input-len=16",
                f"--output-len={TOKENS}",
                "--set=arrivals.kind=constant",
                "--workers=1",
                "--slo=p99(ttft)<=500ms",
                f"--out={folder / 'run'}",
            ]
            environ = {**os.environ, "PYTHONPATH": str(root)}
            started_s, peak_mb = monotonic(), 0.0
            process = subprocess.Popen(
                command,
                cwd=root,
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            while True:
                try:
                    _, problem = process.communicate(timeout=_LOOK_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    peak_mb = max(peak_mb, worker_mb(process.pid))
            ended_s = monotonic()
            if process.returncode not in (0, 1, 3):
                raise SystemExit(problem)
            rows = server.finish().rows
    is_ours = rows["seq"] >= 0
    assert np.count_nonzero(is_ours) == n, "not every request was sent"
    return {
        "start to first request s": float(rows["arrived_ns"][is_ours].min()) * 1e-9 - started_s,
        "last token to exit s": ended_s - float(rows["last_ns"].max()) * 1e-9,
        "peak memory of the worker MB": peak_mb,
    }


def worker_mb(pid: int) -> float:
    """The largest peak memory (VmHWM) of a child of a process, megabytes."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        texts = [Path(f"/proc/{child}/status").read_text() for child in children]
    except OSError:  # one of them has ended
        return 0.0
    peaks = [line for text in texts for line in text.splitlines() if line.startswith("VmHWM")]
    return max((int(line.split()[1]) * 1024e-6 for line in peaks), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rate", type=int, default=1000, help="requests per second")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, help="a checkout of another version")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    print(machine_line())
    roots = {"now": ROOT} | ({"before": asked.before.resolve()} if asked.before else {})
    found, goals = {}, []
    for n in asked.requests:
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in roots}

        def run(side: str, _: int, n: int = n) -> None:
            rounds[side].append(one_run(roots[side], n, asked.rate))  # noqa: B023  # runs at once

        interleaved(asked.rounds, list(roots), run)
        table = {
            side: {name: spread([run[name] for run in runs]) for name in runs[0]}
            for side, runs in rounds.items()
        }
        show(f"{n} requests, {asked.rounds} rounds: median [min, max]", list(table), table)
        now = {name: values["median"] for name, values in table["now"].items()}
        if asked.before:
            for name, values in table["before"].items():
                print(f"  {name}: {values['median'] / now[name]:.2f} × before")
        found[str(n)] = table
        for (name, value), limit in zip(
            now.items(), (MOST_BEFORE_S, MOST_AFTER_S, MOST_MB), strict=True
        ):
            goals.append(Goal(f"{name}, {n} requests", value, limit))
    print("", *goals, sep="\n")
    if asked.write:
        kept = {**vars(asked), "before": bool(asked.before)}
        print(keep("growth", kept, {"runs": found, "goals": [goal.to_json() for goal in goals]}))
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
