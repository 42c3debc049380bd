"""Everything that only a GPU can tell, in one command: `make gpu-check`.

    python benchmarks/gpu_suite.py [--long] [--experiments] [--only NAME,…] [--skip NAME,…]
    python benchmarks/gpu_suite.py --rehearse        # the same code on the CPU, tiny; keeps nothing

Runs the tests marked `gpu`, measures the ceilings of this GPU (copy, matmul) and judges everything
as a share of them: each kernel, decode steps, whole works, the CPU's part of a step, the HTTP path
against the engine alone, `transformers` on the same weights, and the batching modes under load.
Writes results/gpu-<name>-<date>.json and .md if all parts ran. Without a GPU it says so and exits
0; a missed target, or a part that failed, exits 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rig.gpu_ceilings import Ceilings, Place, ceilings
from rig.gpu_engine import Built, built, decode_step_s, mixed_work, worked
from rig.gpu_experiments import attention, green_contexts, parts_of_a_gpu
from rig.gpu_kernels import all_kernels
from rig.gpu_peer import Peer
from rig.gpu_server import answered, compared_modes, server, tokens_per_s
from rig.gpu_table import markdown
from rig.machine import Goal, machine

from loadgen.errors import nearest
from reference_engine.kernels.ops import Ops, ops
from reference_engine.model.zoo import SHAPES

ROOT = Path(__file__).parents[1]
CONTEXTS = (1024, 4096, 8192)


@dataclass
class Suite:
    """What was found so far; every part adds its figures and its goals."""

    place: Place
    is_long: bool
    logs: Path
    top: Ceilings = field(default_factory=lambda: Ceilings(float("nan"), float("nan")))
    found: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU, so that nothing is judged or kept."""
        return self.place.cuda is None

    @property
    def is_small(self) -> bool:
        return self.place.scale > 1

    def shape(self, name: str) -> str:
        return "nano" if self.is_small else name

    def ops(self) -> Ops:
        return ops("triton" if self.place.is_gpu else "plain")

    def aim(
        self, name: str, value: float, limit: float, unit: str = "", floor: bool = True
    ) -> None:
        goal = Goal(name, value, limit, unit, is_floor=floor)
        self.goals.append(goal)
        print(goal, flush=True)

    def run(self, name: str, part: Callable[[Suite], None]) -> None:
        """A part that fails is a part that failed, and the others are still worth having."""
        print(f"\n== {name}", flush=True)
        began_s = time.monotonic()
        try:
            part(self)
        except Exception as error:  # the boundary of a part: kept, shown, and exits 1
            traceback.print_exc()
            self.failures[name] = f"{type(error).__name__}: {error}"
        self.seconds[name] = time.monotonic() - began_s
        self.place.give_back()
        print(f"   {self.seconds[name]:.1f} s", flush=True)


def gpu_tests(suite: Suite) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    if suite.is_rehearsal:
        command.append("--collect-only")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-1500:], done.stderr[-1500:])
    suite.found["tests"] = done.stdout.strip().splitlines()[-1:]
    nothing_collected = 5  # without a GPU every file is skipped
    if done.returncode not in ((0, nothing_collected) if suite.is_rehearsal else (0,)):
        raise RuntimeError(f"the tests of tests/gpu ended with {done.returncode}")


def measure_ceilings(suite: Suite) -> None:
    suite.top = ceilings(suite.place)
    suite.found["ceilings"] = asdict(suite.top)
    print(
        f"copy {suite.top.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"matmul {suite.top.matmul_flops / 1e12:.0f} TFLOP/s"
    )


def kernels(suite: Suite) -> None:
    config = SHAPES[suite.shape("8b")]
    chosen = suite.ops()
    timed = all_kernels(chosen, config, suite.place, suite.top)
    suite.found["kernels"] = [asdict(one) for one in timed]
    for one in timed:
        print(
            f"{one.kernel:18} {one.case:28} {one.seconds * 1e6:9.1f} µs {one.share:7.1%} {one.of}"
        )
        if one.kernel == "decode attention" and not one.case.startswith("batch 1,"):
            suite.aim(f"decode attention, {one.case}", one.share, 0.75, "of copy")


def decode_steps(suite: Suite) -> None:
    for name in ("0.6b", "8b"):
        engine = built(suite.shape(name), suite.place)
        config, context = SHAPES[suite.shape(name)], 1024 // suite.place.scale
        for n_rows in (1, 32, 256):
            seconds = decode_step_s(engine, suite.place.rows(n_rows), context)
            roof_s = suite.top.decode_roof_s(config, n_rows, context)
            row = {"shape": name, "rows": n_rows, "context": context, "seconds": seconds}
            suite.found.setdefault("decode_steps", []).append({**row, "share": roof_s / seconds})
            print(f"{name} × {n_rows}: {seconds * 1e3:.3f} ms, roof {roof_s * 1e3:.3f} ms")
            if n_rows > 1:
                suite.aim(f"decode step {name}, batch {n_rows}", roof_s / seconds, 0.6, "of roof")
        if name == "8b":
            _long_answers(suite, engine)
        del engine
        suite.place.give_back()


