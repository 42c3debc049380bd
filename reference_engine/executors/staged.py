"""Simulated pipeline parallelism: the layers of a model on several devices, one after the other.

    stage 1   A1 B1 A2 B2         A and B are engines of one pipeline, as many as it has stages.
    stage 2      A1 B1 A2 B2      A step passes all stages; then the engine begins its next.

Every engine has a queue, a scheduler and an equal part of the KV memory, and has one step in the
pipeline at a time, as the virtual engines of vLLM's first engine
(https://github.com/vllm-project/vllm/pull/4412). A stage takes an equal part of the step.
"""

from __future__ import annotations

from dataclasses import replace

from loadgen.clock import Clock
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import Simulated
from reference_engine.state.batch import StepBatch, StepResult


class Stages:
    """The stages of a pipeline, each with one step at a time; steps keep their order. Between two
    stages, activations take `hop_s`, and `hop_token_s` per token."""

    def __init__(self, n: int, hop_s: float = 0.0, hop_token_s: float = 0.0) -> None:
        assert n >= 1, f"a pipeline has at least 1 stage, got {n}"
        self.hop_s, self.hop_token_s = hop_s, hop_token_s
        self._free_s = [0.0] * n

    @property
    def n(self) -> int:
        return len(self._free_s)

    def enter(self, now_s: float, duration_s: float, n_tokens: int) -> float:
        """Let a step enter that takes `duration_s` in all stages together and sends `n_tokens` from
        each to the next; returns the instant (s) at which it leaves the last."""
        stage_s, hop_s = duration_s / self.n, self.hop_s + self.hop_token_s * n_tokens
        ready_s = now_s
        for stage in range(self.n):
            if stage:
                ready_s += hop_s
            ready_s = max(ready_s, self._free_s[stage]) + stage_s
            self._free_s[stage] = ready_s
        return ready_s


class Staged:
    """The steps of an engine of a pipeline; their duration includes waits for busy stages."""

    def __init__(self, executor: Simulated, stages: Stages, clock: Clock) -> None:
        self._executor, self._stages, self._clock = executor, stages, clock

    @property
    def caps(self) -> Caps:
        return self._executor.caps

    def execute(self, batch: StepBatch) -> StepResult:
        result = self._executor.execute(batch)
        now_s = self._clock.now_s()
        end_s = self._stages.enter(now_s, result.simulated_s, batch.n_computed_tokens)
        return replace(result, duration_s=end_s - now_s)
