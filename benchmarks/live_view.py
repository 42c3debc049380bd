"""What the live view costs: the share of a core that `slobench run` itself takes meanwhile.

    python benchmarks/live_view.py [--rounds 3] [--quick] [--rates 20,400] [--workers 1,2] [--write]

The same run is made on a terminal (the view is drawn) and without one (a line every five seconds),
in turn. Of the controlling process, which has a core of its own beside the workers', the time on
CPU is read twice, well after the start and well before the end. Exit status 1 where the process
with the view, or a single drawing four times as often as it happens, takes 1 % of a core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rig.machine import Goal, Table, interleaved, keep, machine_line, show, spread, spreads

from loadgen.drive.live_sample import EndedSample
from loadgen.live.early_warning import EarlyWarning
from loadgen.live.progress import Progress
from loadgen.live.run_figures import RunFigures
from loadgen.records import Status
from loadgen.run.manifest import instrument_limits
from loadgen.workload.scenario import scenario_from_flags
from targets.truth_server import truth_server

GOAL = 0.01
SETTLED_S = 2.0  # after the first line or drawing
BEATS_PER_S = 4.0
SLOS = ("ttft <= 500ms", "tpot <= 50ms", "p99(e2e) <= 10s", "error_rate <= 1%")
Figures = dict[str, float]


def own_share(
    folder: Path, rate_per_s: float, workers: int, on_terminal: bool, for_s: float
) -> float:
    """CPU seconds per second of the controlling process of one run."""
    with truth_server(folder, cache_dir=folder, pinned=False) as server:
        command = [
            sys.executable,
            "-m",
            "loadgen",
            "run",
            f"--target={server.url}",
            f"--rate={rate_per_s:g}/s",
            f"--duration={for_s + 2 * SETTLED_S:g}s",
            "--input-len=16",
            "--output-len=64",
            f"--workers={workers}",
            f"--out={folder}/run",
            "--force",
            "--no-scrape",
            *(f"--slo={slo}" for slo in SLOS),
        ]
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        ours, theirs = pty.openpty() if on_terminal else os.pipe()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environ)
        os.close(theirs)
        is_sending = threading.Event()
        reader = threading.Thread(target=_drain, args=(ours, is_sending))
        reader.start()
        assert is_sending.wait(60), "the run did not begin"
        time.sleep(SETTLED_S)
        before_s, started_s = on_cpu_s(process.pid), time.monotonic()
        time.sleep(for_s)
        used_s, took_s = on_cpu_s(process.pid) - before_s, time.monotonic() - started_s
        code = process.wait(60)
        reader.join()
        os.close(ours)
    if code not in (0, 1, 3):
        raise SystemExit(f"{' '.join(command)}: exit {code}")
    return used_s / took_s


def _drain(fd: int, is_sending: threading.Event) -> None:
    """Read the output of the run, so that it never waits for a full pipe; both ways begin alike."""
    seen = b""
    with contextlib.suppress(OSError):  # a terminal whose other end has gone
        while data := os.read(fd, 65536):
            seen = (seen + data)[-4096:]
            if b"sending " in seen or b"sent " in seen:
                is_sending.set()


def on_cpu_s(pid: int) -> float:
    """Source: proc(5), /proc/<pid>/task/<tid>/schedstat, nanoseconds on a CPU."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def per_beat_s(rate_per_s: float, workers: int, n: int = 200) -> float:
    """CPU seconds to take in one beat of a worker's, drawing as often as a run does."""
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=120)
        scenario = scenario_from_flags(
            input_len=16, output_len=64, duration="60s", rate=f"{rate_per_s:g}/s", slo=SLOS
        )
        figures = RunFigures(scenario)
        limits = instrument_limits(scenario)
        warning = EarlyWarning(limits, scenario.lateness_limit_s, 60.0)
        with Progress(console, 100_000, 60.0, False, None, figures, warning) as progress:
            started_s = time.process_time()
            for number in range(n):
                now_s = (number // workers) / BEATS_PER_S
                progress.beat(number % workers, _beat(now_s, rate_per_s / workers))
            return (time.process_time() - started_s) / n


def _beat(now_s: float, rate_per_s: float) -> dict[str, Any]:
    by_status = [0] * len(Status)
    by_status[Status.ok] = round(now_s * rate_per_s)
    n = max(1, round(rate_per_s / BEATS_PER_S))
    return {
        "now_s": now_s,
        "released": by_status[Status.ok] + 30,
        "sent": 0,
        "in_flight": 30,
        "waiting": 0,
        "by_status": by_status,
        "withdrawn": 0,
        "e2e_s": [0.7] * n,
        "ttft_s": [0.05 + 1e-5 * k for k in range(n)],
        "lateness_s": [1e-4] * n,
        "measured": 0,
        "use": (max(1e-3, now_s), 0.2, 0.0, None),
        "ended": [
            EndedSample(0, 0, 0.05 + 1e-5 * k, 1e-4, 0.01, 0.7, 0.7, n_events=64) for k in range(n)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 3 s")
    parser.add_argument("--rates", default="20,400", help="requests per second")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    n_rounds, for_s = (1, 3.0) if asked.quick else (asked.rounds, 6.0)
    print(machine_line())
    tables: dict[str, dict[str, Table]] = {}
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as name:
        for rate_per_s in map(float, asked.rates.split(",")):
            for workers in map(int, asked.workers.split(",")):
                title = f"{rate_per_s:g} requests/s, {workers} worker{'s' * (workers > 1)}"
                rounds = defaultdict[str, list[Figures]](list)

                def one(
                    side: str,
                    number: int,
                    rate_per_s: float = rate_per_s,
                    workers: int = workers,
                    rounds: defaultdict[str, list[Figures]] = rounds,
                ) -> None:
                    share = own_share(Path(name), rate_per_s, workers, side == "view", for_s)
                    rounds[side].append({"of a core": share})

                interleaved(n_rounds, ("view", "lines"), one)
                beat_s = spread([per_beat_s(rate_per_s, workers) for _ in range(5)])["median"]
                for figures in rounds["view"]:
                    figures["in this process, per beat ms"] = beat_s * 1e3
                    figures["… of a core"] = beat_s * BEATS_PER_S * workers
                table = {side: spreads(rounds[side]) for side in ("view", "lines")}
                tables[title] = dict(table)
                show(f"{title}, {n_rounds} rounds of {for_s:g} s", ["view", "lines"], table, 2)
                goals += [
                    Goal(f"{title}: {figure}", table["view"][figure]["median"], GOAL)
                    for figure in ("of a core", "… of a core")
                ]
    print(*goals, sep="\n")
    if asked.write:
        found = {"shares": tables, "goals": [goal.to_json() for goal in goals]}
        print(f"\n{keep('live_view', vars(asked), found)}")
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
