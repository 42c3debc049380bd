"""All tests and measurements that need a GPU, in three stages of seven minutes; see docs/gpu.md.

    python benchmarks/gpu_suite.py --stage 1 [--out DIR]
    python benchmarks/gpu_suite.py --stage 2 --resume FILE     # adds to a result, also days later
    python benchmarks/gpu_suite.py --stage 1 --rehearse        # the same code on the CPU, small

Stage 1: ceilings (copy, matmul), kernels, decode steps, tests marked `gpu`, throughput. Stage 2:
8 k outputs compared with `generate_batch` and `generate` of `transformers` on the same weights,
HTTP, batching modes. Stage 3: mixed contexts, a sweep of tile sizes, NVIDIA's sanitizer, 8 k
outputs at full length, experiments. Most figures are shares of the ceilings of the same stage.
Parts that a resumed result has without a failure are not repeated. Exits 0 without a GPU, with a
message; exits 1 if a goal was missed or a part failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig.gpu_results import markdown
from rig.gpu_stages import (
    CEILINGS,
    PARTS,
    STAGE_S,
    STAGES,
    Command,
    Merged,
    Stage,
    device_name,
)

from loadgen.errors import UsageError, nearest

ROOT = Path(__file__).parents[1]


def part_command(*more: str) -> Command:
    """The command of a part, with `more` arguments."""

    def command(name: str, result: Path, merged: Path, logs: Path) -> list[str]:
        paths = (str(path) for path in (result, merged, logs))
        return [sys.executable, "-m", "rig.gpu_part", name, *paths, *more]

    return command


def main(
    arguments: Sequence[str] | None = None,
    command: Command | None = None,
    device: str | None = None,
    slowness: float = 1.0,
) -> int:
    """The exit code. `command` replaces the command of a part, `device` the name of the GPU;
    `slowness` multiplies all limits, for machines without a GPU."""
    options = _parser().parse_args(arguments)
    device = "rehearsal" if options.rehearse else device or device_name()
    if device is None:
        print("gpu-check: no CUDA device here, nothing was measured")
        return 0
    slowness = 10.0 if options.rehearse else slowness
    # The logs are in the archive; a folder of its own, so that two runs do not meet.
    with tempfile.TemporaryDirectory() as directory:
        logs, results = Path(directory) / "logs", ROOT / "benchmarks" / "results"
        out = Path(options.out or (directory if options.rehearse else results))
        logs.mkdir()
        command = command or part_command(*["--rehearse"] * options.rehearse)
        try:
            merged = Merged.start(device, out, options.resume)
        except UsageError as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 2
        stage = Stage(merged, options.stage, logs, command, options.budget * slowness)
        limits = _chosen(options, merged)
        is_good = stage.run({name: limit_s * slowness for name, limit_s in limits.items()})
        print(markdown(merged.content))
        if options.out or not options.rehearse:
            print(f"{merged.path}, .md and .tgz")
    return 0 if is_good else 1


def _chosen(options: argparse.Namespace, merged: Merged) -> Mapping[str, float]:
    """The parts to run with their limits: those of the stage that are not done yet, or those named
    by --only, whose limits do not depend on the stage; the ceilings always, first."""
    limits = {name: s for parts in STAGES.values() for name, s in parts.items()}
    names = [
        name
        for name in (options.only or STAGES[options.stage])
        if name not in (CEILINGS, *options.skip) and (options.only or not merged.is_done(name))
    ]
    return {name: limits[name] for name in (CEILINGS, *names)}


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
        epilog="example: python benchmarks/gpu_suite.py --stage 1 --only kernels",
    )
    parser.add_argument(
        "--stage", type=int, choices=list(STAGES), default=1, help="stage to run (default: 1)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="the .json of an earlier stage on this kind of GPU; its complete parts are kept",
    )
    parser.add_argument(
        "--only",
        default=[],
        type=_parts,
        metavar="NAME,…",
        help=f"parts to run, of {', '.join(PARTS)}; also if they are complete",
    )
    parser.add_argument(
        "--skip", default=[], type=_skippable, metavar="NAME,…", help="parts to leave out"
    )
    parser.add_argument("--out", help="folder for the results (default: benchmarks/results)")
    parser.add_argument(
        "--budget",
        type=float,
        default=STAGE_S,
        metavar="SECONDS",
        help=f"time limit of all parts; the part that runs then fails (default: {STAGE_S:g})",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run small on the CPU; goals are meaningless; written only with --out",
    )
    return parser


if __name__ == "__main__":
    # As an exception, so that the parts' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
