"""How fast requests leave: what the queue's length means in seconds."""

from __future__ import annotations

from math import exp

_MEMORY_S = 30.0


class Departures:
    """Ends of requests, each counting 1/e after 30 s."""

    def __init__(self) -> None:
        self._mass, self._at_s = 0.0, 0.0
        self._since_s: float | None = None

    def add(self, now_s: float) -> None:
        if self._since_s is None:  # the first begins the watch, the second is the first seen
            self._since_s = self._at_s = now_s
            return
        self._mass = self._faded(now_s) + 1.0
        self._at_s = now_s

    def wait_s(self, n_ahead: int, now_s: float) -> float | None:
        """Time until `n_ahead` requests have left at the rate of late; None without a rate.

        Source: Little (1961), with the departure rate in place of the arrival rate.
        """
        if self._since_s is None or not self._mass:
            return None
        seen_s = _MEMORY_S * (1.0 - exp(-(now_s - self._since_s) / _MEMORY_S))
        return n_ahead * seen_s / self._faded(now_s)

    def _faded(self, now_s: float) -> float:
        return self._mass * exp((self._at_s - now_s) / _MEMORY_S)
