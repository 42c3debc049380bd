"""Answers of a running batch that are delivered together, when its last request has ended."""

from __future__ import annotations

from reference_engine.state.batch import StepTokens
from reference_engine.state.sequence import Request, State


class HeldAnswers:
    """The tokens of steps that were computed and not delivered. `ends` are the requests that have
    their last token, with their final states."""

    def __init__(self) -> None:
        self.ends: dict[Request, State] = {}
        self._steps: list[StepTokens] = []
        self._dropped: set[Request] = set()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def find(self, request_id: str) -> Request | None:
        """The request with all its tokens generated; None if there is none of that id."""
        return next((request for request in self.ends if request.id == request_id), None)

    def add(self, step: StepTokens) -> None:
        """Hold the tokens of a step."""
        self._steps.append(step)
        self.ends.update(step.ends)

    def drop(self, request: Request) -> None:
        """Forget a request that was cancelled."""
        self.ends.pop(request, None)
        self._dropped.add(request)

    def tokens(self) -> StepTokens:
        """All held tokens in the order in which they were generated, as the tokens of one step."""
        held = [
            event for step in self._steps for event in step if event.request not in self._dropped
        ]
        last = {event.request: at for at, event in enumerate(held)}
        finishes = [
            self.ends.get(event.request) if last[event.request] == at else None
            for at, event in enumerate(held)
        ]
        return StepTokens(
            [event.request for event in held],
            [event.token for event in held],
            self.ends,
            [event.logprob for event in held],
            finishes,
        )
