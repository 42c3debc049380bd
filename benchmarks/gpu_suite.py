"""Everything that only a GPU can tell, in one command: `make gpu-check`.

    python benchmarks/gpu_suite.py [--long] [--experiments] [--only NAME,…] [--skip NAME,…]
    python benchmarks/gpu_suite.py --rehearse        # the same code on the CPU, tiny; keeps nothing

Runs the tests marked `gpu`, measures the ceilings of this GPU (copy, matmul) and judges everything
as a share of them: each kernel, decode steps, whole works, the CPU's part of a step, the HTTP path
against the engine alone, `transformers` on the same weights, and the batching modes under load.
Writes results/gpu-<name>-<date>.json and .md after every figure, as `.partial` until all parts ran.
What is under way when the time is over is interrupted. Without a GPU it says so and exits 0; a
missed target, or a part that failed, exits 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rig.gpu_budget import Budget
from rig.gpu_ceilings import Place
from rig.gpu_experiments import attention
from rig.gpu_halves import halves, parts_of_a_gpu
from rig.gpu_parts import decode_steps, kernels, measure_ceilings, over_http, peers, throughput
from rig.gpu_results import Results
from rig.gpu_session import Session
from rig.gpu_tools import gpu_tests, sanitizer

from loadgen.errors import nearest
from reference_engine.model.zoo import SHAPES

ROOT = Path(__file__).parents[1]
Part = Callable[[Session], None]


def experiments(session: Session) -> None:
    """What nobody has decided on; kept beside the results, and no goal."""
    config = SHAPES[session.shape("8b")]
    found: dict[str, Any] = {
        "attention": attention(session.ops(), config, session.place, session.top)
    }
    session.results.keep("experiments", found)
    found["parts of a GPU"] = parts_of_a_gpu(session.place, halves)
    session.results.keep("experiments", found)
    print(json.dumps(found, indent=2, default=float))


CEILINGS = "ceilings"
# In the order of their worth, and the seconds of a machine that none of them may take more of.
PARTS: dict[str, tuple[Part, float]] = {
    CEILINGS: (measure_ceilings, 60),
    "kernels": (kernels, 120),
    "decode_steps": (decode_steps, 120),
    "throughput": (throughput, 90),
    "tests": (gpu_tests, 150),
    "http": (over_http, 150),
    "transformers": (peers, 200),
    "sanitizer": (sanitizer, 90),
}


def main(arguments: Sequence[str] | None = None, place: Place | None = None) -> int:
    """`place` instead of this machine's GPU."""
    given = _parser().parse_args(arguments)
    if place is None and not torch.cuda.is_available() and not given.rehearse:
        print("gpu-check: no CUDA device here, nothing was measured")
        return 0
    if place is None:
        gpu = Place("cuda", torch.bfloat16, cuda=torch.cuda)
        place = Place("cpu", torch.float32, 64) if given.rehearse else gpu
    wanted = [n for n in PARTS if n in (CEILINGS, *(given.only or PARTS)) and n not in given.skip]
    parts = {name: PARTS[name] for name in wanted}
    if given.experiments:
        parts["experiments"] = (experiments, 120)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(given.out or ROOT / "benchmarks" / "results")
        results = Results(place, tuple(PARTS), None if given.rehearse else out)
        logs = Path(directory) if given.rehearse else out / "gpu-logs"
        logs.mkdir(parents=True, exist_ok=True)
        budget = Budget(float("inf") if given.long else given.budget)
        session = Session(place, given.long, logs, results, budget)
        for name, (part, at_most_s) in parts.items():
            session.run(name, part, at_most_s)
    return _concluded(results)


def _concluded(results: Results) -> int:
    """Tells what was found; the exit code."""
    for name, why in results.failures.items():
        print(f"  FAILED {name}: {why}")
    if results.out is None:
        print("rehearsed on the CPU; nothing is kept, no target counts")
        return 1 if results.failures else 0
    print(results.table())
    return 0 if results.all_met else 1


def _parts(names: str) -> list[str]:
    """Parts by name. Raises what argparse tells, with the name that may have been meant."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"unknown part '{name}'; {nearest(name, PARTS)}")
    return chosen


def _dispensable(names: str) -> list[str]:
    chosen = _parts(names)
    if CEILINGS in chosen:
        raise argparse.ArgumentTypeError(
            f"{CEILINGS} are always measured: all else is judged by them"
        )
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the engine on this machine's GPU and judge it by its own ceilings.",
        epilog="example: python benchmarks/gpu_suite.py --only kernels",
    )
    parser.add_argument("--long", action="store_true", help="also the full-length runs")
    parts = ", ".join(PARTS)
    some = f"parts, of {parts}; {CEILINGS} are always measured; writes a partial result"
    parser.add_argument("--only", default=[], type=_parts, metavar="NAME,…", help=some)
    parser.add_argument(
        "--skip", default=[], type=_dispensable, metavar="NAME,…",
        help="parts to leave out; writes a partial result",
    )  # fmt: skip
    parser.add_argument("--out", help="where the results go (default: benchmarks/results)")
    parser.add_argument(
        "--experiments", action="store_true",
        help="also what is tried and not judged: attention in one launch, 8-bit KV, parts of a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="SECONDS",
        help="after them what runs is interrupted and counts as failed (480; none with --long)",
    )  # fmt: skip
    parser.add_argument(
        "--rehearse", action="store_true", help="run it tiny on the CPU and keep nothing"
    )
    return parser


if __name__ == "__main__":
    # So that what it started is ended, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
