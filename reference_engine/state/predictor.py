"""Predictors of the length of answers, and the simplest of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from reference_engine.state.sequence import Request


class LengthDist(NamedTuple):
    """Output tokens still to come, at least 1: mean, median and 90th percentile."""

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
    """Predicts that every answer is as long as its `max_tokens`: the baseline, and the assumption
    of an engine without history."""

    def predict(self, request: Request) -> LengthDist:
        left = float(max(1, request.max_tokens - request.n_output))
        return LengthDist(left, left, left)

    def observe(self, request: Request) -> None:
        pass
