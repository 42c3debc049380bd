"""Answers of a running batch that are delivered together, when its last request has ended."""

from __future__ import annotations

from reference_engine.state.batch import StepTokens
from reference_engine.state.sequence import Request, State


class HeldAnswers:
    """The tokens of requests that were generated and not delivered. `ends` are the requests that
    have their last token, with their final states."""

    def __init__(self) -> None:
        self.ends: dict[Request, State] = {}
        self._requests: list[Request] = []
        self._tokens: list[int] = []
        self._logprobs: list[float | None] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def find(self, request_id: str) -> Request | None:
        """The request with all its tokens generated; None if there is none of that id."""
        return next((request for request in self.ends if request.id == request_id), None)

    def add(self, events: StepTokens) -> None:
        """Hold the tokens of a step."""
        for request, token, _, logprob in events:
            self._requests.append(request)
            self._tokens.append(token)
            self._logprobs.append(logprob)
        self.ends.update(events.ends)

    def drop(self, request: Request) -> None:
        """Forget a request that was cancelled."""
        self.ends.pop(request, None)
        kept = [i for i, other in enumerate(self._requests) if other is not request]
        self._requests = [self._requests[i] for i in kept]
        self._tokens = [self._tokens[i] for i in kept]
        self._logprobs = [self._logprobs[i] for i in kept]

    def tokens(self) -> StepTokens:
        """All held tokens in the order in which they were generated, as the tokens of one step."""
        last = {request: at for at, request in enumerate(self._requests)}
        finishes = [
            self.ends.get(request) if last[request] == at else None
            for at, request in enumerate(self._requests)
        ]
        return StepTokens(self._requests, self._tokens, self.ends, self._logprobs, finishes)
