"""Clocks that are passed as arguments: the protocol, the machine's monotonic clock, and a virtual
clock for tests and the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds (float64) since the clock's epoch; never decreases."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """CLOCK_MONOTONIC relative to an epoch in nanoseconds; all processes of one machine share it.

    The epoch is subtracted as an integer before the conversion: float64 seconds since a recent
    epoch stay exact to better than 1 µs for centuries, the raw nanosecond count would not fit.
    """

    def __init__(self, epoch_ns: int | None = None) -> None:
        self.epoch_ns = time.monotonic_ns() if epoch_ns is None else epoch_ns

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.epoch_ns) * 1e-9


class VirtualClock:
    """A clock that moves only through `advance` and `advance_to`; moving back is an error."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"a clock cannot be advanced by {seconds} s"
        self._now_s += seconds

    def advance_to(self, instant_s: float) -> None:
        self.advance(instant_s - self._now_s)

    def jump_to(self, instant_s: float) -> None:
        """As `advance_to`, without its rounding: the clock then shows exactly `instant_s`."""
        assert instant_s >= self._now_s, (
            f"a clock cannot go back from {self._now_s} s to {instant_s}"
        )
        self._now_s = instant_s
