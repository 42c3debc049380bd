"""The measured ceilings of a GPU, copy bandwidth and multiplication rate, and the times that follow
from them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reference_engine.state.cost_model import Hardware, StepShape, roofline_s
from reference_engine.state.model_config import ModelConfig


@dataclass(frozen=True)
class Place:
    """The device, the dtype and the size of a measurement. `scale` is 1 on a GPU; a rehearsal on a
    CPU divides sizes by a larger one. `cuda` is `torch.cuda`, or its stand-in in a test; None
    without a GPU."""

    device: str
    dtype: torch.dtype
    scale: int = 1
    cuda: Any = None

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def rows(self, n: int) -> int:
        """Rows of a batch, divided by `scale`."""
        return max(1, n // self.scale)

    def synchronise(self) -> None:
        if self.cuda is not None:
            self.cuda.synchronize()

    def release_memory(self) -> None:
        """Return the memory of deleted tensors to the device."""
        gc.collect()
        if self.cuda is not None:
            self.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Memory of the device that tensors of this process occupy; 0 without CUDA."""
        return 0 if self.cuda is None else int(self.cuda.memory_allocated())

    @property
    def n_processors(self) -> int:
        if self.cuda is None:
            return 2
        return int(self.cuda.get_device_properties(0).multi_processor_count)


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s of a copy (read and written), and operations/s of a matrix multiplication in the
    dtype, with the seconds of each repetition behind them."""

    copy_bytes_per_s: float
    matmul_flops: float
    copy_each_s: tuple[float, ...] = ()
    matmul_each_s: tuple[float, ...] = ()

    def decode_roof_s(self, config: ModelConfig, n_rows: int, context: float) -> float:
        """The least time of a decode step of `n_rows` rows, at `context` on average."""
        shape = StepShape(n_seqs=n_rows, n_decode=n_rows, context_tokens=round(n_rows * context))
        return roofline_s(config, self._hardware(), shape)

    def work_roof_s(
        self, config: ModelConfig, lengths: list[tuple[int, int]], n_rows: int
    ) -> float:
        """The least time for requests of (prompt, output) tokens, at most `n_rows` at once: all
        prompts at the rate of multiplication, then decode steps of the unfinished requests, each at
        its mean context.

        It is the optimum of this simple policy, not of all policies: shares of it can be compared
        with each other, not with 1.
        """
        total = 0.0
        for n_prompt, _ in lengths:
            shape = StepShape(1, n_prompt, n_prompt * n_prompt / 2)
            flops_alone = roofline_s(config, self._hardware(bandwidth=float("inf")), shape)
            total += flops_alone
        waiting = list(lengths)
        running: list[list[int]] = []
        while waiting or running:
            while waiting and len(running) < n_rows:
                n_prompt, n_output = waiting.pop(0)
                running.append([n_prompt + 1, n_output - 1])
            running = [row for row in running if row[1] > 0]
            if not running:
                continue
            n_steps = min(row[1] for row in running)
            mean = sum(row[0] for row in running) / len(running) + n_steps / 2
            total += n_steps * self.decode_roof_s(config, len(running), mean)
            for row in running:
                row[0] += n_steps
                row[1] -= n_steps
        return total

    def _hardware(self, bandwidth: float | None = None) -> Hardware:
        return Hardware(
            "measured", bandwidth or self.copy_bytes_per_s, self.matmul_flops, 0.0, 1.0, 1.0, 0.0
        )


@dataclass(frozen=True)
class Repeats:
    """A time measured independently more than once, in seconds."""

    each_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median, of two the mean."""
        return statistics.median(self.each_s)


def repeated(measure: Callable[[], float], n: int = 2) -> Repeats:
    return Repeats(tuple(measure() for _ in range(n)))


def timed_s(work: Callable[[], object], place: Place, n: int = 20, rounds: int = 5) -> float:
    """Seconds per call: median over rounds of n calls with a single wait at the end."""
    if place.scale > 1:
        n, rounds = 1, 2
    for _ in range(min(3, n)):
        work()
    place.synchronise()
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        for _ in range(n):
            work()
        place.synchronise()
        seconds.append((time.perf_counter() - began_s) / n)
    return statistics.median(seconds)


def ceilings(place: Place) -> Ceilings:
    """Times a copy of 2 GiB, and a square multiplication of random numbers (zeros need less power
    and would be faster), each twice."""
    size = (2 << 30) // place.scale
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=place.device)
    target = torch.empty_like(source)
    copy = repeated(lambda: timed_s(lambda: target.copy_(source), place, n=5))
    n = 8192 // min(place.scale, 32)
    a, b = (torch.randn(n, n, device=place.device).to(place.dtype) for _ in range(2))
    matmul = repeated(lambda: timed_s(lambda: a @ b, place, n=5))
    return Ceilings(
        2 * source.numel() / copy.seconds, 2 * n**3 / matmul.seconds, copy.each_s, matmul.each_s
    )
