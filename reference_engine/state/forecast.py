"""When a request will start, said when it arrives: the prompt tokens before it, divided by how fast
prompts were read of late while somebody waited.

That rate knows nothing of why the queue moves as it does (budget, slots, memory), only how fast, so
it needs no model. It assumes that the queue is served in its order; under a policy that does not,
the error of the forecast, kept with every request, says so.
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import NamedTuple

_MEMORY_S = 30.0
_KEPT = 256


class StartForecast(NamedTuple):
    """`tokens_ahead` prompt tokens are to be computed first, at `tokens_per_s`; `start_s` is the
    instant (engine's clock) at which the request's turn comes. None: nothing to go by yet."""

    tokens_ahead: int
    tokens_per_s: float | None
    start_s: float | None


class PromptReadRate:
    """Prompt tokens computed per second while requests waited; what was t ago counts e^(-t/30 s).
    `errors` are the latest starts less their forecasts (s)."""

    def __init__(self) -> None:
        self.errors: deque[float] = deque(maxlen=_KEPT)
        self._tokens = self._busy_s = 0.0
        self._at_s = float("-inf")

    def add(self, n_tokens: int, began_s: float, now_s: float) -> None:
        """A step of [began_s, now_s] computed so many prompt tokens while others waited."""
        took_s = now_s - max(began_s, self._at_s)
        faded = exp(-(now_s - self._at_s) / _MEMORY_S)
        self._tokens = self._tokens * faded + n_tokens
        self._busy_s = self._busy_s * faded + took_s
        self._at_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        if self._tokens <= 0 or self._busy_s <= 0:
            return None
        return self._tokens / self._busy_s
