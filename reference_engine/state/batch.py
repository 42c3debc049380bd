"""Data of a step: the work for an executor, its result, and the tokens for the clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

from reference_engine.state.cost_model import NO_PADDING, Padding, StepShape
from reference_engine.state.sequence import Request, State

UNKNOWN = -1
"""Stands for a token that is being computed."""


class Row(NamedTuple):
    """Tokens `start … start + n_tokens` of a request, to be computed into blocks that have room
    for them. `samples` is true when this reaches the request's last token, so that the next is
    sampled."""

    request: Request
    start: int
    n_tokens: int
    samples: bool


class Copy(NamedTuple):
    """A copy of a block of KV to host memory (`is_out`) or back."""

    block: int
    host_block: int
    is_out: bool


def copying_s(copies: Sequence[Copy], copy_s: float, latency_s: float) -> float:
    """The time (s) of copies: `copy_s` each, and `latency_s` for each direction."""
    if not copies:
        return 0.0
    return len(copies) * copy_s + len({copy.is_out for copy in copies}) * latency_s


class StepBatch(NamedTuple):
    """The work of a step: first the `copies`, then everything else at once. Executors read the
    requests and never write to them.

    `rows` are pieces of prompts (or of recomputation). Each of `decodes` computes a single token,
    at position `request.n_computed`, and samples the next. `context_tokens` is Σ n_computed of
    `decodes`. `padding` is work without a request."""

    rows: tuple[Row, ...] = ()
    decodes: Sequence[Request] = ()
    padding: Padding = NO_PADDING
    copies: tuple[Copy, ...] = ()
    context_tokens: int = 0

    @property
    def has_work(self) -> bool:
        padding = self.padding.prefill_tokens or self.padding.decode_rows
        return bool(self.rows or self.decodes or self.copies or padding)

    @property
    def n_tokens(self) -> int:
        """How many tokens the step samples."""
        return sum(row.samples for row in self.rows) + len(self.decodes)

    @property
    def n_computed_tokens(self) -> int:
        """How many tokens the step computes, padding excepted."""
        return sum(row.n_tokens for row in self.rows) + len(self.decodes)

    @property
    def main_prompt(self) -> Request | None:
        """The request whose prompt (or recomputation) is more than half of the step's tokens; None
        where most tokens are decoded or no prompt is that long."""
        row = max(self.rows, key=lambda row: row.n_tokens, default=None)
        # A row of a single token beyond the prompt is a decode, too.
        if row is None or (row.n_tokens == 1 and row.start >= row.request.n_prompt):
            return None
        return row.request if 2 * row.n_tokens > self.n_computed_tokens else None

    def all_rows(self) -> Iterator[Row]:
        """Rows and decodes alike, in the order of the sampled tokens."""
        yield from self.rows
        for request in self.decodes:
            yield Row(request, request.n_computed, 1, True)

    def sampled_requests(self) -> list[Request]:
        """The requests that get a token, in the order of the sampled tokens."""
        requests = [row.request for row in self.rows if row.samples]
        requests += self.decodes
        return requests

    def shape(self) -> StepShape:
        """The counts that the step's duration depends on."""
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


class Logprob(NamedTuple):
    """The natural log-probability of a sampled token at temperature 1, before bans and penalties;
    `top` are the most likely tokens with theirs, the most likely first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens: those of the rows with `samples`, in the order of the rows, then those of
    the decodes. `logprobs` has the same length, with None for requests without `logprobs`, or is
    None when no request wants any. `duration_s` is None where the engine's clock measures the
    step."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[Logprob | None] | None = None
    duration_s: float | None = None

    @property
    def simulated_s(self) -> float:
        """The duration (s) of a step that is known to be simulated."""
        assert self.duration_s is not None, "a simulated step has a duration"
        return self.duration_s


class TokenEvent(NamedTuple):
    """A new token of a request. `finish` is set on the last, `logprob` if the request wants it."""

    request: Request
    token: int
    finish: State | None
    logprob: Logprob | None = None


# Half the price of calling the class (benchmarks/step_overhead.py).
_EVENT = partial(tuple.__new__, TokenEvent)


class StepTokens(Iterable[TokenEvent]):
    """The new tokens of a step as columns: `requests` and their `tokens`. `ends` maps the requests
    that got their last token to their final state. Events are built while iterating;
    code on the hot path reads the columns. `finishes` is a column only where a request has several
    tokens, of which the last ends it."""

    __slots__ = ("_finishes", "ends", "logprobs", "requests", "tokens")

    def __init__(
        self,
        requests: Sequence[Request] = (),
        tokens: Sequence[int] = (),
        ends: Mapping[Request, State] | None = None,
        logprobs: Sequence[Logprob | None] | None = None,
        finishes: Sequence[State | None] | None = None,
    ) -> None:
        self._finishes = finishes
        self.requests, self.tokens, self.logprobs = requests, tokens, logprobs
        self.ends: Mapping[Request, State] = ends or {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TokenEvent]:
        finishes: Iterable[State | None] = repeat(None)
        if self._finishes is not None:
            finishes = self._finishes
        elif self.ends:
            finishes = map(self.ends.get, self.requests)
        logprobs: Iterator[Logprob | None] = repeat(None)
        if self.logprobs is not None:
            logprobs = (
                logprob if request.sampling.logprobs else None
                for request, logprob in zip(self.requests, self.logprobs, strict=True)
            )
        return map(_EVENT, zip(self.requests, self.tokens, finishes, logprobs, strict=False))
