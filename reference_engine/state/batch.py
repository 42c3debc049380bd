"""One step's work for an executor, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple, overload

from reference_engine.state.cost_model import NO_PADDING, Padding, StepShape
from reference_engine.state.sequence import Request, State


class Row(NamedTuple):
    """Compute tokens `start … start + n_tokens` of a request, whose blocks have room for them;
    `samples` when that reaches its last known token, so that the next one is wanted."""

    request: Request
    start: int
    n_tokens: int
    samples: bool


class Copy(NamedTuple):
    """One block of KV to host memory (`is_out`) or back."""

    block: int
    host_block: int
    is_out: bool


class StepBatch(NamedTuple):
    """One step, to be worked off in this order: `copies`, then everything else at once. An
    executor reads the requests and never writes to them.

    `rows` are pieces of prompts (or of recomputation); `decodes` compute one token each, the one
    at position `request.n_computed`, and want the next. `context_tokens` is Σ n_computed of
    `decodes`. `padding` is work to be done for nobody.
    """

    rows: tuple[Row, ...] = ()
    decodes: Sequence[Request] = ()
    padding: Padding = NO_PADDING
    copies: tuple[Copy, ...] = ()
    context_tokens: int = 0

    @property
    def has_work(self) -> bool:
        return bool(
            self.rows
            or self.decodes
            or self.copies
            or self.padding.prefill_tokens
            or self.padding.decode_rows
        )

    @property
    def n_tokens(self) -> int:
        """How many tokens the step answers."""
        return sum(row.samples for row in self.rows) + len(self.decodes)

    @property
    def main_prompt(self) -> Request | None:
        """Whose prompt (or recomputation) is more than half of the step's tokens; None where they
        are decoded, or of many prompts. A single row beyond its prompt is a decode, too."""
        row = max(self.rows, key=lambda row: row.n_tokens, default=None)
        if row is None or (row.n_tokens == 1 and row.start >= row.request.n_prompt):
            return None
        n_tokens = sum(row.n_tokens for row in self.rows) + len(self.decodes)
        return row.request if 2 * row.n_tokens > n_tokens else None

    def all_rows(self) -> Iterator[Row]:
        """Rows and decodes alike, in the order in which tokens are answered."""
        yield from self.rows
        for request in self.decodes:
            yield Row(request, request.n_computed, 1, True)

    def sampled_requests(self) -> list[Request]:
        """The requests that get a token, in the order of the step's tokens."""
        requests = [row.request for row in self.rows if row.samples]
        requests += self.decodes
        return requests

    def shape(self) -> StepShape:
        """What the step's duration depends on."""
        prefill_tokens, prefill_attention = 0, 0.0
        for _, start, n_tokens, _ in self.rows:
            prefill_tokens += n_tokens
            prefill_attention += n_tokens * (start + n_tokens / 2)
        n_decode = len(self.decodes)
        return StepShape(
            n_seqs=len(self.rows) + n_decode,
            prefill_tokens=prefill_tokens,
            prefill_attention=prefill_attention,
            n_decode=n_decode,
            context_tokens=self.context_tokens,
            padding=self.padding,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens: one per row with `samples`, in the order of the rows, then one per
    decode. `logprobs` is as long as `tokens`, or None when nobody asked. `duration_s` is how long
    the step took, or None to let the engine's clock tell."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    duration_s: float | None = None


class TokenEvent(NamedTuple):
    """One new token of a request; `finish` is set on its last, `logprob` (natural) where the
    request asked for it."""

    request: Request
    token: int
    finish: State | None
    logprob: float | None = None


# Half the price of calling the class (benchmarks/step_overhead.py).
_EVENT = partial(tuple.__new__, TokenEvent)


class StepTokens(Sequence[TokenEvent]):
    """The events of one step, kept as columns: `requests` and their `tokens`, and of the requests
    in `ends` it was the last. Events are made while iterating; whoever is in a hurry reads the
    columns."""

    __slots__ = ("ends", "logprobs", "requests", "tokens")

    def __init__(
        self,
        requests: Sequence[Request] = (),
        tokens: Sequence[int] = (),
        ends: Mapping[Request, State] | None = None,
        logprobs: Sequence[float] | None = None,
    ) -> None:
        self.requests, self.tokens, self.logprobs = requests, tokens, logprobs
        self.ends: Mapping[Request, State] = ends or {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TokenEvent]:
        finishes = map(self.ends.get, self.requests) if self.ends else repeat(None)
        return map(_EVENT, zip(self.requests, self.tokens, finishes, self._asked(), strict=False))

    @overload
    def __getitem__(self, at: int) -> TokenEvent: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenEvent]: ...
    def __getitem__(self, at: int | slice) -> TokenEvent | list[TokenEvent]:
        return list(self)[at]

    def _asked(self) -> Iterator[float | None]:
        if self.logprobs is None:
            return repeat(None)
        return (
            logprob if request.sampling.logprobs else None
            for request, logprob in zip(self.requests, self.logprobs, strict=True)
        )
