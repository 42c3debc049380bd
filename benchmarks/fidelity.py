"""How far slobench's numbers are from what a scripted server really did.

    python benchmarks/fidelity.py [--runs 5] [--rate 50/s] [--ttft 50ms] [--itl 10ms] [--write]

Each run goes through the command line against the bundled mock in processes of their own. The
mock's log of CLOCK_MONOTONIC instants is the truth: errors are the client's figure minus the
server's, row by row. `script` compares with the script itself, the mock's own lateness included.
Medians over runs with their range; `--write` keeps them in benchmarks/results with the machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from loadgen.drive.instrument import host
from loadgen.drive.store import read_run
from loadgen.records import Status
from loadgen.units import parse_duration_s

OUTPUT_TOKENS = 32
LIMIT_MS = 1.0


def one_run(rate: str, ttft: str, itl: str, directory: Path) -> dict[str, float]:
    """One run of ten seconds and its errors in milliseconds."""
    subprocess.run(
        [
            sys.executable, "-m", "loadgen", "run", "--target=mock",
            f"--engine=ttft={ttft},itl={itl}",
            f"--rate={rate}", "--input-len=64", f"--output-len={OUTPUT_TOKENS}", "--duration=10s",
            f"--out={directory}",
        ],
        check=False, capture_output=True,
    )  # fmt: skip
    run = read_run(directory)
    with (directory / "logs" / "truth.csv").open() as lines:
        truth = {int(row["seq"]): row for row in csv.DictReader(lines)}
    rows = run.request_rows[run.request_rows["status"] == Status.ok]
    said = [truth[int(request_id)] for request_id in rows["request_id"]]
    read, first, last = (
        np.array([int(row[name]) for row in said]) * 1e-9
        for name in ("read_ns", "first_ns", "last_ns")
    )
    ttft_s = rows["first_token_s"] - rows["released_s"]
    tpot_s = (rows["last_token_s"] - rows["first_token_s"]) / (OUTPUT_TOKENS - 1)
    ttft_error = rows["first_token_s"] - rows["sent_s"] - (first - read)
    tpot_error = tpot_s - (last - first) / (OUTPUT_TOKENS - 1)
    late = rows["sent_s"] - rows["released_s"]
    shard = run.instrument["shards"][0]
    return {
        "script TTFT error p50": float(np.median(ttft_s) - parse_duration_s(ttft)) * 1e3,
        "script TPOT error p50": float(np.median(tpot_s) - parse_duration_s(itl)) * 1e3,
        "TTFT error p50": float(np.median(ttft_error)) * 1e3,
        "TTFT error p99": float(np.quantile(ttft_error, 0.99)) * 1e3,
        "TPOT error p99": float(np.quantile(np.abs(tpot_error), 0.99)) * 1e3,
        "send lateness p50": float(np.median(late)) * 1e3,
        "send lateness p99": float(np.quantile(late, 0.99)) * 1e3,
        "run delay share %": (shard["run_delay_share"] or 0.0) * 100,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", default="50/s")
    parser.add_argument("--ttft", default="50ms")
    parser.add_argument("--itl", default="10ms")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            one_run(asked.rate, asked.ttft, asked.itl, Path(folder) / str(number))
            for number in range(asked.runs)
        ]
    table = {
        name: {
            "median": statistics.median(one[name] for one in found),
            "min": min(one[name] for one in found),
            "max": max(one[name] for one in found),
        }
        for name in found[0]
    }
    print(f"{asked.runs} runs of 10 s at {asked.rate}, scripted TTFT {asked.ttft}, ITL {asked.itl}")
    for name, line in table.items():
        unit = "" if name.endswith("%") else " ms"
        print(f"{name:24} {line['median']:8.3f}{unit}  [{line['min']:.3f}, {line['max']:.3f}]")
    if asked.write:
        machine = {key: host()[key] for key in ("cpu_model", "cpus", "platform", "python")}
        result = {"date": datetime.now(UTC).date().isoformat(), "machine": machine,
                  "asked": vars(asked) | {"write": None}, "milliseconds": table}  # fmt: skip
        path = Path(__file__).parent / "results" / "fidelity.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
    worst = max(abs(table[f"script {name} error p50"]["median"]) for name in ("TTFT", "TPOT"))
    return int(worst > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
