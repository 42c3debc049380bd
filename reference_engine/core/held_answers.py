"""Answers of a running batch that are delivered together, when its last request has ended."""

from __future__ import annotations

from itertools import compress, repeat

from reference_engine.state.batch import Logprob, StepTokens
from reference_engine.state.sequence import Request, State


class HeldAnswers:
    """The tokens of steps that were computed and not delivered. `ends` are the requests that have
    their last token, with their final states."""

    def __init__(self) -> None:
        self.ends: dict[Request, State] = {}
        self._requests: list[Request] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprob | None] = []
        self._finishes: list[State | None] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def find(self, request_id: str) -> Request | None:
        """The request with all its tokens generated; None if there is none of that id."""
        return next((request for request in self.ends if request.id == request_id), None)

    def add(self, step: StepTokens) -> None:
        """Hold the tokens of a step."""
        self.ends.update(step.ends)
        self._requests += step.requests
        self._tokens += step.tokens
        self._logprobs += step.logprobs or repeat(None, len(step))
        self._finishes += map(step.ends.get, step.requests)

    def drop(self, request: Request) -> None:
        """Forget a request that was cancelled."""
        self.ends.pop(request, None)
        kept = [other is not request for other in self._requests]
        self._requests = list(compress(self._requests, kept))
        self._tokens = list(compress(self._tokens, kept))
        self._logprobs = list(compress(self._logprobs, kept))
        self._finishes = list(compress(self._finishes, kept))

    def tokens(self) -> StepTokens:
        """All held tokens in the order in which they were generated, as the tokens of one step."""
        return StepTokens(self._requests, self._tokens, self.ends, self._logprobs, self._finishes)
