"""Python time of a layer in a step of decodes and prompts: launches by Triton, and cached.

    TRITON_DEFAULT_FP_FUSION=1 python benchmarks/launch_cost.py [--rounds 30] [--write]

No GPU is needed: kernels are compiled for an H100, and a stand-in for Triton's driver takes their
launches and returns at once. A real driver adds some 2 µs to a launch, the same to both. `other_us`
is a layer without launches: torch's operations, products of small matrices included. All three take
turns of a step of 16 layers, so that a slow moment of the machine hits each; CPU time of the
thread. `launch_ratio` compares the launches alone, by the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rig.machine import machine
from rig.triton_stand_in import StandInDriver

from reference_engine.kernels.ops import Ops, ops
from reference_engine.kernels.tiles import PromptPiece, Tiles, cut_tiles, planned
from reference_engine.model.paged import PagedLlama, PagedStep
from reference_engine.model.weights import random_weights
from reference_engine.state.model_config import ModelConfig

N_LAYERS, N_DECODES, N_PROMPT, BLOCK_TOKENS, N_BLOCKS = 16, 4, 8, 16, 64
CONFIG = ModelConfig(N_LAYERS, 64, 4, 2, 16, 176, 320)
RESULTS = Path(__file__).parent / "results" / "launch_cost.json"


def model_of(operations: Ops) -> PagedLlama:
    weights = random_weights(CONFIG, 0)
    built = PagedLlama(CONFIG, weights, operations, BLOCK_TOKENS, 256)
    built.cache = built.memory(N_BLOCKS)
    return built


def without_launches() -> Ops:
    """The operations of Triton with launches that do nothing."""
    operations: tuple[Any, ...] = ops("triton")  # of partial functions
    return Ops(*(partial(made, launch=_do_nothing) for made in operations))


def _do_nothing(*arguments: object, **constants: object) -> None:
    pass


def mixed_step() -> PagedStep:
    """Four decodes at 100 tokens and a prompt of eight."""
    n, context = N_DECODES, 100
    numbers = torch.zeros(n + N_PROMPT, dtype=torch.int32)
    tables = torch.arange(5 * 16, dtype=torch.int32).view(5, 16) % N_BLOCKS
    rows = torch.arange(n, dtype=torch.int32)
    contexts = torch.full((n,), context, dtype=torch.int32)
    group = CONFIG.n_heads // CONFIG.n_kv_heads
    tiles = Tiles(torch.from_numpy(cut_tiles([PromptPiece(n, 0, N_PROMPT, 0)], group)))
    work = planned([context] * n, 132)
    return PagedStep(numbers, numbers, numbers, tables, n, rows, contexts, tiles, work=work)


def layer_s(model: PagedLlama, step: PagedStep, logits: torch.Tensor) -> float:
    began_s = time.thread_time()
    model.forward(step, logits)
    return (time.thread_time() - began_s) / N_LAYERS


@torch.inference_mode()
def measure(n_rounds: int) -> dict[str, float]:
    """Medians in µs per layer, and the ratio of each round's two times, with its quartiles."""
    driver = StandInDriver()
    driver.activate()
    torch.set_num_threads(1)
    step, logits = mixed_step(), torch.empty(N_DECODES + N_PROMPT, CONFIG.vocab_size)
    models = [
        model_of(operations)
        for operations in (ops("triton", is_cached=False), ops("triton"), without_launches())
    ]
    for model in models:
        for _ in range(3):  # compiles
            layer_s(model, step, logits)
    before_n = driver.n_launches
    layer_s(models[1], step, logits)
    n_launches = (driver.n_launches - before_n) / N_LAYERS
    rounds = [[layer_s(model, step, logits) for model in models] for _ in range(n_rounds)]
    by_triton, cached, other = (statistics.median(times) for times in zip(*rounds, strict=True))
    low, middle, high = statistics.quantiles([before / after for before, after, _ in rounds], n=4)
    return {
        "launches_per_layer": n_launches,
        "by_triton_us": by_triton * 1e6,
        "cached_us": cached * 1e6,
        "other_us": other * 1e6,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "launch_ratio": (by_triton - other) / (cached - other),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds (default: 30)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    figures = measure(options.rounds)
    print(json.dumps(figures, indent=1))
    if options.write:
        date = datetime.now(UTC).date().isoformat()
        result = {"date": date, "machine": machine(), **figures}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
