"""Deterministic tokens without torch, through a KV memory as real as the engine's bookkeeping.

Each position's "KV" is one integer: a running hash of the tokens up to it, read from the position
before through the block table. A token therefore depends on its whole context, and a block that is
lost, shared or overwritten by mistake changes the output, as it would in a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import ClassVar

from pydantic import Field

from reference_engine.executors.base import (
    Caps,
    Executor,
    ExecutorKind,
    Row,
    Site,
    StepBatch,
    StepResult,
)
from reference_engine.sequence import Request

_MASK = (1 << 64) - 1


class ToyExecutor(ExecutorKind):
    """`step_s` seconds per step; one token in `eos_every` is a stop token (0: never)."""

    kind: ClassVar[str] = "toy"

    step_s: float = Field(default=0.0, ge=0)
    eos_every: int = Field(default=0, ge=0)

    def build(self, site: Site) -> Executor:
        return _Toy(self, site.n_blocks, site.block_tokens, site.pause)


class _Toy:
    def __init__(
        self, kind: ToyExecutor, n_blocks: int, block_tokens: int, pause: Callable[[float], None]
    ) -> None:
        self._kind, self._size, self._pause = kind, block_tokens, pause
        self._memory = [0] * (n_blocks * block_tokens)
        self.caps = Caps()

    def execute(self, batch: StepBatch) -> StepResult:
        rows = list(batch.all_rows())
        contexts = [self._run(row) for row in rows]
        if self._kind.step_s:
            self._pause(self._kind.step_s)
        tokens = [
            self._token(context, row.request)
            for row, context in zip(rows, contexts, strict=True)
            if row.samples
        ]
        if not any(row.request.sampling.logprobs for row in rows):
            return StepResult(tokens)
        sampled = [context for row, context in zip(rows, contexts, strict=True) if row.samples]
        return StepResult(tokens, [_logprob(context) for context in sampled])

    def _run(self, row: Row) -> int:
        """Fill a row's slots; returns the context that its next token is drawn from."""
        request, memory, size = row.request, self._memory, self._size
        blocks = request.blocks
        before = row.start - 1
        context = memory[blocks[before // size] * size + before % size] if row.start else 0
        for at in range(row.start, row.start + row.n_tokens):
            context = fold(context, request.tokens[at])
            memory[blocks[at // size] * size + at % size] = context
        sampling = request.sampling
        return fold(context, sampling.seed) if sampling.temperature > 0 else context

    def _token(self, context: int, request: Request) -> int:
        every, stop_ids = self._kind.eos_every, request.stop_ids
        if every and stop_ids and not request.banned_ids() and (context >> 8) % every == 0:
            return min(stop_ids)
        return int(context % 256)


def _logprob(context: int) -> float:
    """As if the token had been chosen with a probability of n/256, n from the context."""
    return log((1 + (context >> 16) % 256) / 256)


def fold(context: int, token: int) -> int:
    """The context hash after one more token; 64 bits.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA'14).
    """
    z = (context * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
