"""What a step of the bundled engine costs on one core of this machine: fits
`reference_engine.cost_model.CPU_COSTS` and says how well, on steps that were not fitted.

Run: python benchmarks/fit_cpu_cost.py [shape …] [--write]; `--write` keeps the result with the
machine in benchmarks/results. Each step is the fastest of three, in random order; the coefficients
are non-negative least squares of relative errors.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.drive.instrument import host
from reference_engine.cost_model import StepShape
from reference_engine.executors.base import EXECUTORS, Executor, Row, Site, StepBatch
from reference_engine.kv import BLOCK_TOKENS, KvPool
from reference_engine.model.zoo import resolve
from reference_engine.sequence import Request

SHAPES = ("nano", "tiny", "10m")
N_STEPS, N_REPEATS, N_BLOCKS = 160, 3, 4096
COEFFICIENTS = ("step_s", "seq_s", "token_s", "context_token_s", "prefill_attention_s")


def main(names: list[str]) -> None:
    results = {name: fit(name) for name in names or SHAPES}
    for name, found in results.items():
        words = ", ".join(f"{key}={found[key]:.4g}" for key in COEFFICIENTS)
        print(f'    "{name}": StepCost({words}),  # held out: {found["mape"]:.1%}')
    machine = {key: host()[key] for key in ("cpu_model", "cpus", "platform", "python")}
    print(machine)
    if "--write" in sys.argv:
        text = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "shapes": results}
        path = Path(__file__).parent / "results" / "fit_cpu_cost.json"
        path.write_text(json.dumps(text, indent=2) + "\n")


def fit(name: str) -> dict[str, Any]:
    source = resolve(name)
    site = Site(source, N_BLOCKS, BLOCK_TOKENS, source.config.max_model_len, time.sleep)
    executor = EXECUTORS.build({"kind": "torch_cpu"}).build(site)
    rng = np.random.default_rng(0)
    shapes, batches = [], []
    for _ in range(N_STEPS):
        batch, held = random_batch(rng, source.config.max_model_len)
        batches.append((batch, held))
        shapes.append(batch.shape())
    seconds = np.full(N_STEPS, np.inf)
    for _ in range(N_REPEATS):
        for k in rng.permutation(N_STEPS):
            seconds[k] = min(seconds[k], timed(executor, batches[k][0]))
    columns = np.array([terms(shape) for shape in shapes])
    train = np.arange(N_STEPS) % 4 != 0
    cost = solved(columns[train], seconds[train])
    guessed = columns[~train] @ cost
    return {
        **dict(zip(COEFFICIENTS, cost.tolist(), strict=True)),
        "mape": float(np.mean(np.abs(guessed / seconds[~train] - 1))),
        "n_steps": N_STEPS,
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
    start = time.perf_counter()
    executor.execute(batch)
    return time.perf_counter() - start


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if not name.startswith("--")])
