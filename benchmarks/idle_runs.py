"""Whether an idle machine is ever called INVALID: the same small run many times.

    python benchmarks/idle_runs.py [--runs 20] [--rate 20] [--duration 5] [--write]

`slobench run` as a user types it, against the truth server on a core of its own. Before each run
the machine is given up to ten seconds to become idle (`/proc/pressure/cpu`, what tasks waited for a
core); how idle it was is kept beside the verdict of the instrument check, so that a run that failed
on a busy machine is not taken for a false alarm. So is the share of its time that the host of a
virtual machine took meanwhile, and how long the processor was slow, as nothing looks busy then.
Exit status 1 where a run was INVALID.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rig.machine import keep, machine_line

from loadgen.archive.store import read_manifest_file
from targets.truth_server import truth_server

IDLE_SHARE = 0.005  # of a second in which some task waited for a core
MOST_WAIT_S = 10.0
OF_THE_HOST = ("(steal)", "of its usual speed")  # in what the check says


def waited_s() -> float | None:
    """Seconds since the start of the system in which some task waited for a core. Source: Linux
    PSI, `some … total=` of /proc/pressure/cpu, microseconds."""
    try:
        first = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return None
    return int(first.rpartition("total=")[2]) * 1e-6


def become_idle() -> float | None:
    """The share of the last second in which tasks waited, once it is small or the time is up."""
    share, end_s = None, time.monotonic() + MOST_WAIT_S
    while time.monotonic() < end_s:
        before_s = waited_s()
        time.sleep(1.0)
        after_s = waited_s()
        if before_s is None or after_s is None:
            return None
        share = after_s - before_s
        if share < IDLE_SHARE:
            break
    return share


def one_run(folder: Path, rate_per_s: float, duration_s: float) -> dict[str, Any]:
    """What the instrument check said of one run."""
    before = become_idle()
    with truth_server(folder, cache_dir=folder) as server:
        command = [
            sys.executable,
            "-m",
            "loadgen",
            "run",
            f"--target={server.url}",
            f"--rate={rate_per_s:g}/s",
            f"--duration={duration_s:g}s",
            "--input-len=64",
            "--output-len=64",
            "--slo=p99(ttft)<=500ms",
            f"--out={folder}/run",
            "--force",
        ]
        with server.client_cores():
            found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode not in (0, 1, 3):
        raise SystemExit(found.stderr)
    validity = json.loads((folder / "run" / "summary.json").read_text())["validity"]
    shard = read_manifest_file(folder / "run")[1].shards[0]
    return {
        "trusted": validity["trusted"],
        "failed": [c["name"] for c in validity["checks"] if c["is_gate"] and c["ok"] is False],
        "waiting_share_before": before,
        "loop_lag_p99_ms": 1e3 * shard.loop_lag_s.p99,
        "run_delay_share": shard.run_delay_share,
        "stolen_share": shard.stolen_share,
        "slow_s": shard.processor.slow_s if shard.processor else None,
        "read_backlog_ms": 1e3 * shard.backlog.wait_mean_s if shard.backlog else float("nan"),
        "stalls": len(shard.stalls.spans_s) if shard.stalls else 0,
        "detail": [c["detail"] for c in validity["checks"] if c["is_gate"] and c["ok"] is False],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=5.0, help="seconds of each run")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    print(machine_line())
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(asked.runs):
            runs.append(one_run(Path(name), asked.rate, asked.duration))
            last = runs[-1]
            busy = last["waiting_share_before"]
            idle = "unknown" if busy is None else f"{busy:.2%} waited before"
            said = "fine" if last["trusted"] else f"INVALID ({', '.join(last['failed'])})"
            print(
                f"{number + 1:3}  {said}; {idle}; lag p99 {last['loop_lag_p99_ms']:.2f} ms, run "
                f"delay {last['run_delay_share'] or 0:.2%}, stalls {last['stalls']}, host took "
                f"{last['stolen_share'] or 0:.2%}, slow {last['slow_s'] or 0:.2f} s"
            )
    invalid = [one for one in runs if not one["trusted"]]
    alarms = [
        one
        for one in invalid
        if (one["waiting_share_before"] or 0) < IDLE_SHARE
        and not any(word in detail for word in OF_THE_HOST for detail in one["detail"])
    ]
    print(
        f"INVALID: {len(invalid)} of {len(runs)}; of them on a machine that was idle just before"
        f" and that its host left alone: {len(alarms)}"
    )
    if asked.write:
        counts = {"invalid": len(invalid), "invalid_though_idle": len(alarms)}
        print(keep("idle_runs", vars(asked), {**counts, "runs": runs}))
    return int(bool(invalid))


if __name__ == "__main__":
    sys.exit(main())
