"""Measures the time of `slobench run` before the first request and after the last token.

    python benchmarks/startup.py [--rounds 10] [--quick] [--ttft-s 0.05] [--write]

Twenty requests against a running server (targets/truth: TTFT 50 ms, ITL 10 ms), without pinning.
With `--ttft-s 1` the server is slow: the start must take 2.2 × its TTFT at most.
Times of requests are the server's, on the clock by which the process is started and awaited.
`waited` is the part before the first request in which the server was busy with the preflight: the
server's time, not slobench's. The first gap of the schedule, in which nothing is due, is listed
separately, too. The cost of imports is printed.

The packages are compiled first, as `pip install` and the Makefile do: otherwise an editable
installation compiles at each start for half a second where PYTHONDONTWRITEBYTECODE is set.

The first worker is forked from the controlling process (decision 37), which leaves 12 ms of 300 ms
of imports to it. A worker builds its tables before it reports that it is ready, so that its first
row may be due 50 ms later, whatever the number of rows.
"""

from __future__ import annotations

import argparse
import compileall
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from rig.machine import Goal, keep, machine_line, show, spreads

from targets.truth_server import TruthServer, truth_server

REQUESTS, FOR_S = 20, 1
FIRST_DUE_S = FOR_S / REQUESTS  # of a constant rate: a gap after the epoch
GOAL_S = 0.5
WAITS = 2.2  # × the server's TTFT, for the preflight
ROOT = Path(__file__).parent.parent
PACKAGES = ("loadgen", "targets", "reports")
IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def command(server: TruthServer, out: Path, *interpreter: str) -> list[str]:
    return [
        sys.executable,
        *interpreter,
        "-m",
        "loadgen",
        "run",
        f"--target={server.url}",
        f"--rate={REQUESTS}/s",
        f"--duration={FOR_S}s",
        "--input-len=16",
        "--output-len=16",
        "--set=arrivals.kind=constant",
        "--slo=p99(ttft)<=500ms",
        f"--out={out}",
        "--force",
    ]


def one_run(folder: Path, ttft_s: float = 0.05) -> dict[str, float]:
    """Seconds from the start of the process to the first request, and from the last token to its
    end."""
    with truth_server(folder, cache_dir=folder, pinned=False, ttft_s=ttft_s) as server:
        started_s = time.monotonic()
        found = subprocess.run(
            command(server, folder / "run"), capture_output=True, text=True, check=False
        )
        ended_s = time.monotonic()
        if found.returncode not in (0, 1, 3):
            raise SystemExit(found.stderr)
        rows = server.finish().rows
    is_ours = rows["seq"] >= 0
    assert np.count_nonzero(is_ours) == REQUESTS, "not every request was sent"
    first_s = float(rows["arrived_ns"][is_ours].min()) * 1e-9 - started_s
    waited_s = busy_s(rows["arrived_ns"][~is_ours], rows["done_ns"][~is_ours])
    return {
        "first request s": first_s,
        "… of it waited for the server s": waited_s,
        "… of it nothing was due s": FIRST_DUE_S,
        "… of it our own s": first_s - waited_s - FIRST_DUE_S,
        "last token to exit s": ended_s - float(rows["last_ns"].max()) * 1e-9,
    }


def busy_s(start_ns: np.ndarray, end_ns: np.ndarray) -> float:
    """The length of a union of intervals."""
    total_ns, until_ns = 0, 0
    for start, end in sorted(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        total_ns += max(0, end - max(start, until_ns))
        until_ns = max(until_ns, end)
    return total_ns * 1e-9


def imports_ms(folder: Path) -> dict[str, float]:
    """Milliseconds that importing each top-level package takes in such a run, its own modules
    only, in the controlling process; the interpreter's own account, which adds to it."""
    with truth_server(folder, cache_dir=folder, pinned=False) as server:
        line = command(server, folder / "run", "-X", "importtime")
        told = subprocess.run(line, capture_output=True, text=True, check=False).stderr
    spent_ms: dict[str, float] = defaultdict(float)
    for own_us, module in IMPORT_LINE.findall(told):
        spent_ms[module.partition(".")[0]] += int(own_us) * 1e-3
    return dict(sorted(spent_ms.items(), key=lambda one: -one[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--ttft-s", type=float, default=0.05, help="of the server")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    n_rounds = 3 if asked.quick else asked.rounds
    print(machine_line())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in PACKAGES:
            compileall.compile_dir(ROOT / package, quiet=2)
        one_run(folder)  # what is kept in caches is made, as it is after a user's first run
        table = spreads([one_run(folder, asked.ttft_s) for _ in range(n_rounds)])
        imports = imports_ms(folder)
    show(
        f"{REQUESTS} requests, {n_rounds} rounds: median [min, max]",
        ["slobench"],
        {"slobench": table},
    )
    goals = [
        Goal(
            "start to first request",
            table["first request s"]["median"] - FIRST_DUE_S,
            GOAL_S + WAITS * asked.ttft_s,
            "s",
        ),
        Goal("our own part of it", table["… of it our own s"]["median"], GOAL_S, "s"),
        Goal("last token to exit", table["last token to exit s"]["median"], GOAL_S, "s"),
    ]
    print(*goals, sep="\n")
    shown = [f"{package} {ms:.0f}" for package, ms in imports.items() if ms >= 5]
    print(f"\nimports, {sum(imports.values()):.0f} ms under -X importtime: {', '.join(shown)}")
    if asked.write:
        found = {
            "seconds": table,
            "goals": [goal.to_json() for goal in goals],
            "imports_ms": imports,
        }
        print(f"\n{keep('startup', vars(asked), found)}")
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
