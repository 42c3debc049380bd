"""What is said about an answer's length, and the simplest thing to say."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from reference_engine.state.sequence import Request


class LengthDist(NamedTuple):
    """Output tokens still to come, at least 1: mean, median and the length 9 of 10 stay within."""

    mean: float
    q50: float
    q90: float


class Predictor(Protocol):
    """Deterministic: the same observations in the same order give the same predictions."""

    def predict(self, request: Request) -> LengthDist:
        """Tokens the request will still generate, given that it generated `n_output` and goes on.
        The total is `n_output` more; before the first token the two are the same."""

    def observe(self, request: Request) -> None:
        """Learn from a request that is over."""


class MaxTokens:
    """Every request uses all it may: the baseline, and what an engine without history assumes."""

    def predict(self, request: Request) -> LengthDist:
        left = float(max(1, request.max_tokens - request.n_output))
        return LengthDist(left, left, left)

    def observe(self, request: Request) -> None:
        pass
