"""Simulated steps: they take the time of a cost model and compute nothing.

Every token is the same letter, with probability 1 and so a log-probability of 0. No sampling
parameter has an effect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, ClassVar

from pydantic import Field

from loadgen.fields import Share
from reference_engine.executors.base import Caps, Executor, ExecutorKind, Site
from reference_engine.executors.delayed import NO_DELAY, StepDelay
from reference_engine.model.hardware_file import simulated_model
from reference_engine.state.batch import Logprob, StepBatch, StepResult, copying_s
from reference_engine.state.cost_model import (
    CostModel,
    ModelOnHardware,
    StepCost,
    WeightDtype,
    decode_s,
)
from reference_engine.state.model_config import KvDtype, ModelSource
from reference_engine.state.step_variation import StepVariation, VaryingSteps

TOKEN = ord("x")
_CERTAIN = Logprob(0.0, ((TOKEN, 0.0),))
SIMULATED_CONTEXT = 32_768
"""Default longest sequence of a simulated model. The real models of these shapes have 128 k; a mode
that reserves memory for the longest sequence would then serve one request at a time."""


class SimulatedExecutor(ExecutorKind):
    """The steps of `hardware`: `h200`, `4xh200`, `h100`, `a100`, a YAML file of your own, or `cpu`
    for a small shape; `kv_dtype` and `weight_dtype` select KV and weights in 8 bits.
    `fused_attention` is the efficiency of a kernel that computes the attention of prompts and
    decodes at the same time (`StepCost`). With `expert_parallel`, each of several devices has whole
    experts. A server spends the time of each step on its real clock."""

    kind: ClassVar[str] = "simulated"

    hardware: str = "h200"
    kv_dtype: KvDtype = "auto"
    weight_dtype: WeightDtype = "auto"
    fused_attention: Annotated[Share, Field(gt=0, le=1)] | None = None
    expert_parallel: bool = False

    def model(self, source: ModelSource) -> ModelOnHardware:
        """A model on this hardware."""
        model = simulated_model(
            source,
            self.hardware,
            self.kv_dtype,
            self.weight_dtype,
            expert_parallel=self.expert_parallel,
        )
        cost = replace(model.cost, fused_attention=self.fused_attention or 0.0)
        return replace(model, cost=cost)

    def build(self, site: Site) -> Executor:
        simulated = self.model(site.model)
        caps = Caps(site.n_host_blocks, copy_s=simulated.copy_token_s * site.block_tokens)
        executor = Simulated(simulated.cost, caps, variation=simulated.variation)
        return Paced(executor, site.pause)


class Simulated:
    """Returns the tokens of a step at once, with its `duration_s` by the cost model, or raises
    NotMeasured for a step outside the sizes to which the costs were fitted; `delay` makes every
    step longer, `variation` some more than others, by the draws of engine `number`. The
    caller spends the time."""

    def __init__(
        self,
        cost: CostModel,
        caps: Caps | None = None,
        delay: StepDelay = NO_DELAY,
        variation: StepVariation | None = None,
        number: int = 0,
    ) -> None:
        self.cost, self.delay = cost, delay
        self._measured = cost if isinstance(cost, StepCost) and cost.measured else None
        self.varying = None if variation is None else VaryingSteps(variation, number)
        self.caps = caps or Caps()
        self._has_logprobs = False  # whether any request so far has `logprobs`

    @property
    def token(self) -> int:
        return TOKEN

    @property
    def step_cost(self) -> StepCost | None:
        """The costs, if they are those of a `StepCost`."""
        return self.cost if type(self.cost) is StepCost else None

    def repeated_s(self, batch: StepBatch, n: int) -> list[float]:
        """The seconds of at most `n` steps, of which the first was executed last: a batch without
        rows, each with a token more of context for each decode. Steps outside the measured sizes
        are left out, because they may never come to be executed."""
        shape = batch.shape()
        measured = self._measured
        if measured is not None:
            n_each, n_first = shape.n_decode, shape.context_tokens

            def is_outside(k: int) -> bool:
                return not measured.is_measured(shape._replace(context_tokens=n_first + k * n_each))

            n = 1 + bisect_left(range(1, n), True, key=is_outside)
        return self._varied(decode_s(self.cost, shape, n))

    def pieces_s(self, batches: Sequence[StepBatch]) -> list[float]:
        """The seconds of the first steps of `batches`, of which the first was executed last: all
        up to the first that is outside the measured sizes."""
        measured = self._measured
        if measured is not None:
            batches = list(takewhile(lambda b: measured.is_measured(b.shape()), batches))
        return self._varied([self._cost_s(batch) for batch in batches])

    def pass_steps(self, n: int) -> None:
        """Count `n` steps as over that were not executed."""
        if self.varying is not None:
            self.varying.pass_by(n)

    def execute(self, batch: StepBatch) -> StepResult:
        if self.varying is not None:
            self.varying.pass_by(1)
        (duration_s,) = self._varied([self._cost_s(batch)])
        n_tokens = len(batch.decodes) + sum(row.samples for row in batch.rows)
        # The first step of every request is a row, so that decodes need no check.
        if not self._has_logprobs:
            self._has_logprobs = any(row.request.sampling.logprobs for row in batch.rows)
        logprobs = [_CERTAIN] * n_tokens if self._has_logprobs else None
        return StepResult([TOKEN] * n_tokens, logprobs, duration_s)

    def _cost_s(self, batch: StepBatch) -> float:
        shape = batch.shape()
        if self._measured is not None and (shape.prefill_tokens or shape.n_decode):
            self._measured.check_measured(shape)
        duration_s = self.cost.estimate(shape)
        if batch.copies:
            caps = self.caps
            duration_s += copying_s(batch.copies, caps.copy_s, caps.copy_latency_s)
        return duration_s

    def _varied(self, durations_s: list[float]) -> list[float]:
        """The seconds of steps by their costs, of which the first was executed last."""
        if self.varying is not None:
            durations_s = self.varying.varied(durations_s)
        if self.delay is NO_DELAY:
            return durations_s
        return [duration_s + self.delay.of(duration_s) for duration_s in durations_s]


class Paced:
    """Executes simulated steps in real time: pauses for the duration of each."""

    def __init__(self, executor: Simulated, pause: Callable[[float], None]) -> None:
        self._executor, self._pause = executor, pause

    @property
    def caps(self) -> Caps:
        return self._executor.caps

    def execute(self, batch: StepBatch) -> StepResult:
        result = self._executor.execute(batch)
        self._pause(result.simulated_s)
        return result
