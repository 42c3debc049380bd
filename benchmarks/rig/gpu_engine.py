"""The engine without a server: decode steps by batch and context, whole workloads, and the CPU time
of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadgen.system.clock import MonotonicClock
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import Executor, Site
from reference_engine.executors.torch_cuda import (
    TorchCuda,
    TorchCudaExecutor,
    WaitForTokens,
)
from reference_engine.model.zoo import resolve
from reference_engine.policies.chunked import Chunked
from reference_engine.state.batch import UNKNOWN, StepBatch
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request
from rig.gpu_ceilings import Place

BLOCK = 16
Workload = list[tuple[list[int], int]]  # prompt and number of output tokens of each request


@dataclass(frozen=True)
class BuiltEngine:
    """A shape on a device, ready for any number of workloads."""

    executor: Executor
    n_blocks: int
    limits: Limits

    def state(self, token_budget: int) -> EngineState:
        policy = Chunked(token_budget=token_budget, max_num_seqs=self.limits.max_num_seqs)
        kv = KvPool(self.n_blocks, prefix_cache=False)
        return EngineState(self.limits, kv, MonotonicClock(), policy, async_depth=1)


def build_engine(
    shape: str, place: Place, max_num_seqs: int = 256, max_model_len: int = 9216
) -> BuiltEngine:
    """An engine with random weights; KV takes all the memory that is left."""
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
    return BuiltEngine(executor, executor.caps.n_blocks, limits)


def decode_step_s(
    engine: BuiltEngine, contexts: Sequence[int], n_steps: int = 30, *, is_ahead: bool = False
) -> float:
    """Seconds of a decode step of a row at each of `contexts`: from launch to tokens, or with
    `is_ahead` from tokens to tokens while each step is launched before the tokens of the step
    before are read, as the engine runs. The KV is arbitrary, as the time does not depend on it."""
    requests = _decoding(engine, contexts, n_steps)
    measure = _ahead_step_s if is_ahead else _step_s
    return measure(engine, requests, n_steps)


def _decoding(engine: BuiltEngine, contexts: Sequence[int], n_steps: int) -> list[Request]:
    """A request that has computed each of `contexts`, with blocks for `n_steps` more tokens."""
    widths = [-(-(context + n_steps + 4) // BLOCK) for context in contexts]
    assert sum(widths) <= engine.n_blocks, (
        f"{len(contexts)} rows of up to {max(contexts)} tokens need {sum(widths)} blocks of "
        f"{engine.n_blocks}"
    )
    requests, first = [], 0
    for i, (context, width) in enumerate(zip(contexts, widths, strict=True)):
        request = Request(id=f"r{i}", tokens=[1] * (context + 1), max_tokens=n_steps, arrived_s=0.0)
        request.blocks = list(range(first, first + width))
        first += width
        request.n_computed = context
        requests.append(request)
    return requests


def _step_s(engine: BuiltEngine, requests: list[Request], n_steps: int) -> float:
    seconds = []
    for _ in range(n_steps):
        began_s = time.perf_counter()
        result = engine.executor.execute(StepBatch(decodes=requests))
        seconds.append(time.perf_counter() - began_s)
        for request, token in zip(requests, result.tokens, strict=True):
            request.tokens.append(token)
            request.n_computed += 1
    return statistics.median(seconds[3:])


def _ahead_step_s(engine: BuiltEngine, requests: list[Request], n_steps: int) -> float:
    launched = _launched(engine, requests)
    times = []
    for _ in range(n_steps - 1):
        following = _launched(engine, requests)
        for request, token in zip(requests, launched().tokens, strict=True):
            request.tokens[-2] = token
        times.append(time.perf_counter())
        launched = following
    launched()
    return statistics.median(after - before for before, after in pairwise(times[3:]))


def _launched(engine: BuiltEngine, requests: list[Request]) -> WaitForTokens:
    """Launch a step; its tokens are unknown until the returned function is called."""
    assert isinstance(engine.executor, TorchCuda)
    wait = engine.executor.launch(StepBatch(decodes=requests))
    for request in requests:
        request.tokens.append(UNKNOWN)
        request.n_computed += 1
    return wait


@dataclass(frozen=True)
class WorkloadTimes:
    """Times of a whole workload. `plan_s` and `prepare_s` are the CPU time to plan and to launch a
    full step, without waits for the device; medians over the full steps."""

    duration_s: float
    output_tokens: int
    n_steps: int
    plan_s: float
    prepare_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s


def run_workload(
    engine: BuiltEngine, workload: Workload, token_budget: int = 8192
) -> WorkloadTimes:
    """All requests at once, mode `chunked`, planned ahead."""
    state = engine.state(token_budget)
    executor = _TimedLaunches(engine.executor)
    for k, (prompt, n) in enumerate(workload):
        state.admit(Request(id=str(k), tokens=list(prompt), max_tokens=n, arrived_s=0.0))
    began_s = time.perf_counter()
    while state.has_work:
        step(state, executor)
    duration_s = time.perf_counter() - began_s
    max_rows = max(record.n_decode for record in state.log.steps)
    full = [record.plan_s for record in state.log.steps if record.n_decode >= 0.9 * max_rows]
    return WorkloadTimes(
        duration_s,
        sum(n for _, n in workload),
        state.counters.steps,
        statistics.median(full),
        statistics.median(executor.launch_s) if executor.launch_s else float("nan"),
    )


class _TimedLaunches:
    """An executor that records how long each launch of its largest decode step occupies the CPU."""

    def __init__(self, inner: Executor) -> None:
        assert isinstance(inner, TorchCuda)
        self._inner, self.caps = inner, inner.caps
        self._max_rows = 0
        self.launch_s: list[float] = []

    def execute(self, batch: StepBatch):  # type: ignore[no-untyped-def]  # as the executor's
        return self.launch(batch)()

    def can_launch_ahead(self, batch: StepBatch) -> bool:
        return self._inner.can_launch_ahead(batch)

    def launch(self, batch: StepBatch):  # type: ignore[no-untyped-def]
        n = len(batch.decodes)
        began_s = time.perf_counter()
        wait = self._inner.launch(batch)
        took_s = time.perf_counter() - began_s
        if not batch.rows and n >= self._max_rows:
            if n > self._max_rows:
                self._max_rows = n
                self.launch_s.clear()
            self.launch_s.append(took_s)
        return wait


def mixed_workload(n: int, low: int, high: int, vocabulary: int, seed: int = 0) -> Workload:
    """`n` requests with prompts and outputs uniform on [low, high]."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(low, high, (n, 2), endpoint=True)
    return [(rng.integers(0, vocabulary, p).tolist(), int(o)) for p, o in sizes.tolist()]
