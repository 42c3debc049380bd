"""What a step produced: one token per request that reached its last known one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, overload

from reference_engine.state.sequence import Request, State


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
