"""Fits the cost of a step of the bundled engine on one core of this machine
(`reference_engine.state.cost_model.CPU_COSTS`), and reports the error on steps outside the fit.

Run: python benchmarks/fit_cpu_cost.py [shape …] [--repeats 9] [--write] [--note TEXT]; `--write`
keeps the result with the machine and the note in benchmarks/results, and a test holds CPU_COSTS to
that file. Fit again when `cpu_engine.py` measures speeds that differ by more than 10 %.

The time of a step is the least CPU time of its repeats. Every repeat runs all steps in another
random order, so that a slow moment affects each step at most once. The coefficients are
non-negative least squares of relative errors on three steps of four; the error is computed on the
fourth. `noise` is how much longer the second fastest repeat took than the fastest (median of the
steps). Above a few per cent, other programs used the machine and distort the coefficients.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rig.machine import machine

from reference_engine.executors.base import EXECUTORS, Executor, Site
from reference_engine.model.zoo import resolve
from reference_engine.state.batch import Row, StepBatch
from reference_engine.state.cost_model import StepShape
from reference_engine.state.kv import BLOCK_TOKENS, KvPool
from reference_engine.state.sequence import Request

SHAPES = ("nano", "tiny", "10m")
N_STEPS, N_BLOCKS = 160, 4096
COEFFICIENTS = ("step_s", "seq_s", "token_s", "context_token_s", "prefill_attention_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results")
    parser.add_argument("--note", default="", help="the state of the machine, kept in the result")
    asked = parser.parse_args()
    results = {}
    for name in asked.shapes:
        found = results[name] = fit(name, max(2, asked.repeats))
        words = ", ".join(f"{key}={found[key]:.4g}" for key in COEFFICIENTS)
        print(f'    "{name}": StepCost({words}),')
        print(
            f"    # held out: {found['mape']:.1%} mean error, {found['error_p90']:.1%} p90, "
            f"{found['bias']:+.1%} bias; noise {found['noise']:.1%}",
            flush=True,
        )
    this_machine = machine()
    print(this_machine)
    if asked.write:
        text = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": this_machine,
            "note": asked.note,
            "shapes": results,
        }
        path = Path(__file__).parent / "results" / "fit_cpu_cost.json"
        path.write_text(json.dumps(text, indent=2) + "\n")


def fit(name: str, n_repeats: int) -> dict[str, Any]:
    source = resolve(name)
    site = Site(source, N_BLOCKS, BLOCK_TOKENS, source.config.max_model_len, time.sleep)
    executor = EXECUTORS.build({"kind": "torch_cpu"}).build(site)
    rng = np.random.default_rng(0)
    shapes, batches = [], []
    for _ in range(N_STEPS):
        batch, held = random_batch(rng, source.config.max_model_len)
        batches.append((batch, held))
        shapes.append(batch.shape())
    for batch, _ in batches[:8]:  # the first steps also build what torch keeps
        timed(executor, batch)
    taken = np.empty((n_repeats, N_STEPS))
    for repeat in taken:
        for k in rng.permutation(N_STEPS):
            repeat[k] = timed(executor, batches[k][0])
    taken.sort(axis=0)
    seconds = taken[0]
    columns = np.array([terms(shape) for shape in shapes])
    train = np.arange(N_STEPS) % 4 != 0
    cost = solved(columns[train], seconds[train])
    errors = columns[~train] @ cost / seconds[~train] - 1
    return {
        **dict(zip(COEFFICIENTS, cost.tolist(), strict=True)),
        "mape": float(np.mean(np.abs(errors))),
        "error_p90": float(np.quantile(np.abs(errors), 0.9)),
        "bias": float(np.mean(errors)),
        "noise": float(np.median(taken[1] / taken[0] - 1)),
        "n_steps": N_STEPS,
        "n_repeats": n_repeats,
    }


def terms(shape: StepShape) -> list[float]:
    """What each coefficient multiplies."""
    tokens = shape.prefill_tokens + shape.n_decode
    return [1, shape.n_seqs, tokens, shape.context_tokens, shape.prefill_attention]


def solved(columns: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    from scipy.optimize import nnls

    found, _ = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    return np.asarray(found)


def random_batch(rng: np.random.Generator, max_len: int) -> tuple[StepBatch, KvPool]:
    """Decodes of various contexts, or a piece of a prompt, or both."""
    pool = KvPool(N_BLOCKS, prefix_cache=False)
    n_decode = int(rng.choice([0, 1, 2, 4, 8, 16, 32, 48]))
    n_chunk = int(rng.choice([0, 16, 64, 128, 256, 512])) if n_decode else 64
    rows = []
    decodes = [placed(pool, f"d{k}", int(rng.integers(8, 900)), 1) for k in range(n_decode)]
    if n_chunk:
        start = int(rng.choice([0, 0, 256, 1024]))
        start = min(start, max_len - n_chunk - 1)
        rows.append(Row(placed(pool, "p", start, n_chunk), start, n_chunk, bool(rng.integers(2))))
    context = sum(request.n_computed for request in decodes)
    return StepBatch(tuple(rows), decodes, context_tokens=context), pool


def placed(pool: KvPool, name: str, n_computed: int, n_tokens: int) -> Request:
    """A request that has computed so many tokens and has room for more."""
    request = Request(name, [1] * (n_computed + n_tokens), 1 << 20, 0.0)
    assert pool.admit(request, n_computed + n_tokens)
    request.n_computed = n_computed
    return request


def timed(executor: Executor, batch: StepBatch) -> float:
    """CPU time of the thread, which is all there is with one torch thread: time that others had
    the core is not the step's."""
    start = time.thread_time()
    executor.execute(batch)
    return time.thread_time() - start


if __name__ == "__main__":
    main()
