"""All tests and measurements that need a GPU: `make gpu-check`.

    python benchmarks/gpu_suite.py [--long] [--experiments] [--only NAME,…] [--skip NAME,…]
    python benchmarks/gpu_suite.py --rehearse   # the same code on the CPU, small; writes nothing

Measures the ceilings of this GPU (copy, matmul) and, mostly as shares of them: each kernel, decode
steps, whole workloads, the CPU time of a step, the HTTP path compared with the engine alone,
`transformers` with the same weights, and the batching modes under load. Runs the tests marked
`gpu`. Writes results/gpu-<name>-<date>.json and .md after every figure, named `.partial` until all
parts ran. The part that runs when the time is over is interrupted. Exits 0 without a GPU, with a
message; exits 1 if a goal was missed or a part failed.
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
from rig.gpu_ceilings import Place
from rig.gpu_experiments import attention, parts_of_a_gpu, split_gpu
from rig.gpu_parts import decode_steps, kernels, measure_ceilings, over_http, peers, throughput
from rig.gpu_results import Results
from rig.gpu_session import Budget, Session
from rig.gpu_tools import gpu_tests, sanitizer

from loadgen.errors import nearest
from reference_engine.model.zoo import SHAPES

ROOT = Path(__file__).parents[1]
Part = Callable[[Session], None]


def experiments(session: Session) -> None:
    """Measurements for open decisions; they have no goals."""
    config = SHAPES[session.shape("8b")]
    figures: dict[str, Any] = {
        "attention": attention(session.ops(), config, session.place, session.top)
    }
    session.results.add("experiments", figures)
    figures["parts of a GPU"] = parts_of_a_gpu(session.place, split_gpu)
    session.results.add("experiments", figures)
    print(json.dumps(figures, indent=2, default=float))


CEILINGS = "ceilings"
# The most useful first, each with the most seconds that it may take.
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
    """The exit code. `place` replaces this machine's GPU."""
    options = _parser().parse_args(arguments)
    if place is None and not torch.cuda.is_available() and not options.rehearse:
        print("gpu-check: no CUDA device here, nothing was measured")
        return 0
    if place is None:
        gpu = Place("cuda", torch.bfloat16, cuda=torch.cuda)
        place = Place("cpu", torch.float32, 64) if options.rehearse else gpu
    chosen = {CEILINGS, *(options.only or PARTS)} - set(options.skip)
    parts = {name: part for name, part in PARTS.items() if name in chosen}
    if options.experiments:
        parts["experiments"] = (experiments, 120)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(options.out or ROOT / "benchmarks" / "results")
        results = Results(place, tuple(PARTS), None if options.rehearse else out)
        logs = Path(directory) if options.rehearse else out / "gpu-logs"
        logs.mkdir(parents=True, exist_ok=True)
        budget = Budget(float("inf") if options.long else options.budget)
        session = Session(place, options.long, logs, results, budget)
        for name, (part, at_most_s) in parts.items():
            session.run(name, part, at_most_s)
    return _report(results)


def _report(results: Results) -> int:
    """Prints failures and results; returns the exit code."""
    for name, why in results.failures.items():
        print(f"  FAILED {name}: {why}")
    if results.out is None:
        print("rehearsed on the CPU; no goals apply and nothing was written")
        return 1 if results.failures else 0
    print(results.table())
    return 0 if results.all_met else 1


def _parts(names: str) -> list[str]:
    """Parts by name. Raises argparse's error with the nearest name for an unknown part."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"unknown part '{name}'; {nearest(name, PARTS)}")
    return chosen


def _skippable(names: str) -> list[str]:
    chosen = _parts(names)
    if CEILINGS in chosen:
        raise argparse.ArgumentTypeError(
            f"{CEILINGS} are always measured: the goals are shares of them"
        )
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the engine on this machine's GPU, relative to the GPU's own ceilings.",
        epilog="example: python benchmarks/gpu_suite.py --only kernels",
    )
    parser.add_argument(
        "--long", action="store_true", help="also run at full length, without time limits"
    )
    parts = ", ".join(PARTS)
    only = f"parts to run, of {parts}; {CEILINGS} are always measured; writes a partial result"
    parser.add_argument("--only", default=[], type=_parts, metavar="NAME,…", help=only)
    parser.add_argument(
        "--skip", default=[], type=_skippable, metavar="NAME,…",
        help="parts to leave out; writes a partial result",
    )  # fmt: skip
    parser.add_argument("--out", help="folder for the results (default: benchmarks/results)")
    parser.add_argument(
        "--experiments", action="store_true",
        help="also measure, without goals: attention in one launch, 8-bit KV, parts of a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="SECONDS",
        help="time limit; the part that runs then fails (default: 480; none with --long)",
    )  # fmt: skip
    parser.add_argument(
        "--rehearse", action="store_true", help="run small on the CPU and write nothing"
    )
    return parser


if __name__ == "__main__":
    # As an exception, so that the server and the clients are stopped, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
