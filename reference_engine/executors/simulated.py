"""Steps that only take time: a cost model says how long, and every token is the same one, which
this model is certain of: the logarithm of its probability is 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from reference_engine.executors.base import Caps, Executor, ExecutorKind, Site
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.cost_model import CostModel, model_on_hardware
from reference_engine.state.model_config import KvDtype

TOKEN = ord("x")
SIMULATED_CONTEXT = 32_768
"""Longest sequence of a simulated model, unless told otherwise; the real ones of these shapes have
128 k, and a mode that reserves it would serve nobody else."""


class SimulatedExecutor(ExecutorKind):
    """The steps of `hardware`: `h200`, `4xh200`, `h100`, `a100`, or `cpu` for a small shape; KV in
    8 bits by `kv_dtype`. Spent on the clock in use, so that a virtual one makes it a simulator and
    a real one a server."""

    kind: ClassVar[str] = "simulated"

    hardware: str = "h200"
    kv_dtype: KvDtype = "auto"

    def build(self, site: Site) -> Executor:
        found = model_on_hardware(site.model, self.hardware, self.kv_dtype)
        caps = Caps(site.n_host_blocks, copy_s=found.copy_token_s * site.block_tokens)
        return Simulated(found.cost, site.pause, caps)


class Simulated:
    """Pauses for what a step costs."""

    def __init__(
        self, cost: CostModel, pause: Callable[[float], None], caps: Caps | None = None
    ) -> None:
        self._cost, self._pause = cost, pause
        self.caps = caps or Caps()
        self._has_told = False  # whether anybody ever asked for logprobs

    def execute(self, batch: StepBatch) -> StepResult:
        duration_s = self._cost.estimate(batch.shape()) + len(batch.copies) * self.caps.copy_s
        self._pause(duration_s)
        n_tokens = len(batch.decodes) + sum(row.samples for row in batch.rows)
        # Everybody begins with a row, so that decodes need not be looked at.
        if not self._has_told:
            self._has_told = any(row.request.sampling.logprobs for row in batch.rows)
        logprobs = [0.0] * n_tokens if self._has_told else None
        return StepResult([TOKEN] * n_tokens, logprobs, duration_s)
