"""Whether `slobench nightly` tells a 10 % slower engine from an equal one, on real sockets and the
real CPU engine.

    python benchmarks/nightly_real.py [--delay 10%] [--nights 2] [--repeats 48] [--measure 3s]
        [--no-control] [--keep]

Equal nights make the baseline and are judged against it, all but the first; then a night with
`step_delay`, which makes every step of the engine so much longer. Expected are same or inconclusive
(exit code 0) of the equal ones and worse (exit code 1) of the last. Each command is what a user
types. It takes 35 minutes, half of them for the control beside every run; without one
(`--no-control`) a machine that is fast in one night and slow in the next gets the blame for it.
Exits 1 where a verdict is not as expected.
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

SCENARIO = """\
# Equal gaps and lengths leave the server as the only thing that varies.
schema: 1
name: steady
seed: 7
arrivals: {{kind: constant, rate: 3/s}}
requests: {{input_tokens: 128, output_tokens: 32}}
phases: {{warmup: 1s, measure: {measure}, drain: 10s}}
instrument: {{lateness: 50ms, loop_lag: 50ms}}
"""
NIGHTLY = """\
schema: 1
targets: [reference]
scenarios: [steady.yaml]
modes: [chunked]
engine: shape=10m,threads=1
{control}repeats: {repeats}
metrics: [p50(tpot)]
margins: {{default: 5%}}
"""


def night(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """One night of the files in `folder`: exit code, verdict and what its measure says."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "loadgen", "nightly", "nightly.yaml", "--out", name, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    path = folder / name / "nightly.json"
    if not path.exists():
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    facts = json.loads(path.read_text())
    (cell,) = facts["cells"]
    gated = [row for row in cell["measures"] if row["is_gated"]]
    found = {
        "exit_code": done.returncode,
        "verdict": facts["verdict"],
        "seconds": time.monotonic() - began_s,
        "notes": cell["notes"],
    }
    for row in gated:
        words_of = ("measure", "a", "b", "change", "low", "high", "p", "runs_needed")
        found |= {key: row[key] for key in words_of} | cell["noise"].get(row["measure"], {})
        found["control"] = cell["controls"].get(row["measure"])
    return found


def tell(name: str, found: dict[str, Any]) -> None:
    line = f"{name}: {found['verdict']}, exit code {found['exit_code']}, {found['seconds']:.0f} s"
    if found.get("change") is not None:
        ends = [found["low"], found["high"]]
        low, high = ("–" if end is None else f"{100 * end:+.1f}" for end in ends)
        line += (
            f"; {found['measure']} {1e3 * found['a']:.2f} → {1e3 * found['b']:.2f} ms, "
            f"{100 * found['change']:+.1f} % [{low}, {high}], p {found['p']:.2g}, "
            f"runs differ by {100 * found['run_sd']:.2g} %, needs {found['runs_needed']}"
        )
    if found.get("control"):
        line += f"; the control itself {100 * found['control']['change']:+.1f} %"
    print(line, flush=True)
    for note in found["notes"]:
        print(f"  {note}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", default="10%")
    parser.add_argument("--nights", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=48)
    parser.add_argument("--measure", default="3s")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    print(machine_line())
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "steady.yaml").write_text(SCENARIO.format(measure=asked.measure))
        control = "" if asked.no_control else "control: reference\n"
        text = NIGHTLY.format(control=control, repeats=asked.repeats)
        (folder / "nightly.yaml").write_text(text)
        for k in range(1, asked.nights + 1):
            found[f"equal night {k}"] = night(folder, f"equal-{k}")
            tell(f"equal night {k}", found[f"equal night {k}"])
            if found[f"equal night {k}"]["verdict"] == "invalid":
                print("nothing was found out: no pair of runs can be trusted on this machine now")
                return 1
        last = f"every step {asked.delay} longer"
        found[last] = night(folder, "slower", "--engine", f"step_delay={asked.delay}")
        tell(last, found[last])
    *equal, slower = found.values()
    is_right = (slower["verdict"], slower["exit_code"]) == ("worse", 1) and all(
        one["verdict"] in ("baseline", "same", "inconclusive") and one["exit_code"] == 0
        for one in equal
    )
    print("as expected" if is_right else "NOT as expected")
    if asked.keep:
        print(keep("nightly_real", vars(asked), {"as_expected": is_right, "nights": found}))
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
