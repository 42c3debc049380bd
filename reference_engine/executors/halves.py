"""Simulated steps of a GPU whose multiprocessors are divided: a half computes prompts, the other
decodes, both at the same time from the same memory.

A half with the share x of the multiprocessors does its arithmetic at the share x of the GPU's rate
and reads at min(1, x / 0.4) of its bandwidth. While both halves have work, the shares of the whole
GPU's speed that they reach add up to `gain` at most; beyond, both steps take longer by the same
factor.

Source: Shi et al., Nexus (arXiv 2507.06608), for the division, for the bandwidth that few
multiprocessors saturate and for the contention. The numbers were measured on an H200 with green
contexts (`benchmarks/results/gpu-h200-2026-11-26.md`): 32, 64 and 96 of 132 multiprocessors copied
at 60, 101 and 100 % of the whole GPU's rate, 36, 68 and 100 multiplied at 31, 56 and 70 %, and a
copy on 32 next to a product on 100 reached 1.20 of taking turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

from reference_engine.executors.base import Caps
from reference_engine.executors.delayed import NO_DELAY, StepDelay
from reference_engine.executors.simulated import Simulated
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.cost_model import StepCost, StepShape

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")

SPLIT_GAIN = 1.2
"""Measured: the work of two halves at the same time, relative to taking turns."""
_SATURATING = 0.4  # share of the multiprocessors that reads at the full bandwidth
_SHARES = tuple(k / 10 for k in range(9, 0, -1))  # of prompts, the largest first


def on_part(cost: StepCost, share: float) -> StepCost:
    """The cost of steps on a share (0 to 1] of the multiprocessors, with all other parts idle."""
    if share == 1:
        return cost
    reading = min(1.0, share / _SATURATING)
    return replace(
        cost,
        token_s=cost.token_s / share,
        head_s=cost.head_s / share,
        prefill_attention_s=cost.prefill_attention_s / share,
        weights_s=cost.weights_s / reading,
        expert_weights_s=cost.expert_weights_s / reading,
        context_token_s=cost.context_token_s / reading,
    )


class DividedGpu:
    """A GPU with a half for prompts, with the `share` of the multiprocessors, and a half for
    decodes. A half is slowed while the other has work, which `is_busy` of that half returns.

    Without a `share`, each step of prompts takes the largest of 90, 80 … 10 % with which a step of
    the present decodes takes at most `slack` times as long as on the whole GPU, or 10 %. A half
    then has the whole GPU while the other has no work. A step keeps its multiprocessors and its
    speed until it ends.
    """

    def __init__(
        self,
        cost: StepCost,
        share: float | None,
        gain: float = SPLIT_GAIN,
        slack: float = 1.3,
    ) -> None:
        self.cost, self.share, self.gain, self.slack = cost, share, gain, slack
        self.is_busy: dict[Side, Callable[[], bool]] = {}
        self.decoding: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._prompt_share = 0.5 if share is None else share
        self._prompt_speed = 0.0  # of the last step, relative to the whole GPU
        self._part = cache(lambda share: on_part(cost, share))

    def part(self, side: Side) -> StepCost:
        """The cost of steps of a half by its share alone."""
        return self._part(self._prompt_share if side == "prefill" else 1 - self._prompt_share)

    def duration_s(self, side: Side, shape: StepShape) -> float:
        """The time (s) of a step that begins now."""
        is_contended = self.is_busy["decode" if side == "prefill" else "prefill"]()
        share = self._share_of(side, is_contended)
        part_s, speed = self._part(share).estimate(shape), self._speed(share, shape)
        if side == "prefill":
            self._prompt_speed = speed
            other = self._speed(1 - share, self._decode_shape()) if is_contended else 0.0
        else:
            other = self._prompt_speed if is_contended else 0.0
        return part_s * max(1.0, (speed + other) / self.gain) if other else part_s

    def _share_of(self, side: Side, is_contended: bool) -> float:
        if self.share is None:
            if not is_contended:
                return 1.0
            if side == "prefill":
                self._prompt_share = self._chosen()
        return self._prompt_share if side == "prefill" else 1 - self._prompt_share

    def _chosen(self) -> float:
        shape = self._decode_shape()
        most_s = self.slack * self.cost.estimate(shape)
        fitting = (s for s in _SHARES if self._part(1 - s).estimate(shape) <= most_s)
        return next(fitting, _SHARES[-1])

    def _decode_shape(self) -> StepShape:
        """The next step of the present decodes."""
        n_decode, n_context = self.decoding()
        return StepShape(n_decode, 0, 0.0, n_decode, n_context)

    def _speed(self, share: float, shape: StepShape) -> float:
        """The speed of a step on a part of the GPU, relative to the whole; 0 without work."""
        whole_s = self.cost.estimate(shape)
        return whole_s / self._part(share).estimate(shape) if whole_s else 0.0


class _HalfCost:
    """The cost of the steps of a half as they begin (`CostModel`)."""

    def __init__(self, gpu: DividedGpu, side: Side) -> None:
        self._gpu, self._side = gpu, side

    def estimate(self, shape: StepShape) -> float:
        return self._gpu.duration_s(self._side, shape)


class Half:
    """The steps of a half of a divided GPU. Their times follow from the other half, so they are
    never taken several at once."""

    def __init__(
        self, gpu: DividedGpu, side: Side, caps: Caps | None = None, delay: StepDelay = NO_DELAY
    ) -> None:
        self.gpu = gpu
        self._executor = Simulated(_HalfCost(gpu, side), caps, delay)

    @property
    def caps(self) -> Caps:
        return self._executor.caps

    def execute(self, batch: StepBatch) -> StepResult:
        return self._executor.execute(batch)