def _long_answers(suite: Suite, engine: Built) -> None:
    """Batch 32, 8 k outputs: steps at three contexts and what lies between them."""
    n_steps = 8 if suite.is_small else 512
    points = {
        context: decode_step_s(engine, suite.place.rows(32), context // suite.place.scale, n_steps)
        for context in (c - n_steps for c in CONTEXTS)
    }
    total_s = extrapolated_s(points, 8192)
    suite.found["long_answers"] = {"points": points, "total_s": total_s}
    suite.aim("8b, batch 32, 8 k outputs, extrapolated", total_s, 110, "s", floor=False)
    if suite.is_long:
        done = worked(engine, [([1] * 16, 8192)] * 32)
        suite.found["long_answers"]["whole_s"] = done.duration_s
        suite.aim("8b, batch 32, 8 k outputs, whole", done.duration_s, 110, "s", floor=False)


def extrapolated_s(step_s: dict[int, float], n_steps: int) -> float:
    """Seconds of steps at contexts 1 … n_steps from a few of them: a straight line between
    neighbours, the nearest one outside."""
    contexts = sorted(step_s)
    steps = np.interp(np.arange(1, n_steps + 1), contexts, [step_s[c] for c in contexts])
    return float(steps.sum())


def throughput(suite: Suite) -> None:
    low, high, n = (100, 1024, 256) if not suite.is_small else (4, 20, 8)
    name = suite.shape("0.6b")
    engine = built(name, suite.place)
    work = mixed_work(n, low, high, SHAPES[name].vocab_size)
    worked(engine, mixed_work(8, low, high, 256, seed=1))  # compiles what is not compiled yet
    done = worked(engine, work)
    lengths = [(len(prompt), n_output) for prompt, n_output in work]
    roof_s = suite.top.work_roof_s(SHAPES[name], lengths, 256)
    suite.found["throughput"] = {
        **asdict(done),
        "tokens_per_s": done.tokens_per_s,
        "share": roof_s / done.duration_s,
    }
    suite.aim(f"{n} requests, in/out U({low}, {high}), 0.6b", done.tokens_per_s, 15_000, "tok/s")
    cpu_s = done.plan_s + done.prepare_s
    suite.aim("plan + prepare at 256 sequences", cpu_s * 1e3, 0.3, "ms", floor=False)


def over_http(suite: Suite) -> None:
    n, n_prompt, n_output = (256, 128, 512) if not suite.is_small else (2, 20, 8)
    name = suite.shape("1b")
    engine = built(name, suite.place, max_model_len=4096)
    worked(engine, [([1] * n_prompt, 8)] * n)
    alone = worked(engine, [([1] * n_prompt, n_output)] * n).tokens_per_s
    del engine
    suite.place.give_back()
    log_dir = suite.logs / "steps"
    with server(name, suite.place, log_dir, 256 if not suite.is_small else 8) as url:
        answered(url, [(0.0, n_prompt, 8)] * n)
        served = tokens_per_s(answered(url, [(0.0, n_prompt, n_output)] * n))
        rate = 0.6 * served / 150 if not suite.is_small else 2.0
        duration_s, longest = (8.0, 3500) if not suite.is_small else (1.0, 300)
        modes = compared_modes(url, rate, duration_s, longest)
    suite.found["http"] = {"alone": alone, "served": served, "share": served / alone}
    suite.found["modes"] = {"rate_per_s": rate, "of": modes}
    for mode, row in modes.items():
        print(mode, {key: round(value, 4) for key, value in row.items()})
    suite.aim("HTTP path against the engine alone, 256 streams, 1b", served / alone, 0.95)


def peers(suite: Suite) -> None:
    n_rows, n_new = (32, 64) if not suite.is_small else (2, 4)
    found: dict[str, Any] = {}
    suite.found["transformers"] = found
    try:
        peer = Peer(suite.shape("8b"), suite.place)
    except ImportError as error:
        found["not run"] = str(error)
        if not suite.is_rehearsal:
            raise
        print(f"not rehearsed: {error}")
        return
    found |= {"version": peer.version, "attention": peer.attention}
    contexts = [c - 512 for c in CONTEXTS] if suite.is_long else [CONTEXTS[0] - 512]
    for context in contexts:
        at = context // suite.place.scale
        found[f"generate, context {context}"] = peer.generate_step_s(n_rows, at, n_new)
    ours = suite.found.get("long_answers", {}).get("points", {})
    for context in contexts:
        name = f"generate_batch, context {context}"
        try:
            theirs = peer.generate_batch_step_s(n_rows, context // suite.place.scale, n_new)
        except Exception as error:  # theirs to fail: kept with its reason, and exits 1
            found[name] = f"failed: {type(error).__name__}: {error}"
            suite.failures[f"transformers, {name}"] = found[name]
            continue
        found[name] = theirs
        if context in ours:
            ratio = theirs / ours[context]
            suite.aim(f"generate_batch / ours, 8b × 32 at {context}", ratio, 2.0)


def sanitizer(suite: Suite) -> None:
    """Memory errors of the kernels, where NVIDIA's tool is there and starts; else it is said."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or suite.is_rehearsal:
        suite.found["sanitizer"] = "not run: compute-sanitizer is not installed"
        print(suite.found["sanitizer"])
        return
    chosen = "bfloat16 and (silu or norm or (decode and heads0) or (chunk and heads0))"
    tests = ["-m", "pytest", "-q", "tests/gpu/test_kernels_on_gpu.py", "-k", chosen]
    try:
        done = subprocess.run(
            [tool, "--tool", "memcheck", sys.executable, *tests],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=90,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        suite.found["sanitizer"] = "not run: not done after 90 s"
        print(suite.found["sanitizer"])
        return
    if "ERROR SUMMARY" not in done.stdout:
        suite.found["sanitizer"] = f"not run: {(done.stdout + done.stderr)[-300:]}"
    elif "ERROR SUMMARY: 0 errors" not in done.stdout:
        raise RuntimeError(done.stdout[-1000:])
    else:
        suite.found["sanitizer"] = "clean"
    print(suite.found["sanitizer"])


def experiments(suite: Suite) -> None:
    """What nobody has decided on; kept beside the results, and no goal."""
    found: dict[str, Any] = {}
    suite.found["experiments"] = found
    config = SHAPES[suite.shape("8b")]
    found["attention"] = attention(suite.ops(), config, suite.place, suite.top)
    contexts = green_contexts() if suite.place.is_gpu else None
    found["parts of a GPU"] = parts_of_a_gpu(suite.place, contexts)
    print(json.dumps(found, indent=2, default=float))


CEILINGS = "ceilings"
PARTS: dict[str, Callable[[Suite], None]] = {
    CEILINGS: measure_ceilings,
    "kernels": kernels,
    "decode_steps": decode_steps,
    "throughput": throughput,
    "http": over_http,
    "transformers": peers,
    "tests": gpu_tests,
    "sanitizer": sanitizer,
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
    keeps = not given.rehearse and len(wanted) == len(PARTS)
    parts = {name: PARTS[name] for name in wanted}
    if given.experiments:
        parts["experiments"] = experiments
    with tempfile.TemporaryDirectory() as directory:
        out = Path(given.out or ROOT / "benchmarks" / "results")
        suite = Suite(place, given.long, out / "gpu-logs" if keeps else Path(directory))
        suite.logs.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            over_s = sum(suite.seconds.values()) - given.budget
            if over_s > 0 and not given.long:
                # What was found is worth more than what is left: machines are lent for a time.
                suite.failures[name] = f"not begun: {given.budget:g} s were over {over_s:.0f} s ago"
            else:
                suite.run(name, part)
        return _concluded(suite, out if keeps else None)


def _concluded(suite: Suite, out: Path | None) -> int:
    """Tells what was found, and writes it where there is a place for it; the exit code."""
    for name, why in suite.failures.items():
        print(f"  FAILED {name}: {why}")
    if suite.is_rehearsal:
        print("rehearsed on the CPU; nothing is kept, no target counts")
        return 1 if suite.failures else 0
    gpu = suite.place.cuda.get_device_properties(0)
    today = datetime.now(UTC).date().isoformat()
    content = {
        "date": today,
        "machine": machine(),
        "gpu": {"name": gpu.name, "memory_bytes": gpu.total_memory},
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": _commit(),
        **suite.found,
        "goals": [goal.to_json() for goal in suite.goals],
        "failures": suite.failures,
        "seconds": suite.seconds,
    }
    stem = f"gpu-{gpu.name.split()[-1].lower()}-{today}"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2, default=float)
        (out / f"{stem}.json").write_text(text + "\n", encoding="utf-8")
    table = markdown(content)
    if out is not None:
        (out / f"{stem}.md").write_text(table, encoding="utf-8")
    print(table)
    if out is None:
        print("only some parts ran; no result is written, not to pass for a whole one")
    return 1 if suite.failures or not all(goal.met for goal in suite.goals) else 0


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


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
    some = f"parts, of {parts}; {CEILINGS} are always measured; writes no result"
    parser.add_argument("--only", default=[], type=_parts, metavar="NAME,…", help=some)
    parser.add_argument(
        "--skip", default=[], type=_dispensable, metavar="NAME,…",
        help="parts to leave out; writes no result",
    )  # fmt: skip
    parser.add_argument("--out", help="where the results go (default: benchmarks/results)")
    parser.add_argument(
        "--experiments", action="store_true",
        help="also what is tried and not judged: attention in one launch, 8-bit KV, parts of a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="SECONDS",
        help="after them no further part is begun, which counts as failed (480; none with --long)",
    )  # fmt: skip
    parser.add_argument(
        "--rehearse", action="store_true", help="run it tiny on the CPU and keep nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
