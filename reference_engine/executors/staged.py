"""Simulated pipeline parallelism: the layers of a model on several devices, one after the other.

stage 1   A1 B1 C1 A2 B2 C2         A, B and C are batches of one scheduler, as many as
stage 2      A1 B1 C1 A2 B2 C2      there are stages. A batch passes all stages; what it
stage 3         A1 B1 C1 A2 B2 C2   leaves is in a later batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from loadgen.system.clock import Clock
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import Simulated
from reference_engine.state.batch import StepBatch, StepResult


class Stages:
    """The stages of a pipeline, each with one batch at a time; batches keep their order. Stage k
    takes the share `shares[k]` of a step. Between two stages, activations take `hop_s`, and
    `hop_token_s` per token.

    `busy_s` sums the seconds of the batches in all stages, `occupied_s` are the seconds in which
    any batch was in the pipeline; both include those to come of the batches that have entered."""

    def __init__(
        self, shares: Sequence[float], hop_s: float = 0.0, hop_token_s: float = 0.0
    ) -> None:
        assert shares, "a pipeline has at least 1 stage"
        assert abs(sum(shares) - 1) < 1e-9, f"the shares of a step are {sum(shares)} together"
        self.hop_s, self.hop_token_s = hop_s, hop_token_s
        self.busy_s = self.occupied_s = 0.0
        self._shares = tuple(shares)
        self._free_s = [0.0] * len(shares)
        # The batches under way, each with the beginnings and ends of its stages.
        self._under_way: deque[list[tuple[float, float]]] = deque()

    @property
    def n(self) -> int:
        return len(self._shares)

    @property
    def bubble_share(self) -> float:
        """The share of the stages' time that they were idle while a batch was in the pipeline."""
        if not self.occupied_s:
            return 0.0
        return 1 - self.busy_s / (self.n * self.occupied_s)

    def enter(self, now_s: float, duration_s: float, n_tokens: int) -> float:
        """Let a batch enter that takes `duration_s` in all stages together and sends `n_tokens`
        from each to the next; returns the instant (s) at which it leaves the last."""
        while self._under_way and self._under_way[0][-1][1] <= now_s:
            self._under_way.popleft()
        hop_s, ready_s = self.hop_s + self.hop_token_s * n_tokens, now_s
        spans: list[tuple[float, float]] = []
        for stage, share in enumerate(self._shares):
            if stage:
                ready_s += hop_s
            began_s = max(ready_s, self._free_s[stage])
            ready_s = began_s + share * duration_s
            spans.append((began_s, ready_s))
        last_s = self._free_s[-1]
        self._free_s = [end_s for _, end_s in spans]
        self.busy_s += sum(end_s - began_s for began_s, end_s in spans)
        self.occupied_s += ready_s - max(now_s, last_s)
        self._under_way.append(spans)
        return ready_s

    def stop(self, now_s: float) -> None:
        """Drop the batches under way: the pipeline has failed."""
        later = (span for spans in self._under_way for span in spans if span[1] > now_s)
        self.busy_s -= sum(end_s - max(began_s, now_s) for began_s, end_s in later)
        self.occupied_s -= max(0.0, self._free_s[-1] - now_s)
        self._free_s = [min(free_s, now_s) for free_s in self._free_s]
        self._under_way.clear()


class Staged:
    """The batches of a pipeline; their duration includes waits for busy stages."""

    def __init__(self, executor: Simulated, stages: Stages, clock: Clock) -> None:
        self._executor, self.stages, self._clock = executor, stages, clock

    @property
    def caps(self) -> Caps:
        return self._executor.caps

    def execute(self, batch: StepBatch) -> StepResult:
        result = self._executor.execute(batch)
        now_s = self._clock.now_s()
        end_s = self.stages.enter(now_s, result.simulated_s, batch.n_computed_tokens)
        return replace(result, duration_s=end_s - now_s)
