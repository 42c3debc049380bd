"""Checks that a run reports another program that keeps the client's core busy, and names the cause.

    python benchmarks/busy_core.py [--rates 20,100,400] [--duration 4] [--write]

A busy loop runs on one core. *Confined*: the client is pinned to that core, with one worker and
with two. Each such run has no SLO, and must be INVALID with other programs as the cause. *Free*:
the client may use all cores, and the scheduler may keep it off the busy core. A run that is not
INVALID must be accurate: its TTFT error against the truth server's log, row by row, is below 5 ms
at p99, the limit of the doctor's proof. *Alone*: no busy loop, and the run must be valid. Exit
status 1 if a check fails; needs two cores of an otherwise idle machine.

With time slices of 0.1 ms, the run delay of a confined client was 0.3-60 % of the run, from one run
to the next (decision 46).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rig.machine import keep, machine_line

from loadgen.archive.store import read_run
from loadgen.records import Status
from targets.truth_log import TruthLog
from targets.truth_server import truth_server

LIMIT_MS = 5.0
_LOOP = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(1, flush=True)\n"
_LOOP += "while True: pass"
Where = Literal["confined", "free", "alone"]


@contextmanager
def busy_loop(core: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _LOOP, str(core)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.read(1)
        yield
    finally:
        process.kill()
        process.communicate()


def one_run(
    folder: Path, where: Where, rate_per_s: float, workers: int, duration_s: float
) -> dict[str, Any]:
    """The verdict of a run on itself, and its error against the truth server."""
    cores = os.sched_getaffinity(0)
    with truth_server(folder, cache_dir=folder) as server:
        core = max(server.client_cpus)
        command = [
            sys.executable,
            "-m",
            "loadgen",
            "run",
            f"--target={server.url}",
            f"--rate={rate_per_s:g}/s",
            f"--duration={duration_s:g}s",
            "--input-len=16",
            "--output-len=64",
            f"--workers={workers}",
            f"--out={folder}/run",
            "--force",
        ]
        try:
            if where == "alone":
                os.sched_setaffinity(0, server.client_cpus)
                found = subprocess.run(command, capture_output=True, text=True, check=False)
            else:
                with busy_loop(core):
                    os.sched_setaffinity(0, {core} if where == "confined" else cores)
                    found = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            os.sched_setaffinity(0, cores)
        log = server.finish()
    if found.returncode not in (0, 1, 3):
        raise SystemExit(found.stderr)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    failed = [c for c in summary["validity"]["checks"] if c["is_gate"] and c["ok"] is False]
    return {
        "where": where,
        "rate_per_s": rate_per_s,
        "workers": workers,
        "is_invalid": not summary["validity"]["trusted"],
        "gates": [c["name"] for c in failed],
        "why": [c["detail"] for c in failed],
        "ttft_error_p99_ms": ttft_error_p99_ms(folder / "run", log),
    }


def ttft_error_p99_ms(directory: Path, log: TruthLog) -> float:
    rows = read_run(directory).request_rows
    rows = rows[rows["status"] == Status.ok]
    truth = log.rows_of(rows["request_id"])
    true_s = (truth["first_ns"] - truth["read_ns"]) * 1e-9
    errors_s = np.abs(rows["first_token_s"] - rows["sent_s"] - true_s)
    return 1e3 * float(np.quantile(errors_s, 0.99)) if len(rows) else float("nan")


def is_right(found: dict[str, Any]) -> bool:
    if found["where"] == "confined":
        return bool(found["is_invalid"] and any("other programs" in why for why in found["why"]))
    if found["where"] == "alone":
        return not found["is_invalid"]
    return bool(found["is_invalid"] or found["ttft_error_p99_ms"] < LIMIT_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="20,100,400", help="requests per second")
    parser.add_argument("--duration", type=float, default=4.0, help="seconds of each run")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for the server")
    print(machine_line())
    kinds: list[tuple[Where, int]] = [("alone", 1), ("confined", 1), ("confined", 2), ("free", 1)]
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for rate_per_s in map(float, asked.rates.split(",")):
            for where, workers in kinds:
                found = one_run(Path(name), where, rate_per_s, workers, asked.duration)
                runs.append({**found, "is_right": is_right(found)})
                said = f"INVALID ({', '.join(found['gates'])})" if found["gates"] else "fine"
                mark = "  " if is_right(found) else "! "
                error = f"TTFT error p99 {found['ttft_error_p99_ms']:.2f} ms"
                print(f"{mark}{where:9} {rate_per_s:4g}/s, workers {workers}: {said}; {error}")
    if asked.write:
        print(keep("busy_core", vars(asked), {"runs": runs}))
    return int(not all(found["is_right"] for found in runs))


if __name__ == "__main__":
    sys.exit(main())
