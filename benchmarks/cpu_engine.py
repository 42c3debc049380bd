"""Compares tokens per second of the CPU engine and `transformers` on the same weights and threads.

    python benchmarks/cpu_engine.py [--shape 10m] [--rounds 5] [--quick] [--write]

Needs `pip install transformers`. Three workloads, in turns, in one process:
- lockstep: 16 prompts of 64 tokens, 128 new tokens each, for both as one batch of 16;
- mixed: 64 prompts of 64 tokens with outputs U(10, 200): `generate` takes them in batches of 16,
  each as long as its longest answer; the engine in the mode `continuous`;
- one: a single request, for the overhead per step.
Tokens are greedy and must be the same in both. Targets: 1.3 × lockstep, 3 × mixed.

Measurements behind decisions, each interleaved with its alternative:
- Matrices (decision 50), shape `10m`: with MKL alone 1.09 times the lockstep tokens of
  `transformers` on an AMD EPYC and 1.38 on a Xeon. With oneDNN 1.2 to 1.6 times the tokens per CPU
  second on AMD. On a Xeon (one core, seven rounds) MKL for up to 1 024 outputs gives 1.07 times the
  tokens in lockstep, 1.14 mixed and 1.21 alone, compared with oneDNN for all matrices.
- Attention in place (decision 52): a step of 16 rows at 128 positions takes 2.6 instead of 3.0 ms,
  of 64 rows 7.8 instead of 10.2 (one core of an AMD EPYC, least of 40 rounds).
- Contiguous KV blocks (decision 53): 32 rows of `tiny` with up to 1 000 positions take 5.1 ms, with
  scattered blocks 8.1 ms (medians of 60 steps, 2 MiB pages).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from rig.machine import machine
from rig.peer_config import llama_config

from loadgen.system.clock import MonotonicClock
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import Executor, Site
from reference_engine.executors.torch_cpu import TorchCpuExecutor
from reference_engine.model.weights import random_weights
from reference_engine.model.zoo import resolve
from reference_engine.policies.continuous import Continuous
from reference_engine.state.kv import KvPool
from reference_engine.state.model_config import ModelConfig
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request

RESULTS = Path(__file__).parent / "results" / "cpu_engine.json"
TARGETS = {"lockstep": 1.3, "mixed": 3.0}
BATCH, N_PROMPT, N_BLOCKS, MAX_LEN = 16, 64, 2048, 512

Work = list[tuple[list[int], int]]  # prompts and how many tokens each shall get
Answers = list[list[int]]


def works(config: ModelConfig) -> dict[str, Work]:
    rng = np.random.default_rng(7)

    def prompts(n: int) -> list[list[int]]:
        drawn: list[list[int]] = rng.integers(
            0, min(256, config.vocab_size), (n, N_PROMPT)
        ).tolist()
        return drawn

    lengths = rng.integers(10, 200, 64, endpoint=True).tolist()
    return {
        "lockstep": [(prompt, 128) for prompt in prompts(BATCH)],
        "mixed": list(zip(prompts(64), lengths, strict=True)),
        "one": [(prompt, 128) for prompt in prompts(1)],
    }


class Ours:
    """The engine's core and its CPU executor, without a server."""

    def __init__(self, shape: str, threads: int) -> None:
        site = Site(resolve(shape), N_BLOCKS, 16, MAX_LEN, time.sleep)
        self._executor: Executor = TorchCpuExecutor(threads=threads).build(site)
        self._limits = Limits(256, 4096, MAX_LEN, site.model.config.vocab_size)

    def __call__(self, work: Work) -> Answers:
        clock = MonotonicClock()
        kv = KvPool(N_BLOCKS, prefix_cache=False)
        state = EngineState(self._limits, kv, clock, Continuous())
        requests = [
            Request(id=str(k), tokens=list(prompt), max_tokens=n, arrived_s=clock.now_s())
            for k, (prompt, n) in enumerate(work)
        ]
        for request in requests:
            state.admit(request)
        while state.has_work:
            step(state, self._executor)
        return [request.tokens[request.n_prompt :] for request in requests]


class Transformers:
    """`generate` in batches of 16; every batch is as long as its longest answer."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = transformers.LlamaForCausalLM(llama_config(transformers, config)).eval()
        self._model.load_state_dict(random_weights(config, seed=0))
        self._model.generation_config.eos_token_id = None

    def __call__(self, work: Work) -> Answers:
        answers: Answers = []
        for first in range(0, len(work), BATCH):
            part = work[first : first + BATCH]
            ids = torch.tensor([prompt for prompt, _ in part])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(n for _, n in part),
                    do_sample=False,
                    pad_token_id=0,
                )
            rows = out[:, N_PROMPT:].tolist()
            answers += [row[:n] for row, (_, n) in zip(rows, part, strict=True)]
        return answers


def timed(run: Callable[[Work], Answers], work: Work) -> tuple[float, Answers]:
    """(useful output tokens per second, the answers)."""
    start_s = time.perf_counter()
    answers = run(work)
    return sum(n for _, n in work) / (time.perf_counter() - start_s), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="10m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    options = parser.parse_args()
    config = resolve(options.shape).config
    ours, theirs = Ours(options.shape, options.threads), Transformers(config)
    torch.set_num_threads(options.threads)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in works(config)}
    for turn in range(1 if options.quick else options.rounds):
        for name, work in works(config).items():
            sides = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
            found = {side: timed(side, work) for side in sides}
            if found[ours][1] != found[theirs][1]:
                sys.exit(f"{name}: the two do not answer with the same tokens")
            rates[name].append((found[ours][0], found[theirs][0]))
    summary = {name: _summary(pairs) for name, pairs in rates.items()}
    _print(summary)
    if options.write:
        record = {
            "machine": machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "shape": options.shape,
            "threads": options.threads,
            "rounds": len(rates["mixed"]),
            "works": summary,
        }
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(summary[name]["ratio"] < target for name, target in TARGETS.items()))


def _summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "ours_tokens_per_s": round(statistics.median(p[0] for p in pairs), 1),
        "transformers_tokens_per_s": round(statistics.median(p[1] for p in pairs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def _print(summary: dict[str, dict[str, float]]) -> None:
    print(f"{'work':10} {'ours':>10} {'transformers':>13} {'ratio':>7}  [min, max]  target")
    for name, row in summary.items():
        ours, theirs = row["ours_tokens_per_s"], row["transformers_tokens_per_s"]
        span = f"[{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]"
        target = TARGETS.get(name, "–")
        print(f"{name:10} {ours:8.0f}/s {theirs:11.0f}/s {row['ratio']:7.2f}  {span}  {target}")


if __name__ == "__main__":
    main()
