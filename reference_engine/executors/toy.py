"""Deterministic tokens without torch, through a KV memory as real as the engine's bookkeeping.

Each position's "KV" is one integer: a running hash of the tokens up to it, read from the position
before through the block table. A token therefore depends on its whole context, and a block that is
lost, shared or overwritten by mistake changes the output, as it would in a real model.
"""

from __future__ import annotations

from collections.abc import Callable
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
        tokens = [self._run(row) for row in batch.all_rows()]
        if self._kind.step_s:
            self._pause(self._kind.step_s)
        return StepResult([token for token in tokens if token is not None])

    def _run(self, row: Row) -> int | None:
        request, memory, size = row.request, self._memory, self._size
        blocks = request.blocks
        before = row.start - 1
        context = memory[blocks[before // size] * size + before % size] if row.start else 0
        for at in range(row.start, row.start + row.n_tokens):
            context = fold(context, request.tokens[at])
            memory[blocks[at // size] * size + at % size] = context
        if not row.samples:
            return None
        if request.sampling.temperature > 0:
            context = fold(context, request.sampling.seed)
        return self._token(context, request.stop_ids, frozenset(request.banned_ids()))

    def _token(self, context: int, stop_ids: frozenset[int], banned: frozenset[int]) -> int:
        every = self._kind.eos_every
        if every and stop_ids and not banned and (context >> 8) % every == 0:
            return min(stop_ids)
        return int(context % 256)


def fold(context: int, token: int) -> int:
    """The context hash after one more token; 64 bits.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA'14).
    """
    z = (context * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
