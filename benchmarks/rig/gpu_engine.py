"""The engine without a server: decode steps by batch and context, whole works, the CPU's share."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from loadgen.clock import MonotonicClock
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import Executor, Site
from reference_engine.executors.torch_cuda import TorchCuda, TorchCudaExecutor
from reference_engine.model.zoo import resolve
from reference_engine.policies.chunked import Chunked
from reference_engine.state.batch import StepBatch
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request
from rig.gpu_ceilings import Place

BLOCK = 16
Work = list[tuple[list[int], int]]  # prompts and how many tokens each shall get


@dataclass(frozen=True)
class Built:
    """A shape on a device, ready for any number of works."""

    executor: Executor
    n_blocks: int
    limits: Limits

    def state(self, token_budget: int) -> EngineState:
        policy = Chunked(token_budget=token_budget, max_num_seqs=self.limits.max_num_seqs)
        kv = KvPool(self.n_blocks, prefix_cache=False)
        return EngineState(self.limits, kv, MonotonicClock(), policy, async_depth=1)


def built(shape: str, place: Place, max_num_seqs: int = 256, max_model_len: int = 9216) -> Built:
    """Random weights, KV of all memory that is left."""
    kind = TorchCudaExecutor(
        on=place.device,
        kernels="triton" if place.is_gpu else "plain",
        dtype="bfloat16" if place.is_gpu else "float32",
    )
    source = resolve(shape)
    limits = Limits(max_num_seqs, 8192 + max_num_seqs, max_model_len, source.config.vocab_size)
    n_blocks = 0 if place.is_gpu else 2048
    site = Site(
        source, n_blocks, BLOCK, max_model_len, time.sleep, 0, max_num_seqs, limits.max_step_tokens
    )
    executor = kind.build(site)
    return Built(executor, executor.caps.n_blocks, limits)


def decode_step_s(engine: Built, n_rows: int, context: int, n_steps: int = 30) -> float:
    """Seconds of one decode step of rows that are all at `context`, launch to tokens; the KV is
    whatever is there, since time does not depend on it."""
    width = -(-(context + n_steps + 4) // BLOCK)
    assert n_rows * width <= engine.n_blocks, (
        f"{n_rows} rows of {context} tokens need {n_rows * width} blocks of {engine.n_blocks}"
    )
    requests = []
    for i in range(n_rows):
        made = Request(id=f"r{i}", tokens=[1] * (context + 1), max_tokens=n_steps, arrived_s=0.0)
        made.blocks = list(range(i * width, (i + 1) * width))
        made.n_computed = context
        requests.append(made)
    found = []
    for _ in range(n_steps):
        began_s = time.perf_counter()
        result = engine.executor.execute(StepBatch(decodes=requests))
        found.append(time.perf_counter() - began_s)
        for made, token in zip(requests, result.tokens, strict=True):
            made.tokens.append(token)
            made.n_computed += 1
    return statistics.median(found[3:])


@dataclass(frozen=True)
class Worked:
    """A whole work: `plan_s` and `prepare_s` are medians over full steps of the CPU's part, while
    the device is not waited for."""

    duration_s: float
    output_tokens: int
    n_steps: int
    plan_s: float
    prepare_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s


def worked(engine: Built, work: Work, token_budget: int = 8192) -> Worked:
    """All requests at once, mode `chunked`, planned ahead."""
    state = engine.state(token_budget)
    executor = _Watched(engine.executor)
    for k, (prompt, n) in enumerate(work):
        state.admit(Request(id=str(k), tokens=list(prompt), max_tokens=n, arrived_s=0.0))
    began_s = time.perf_counter()
    while state.has_work:
        step(state, executor)
    duration_s = time.perf_counter() - began_s
    most = max(record.n_decode for record in state.log.steps)
    full = [r.plan_s for r in state.log.steps if r.n_decode >= 0.9 * most]
    return Worked(
        duration_s,
        sum(n for _, n in work),
        state.counters.steps,
        statistics.median(full),
        statistics.median(executor.launch_s) if executor.launch_s else float("nan"),
    )


class _Watched:
    """How long launching a decode step of the largest size keeps the CPU."""

    def __init__(self, inner: Executor) -> None:
        assert isinstance(inner, TorchCuda)
        self._inner, self.caps = inner, inner.caps
        self._most = 0
        self.launch_s: list[float] = []

    def execute(self, batch: StepBatch):  # type: ignore[no-untyped-def]  # as the executor's
        return self.launch(batch)()

    def launch(self, batch: StepBatch):  # type: ignore[no-untyped-def]
        n = len(batch.decodes)
        began_s = time.perf_counter()
        wait = self._inner.launch(batch)
        took_s = time.perf_counter() - began_s
        if not batch.rows and n >= self._most:
            if n > self._most:
                self._most = n
                self.launch_s.clear()
            self.launch_s.append(took_s)
        return wait


def mixed_work(n: int, low: int, high: int, vocabulary: int, seed: int = 0) -> Work:
    """`n` requests with prompts and outputs uniform on [low, high]."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(low, high, (n, 2), endpoint=True)
    return [(rng.integers(0, vocabulary, p).tolist(), int(o)) for p, o in sizes.tolist()]
