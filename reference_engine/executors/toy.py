"""Toy executor: deterministic tokens without torch, computed through a paged KV memory.

The "KV" of a position is an integer: a running hash of the tokens up to it, computed from that of
the position before, which is read through the block table. A token therefore depends on its whole
context, and a block that is lost, shared or overwritten by mistake changes the output, as in a real
model.
"""

from __future__ import annotations

from math import log
from typing import ClassVar

from pydantic import Field

from reference_engine.executors.base import Caps, Executor, ExecutorKind, Site
from reference_engine.state.batch import Copy, Logprob, Row, StepBatch, StepResult
from reference_engine.state.sequence import Request

_MASK = (1 << 64) - 1


class ToyExecutor(ExecutorKind):
    """`step_s` seconds per step, `copy_s` per swapped block; on average, every `eos_every`-th token
    is a stop token (0: none is)."""

    kind: ClassVar[str] = "toy"

    step_s: float = Field(default=0.0, ge=0)
    copy_s: float = Field(default=0.0, ge=0)
    eos_every: int = Field(default=0, ge=0)

    def build(self, site: Site) -> Executor:
        return _Toy(self, site)


class _Toy:
    def __init__(self, kind: ToyExecutor, site: Site) -> None:
        self._kind, self._size, self._pause = kind, site.block_tokens, site.pause
        self._memory = [0] * (site.n_blocks * site.block_tokens)
        self._host = [0] * (site.n_host_blocks * site.block_tokens)
        self.caps = Caps(site.n_host_blocks, kind.copy_s)

    def execute(self, batch: StepBatch) -> StepResult:
        for copy in batch.copies:
            self._copy(copy)
        rows = list(batch.all_rows())
        contexts = [self._run(row) for row in rows]
        seconds = self._kind.step_s + self._kind.copy_s * len(batch.copies)
        if seconds:
            self._pause(seconds)
        tokens = [
            self._token(context, row.request)
            for row, context in zip(rows, contexts, strict=True)
            if row.samples
        ]
        if not any(row.request.sampling.logprobs for row in rows):
            return StepResult(tokens)
        sampled = [context for row, context in zip(rows, contexts, strict=True) if row.samples]
        pairs = zip(tokens, map(_logprob, sampled), strict=True)
        return StepResult(tokens, [Logprob(value, ((token, value),)) for token, value in pairs])

    def _copy(self, copy: Copy) -> None:
        size, memory, host = self._size, self._memory, self._host
        here = slice(copy.block * size, (copy.block + 1) * size)
        there = slice(copy.host_block * size, (copy.host_block + 1) * size)
        if copy.is_out:
            host[there] = memory[here]
        else:
            memory[here] = host[there]

    def _run(self, row: Row) -> int:
        """Fill the slots of a row; return the context hash that its next token is made of."""
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
    """The logarithm of a made-up probability n/256, with n from the context."""
    return log((1 + (context >> 16) % 256) / 256)


def fold(context: int, token: int) -> int:
    """The context hash after `token`; 64 bits.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA'14).
    """
    z = (context * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
