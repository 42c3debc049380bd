"""A deliberate fault: steps take longer than they would, to test that a check notices.

The engine option `step_delay` turns it on: `10%` of each step's own time, or `2ms` on each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from loadgen.system.clock import Clock
from loadgen.units import parse_duration_s, write_duration
from reference_engine.executors.base import Caps, Executor
from reference_engine.state.batch import StepBatch, StepResult

_MAX_SHARE = 100.0


@dataclass(frozen=True, slots=True)
class StepDelay:
    """Time added to each step: a share of its own duration, and seconds."""

    share: float = 0.0
    seconds: float = 0.0

    def of(self, duration_s: float) -> float:
        """Seconds added to a step of `duration_s`."""
        return self.share * duration_s + self.seconds

    def __str__(self) -> str:
        if self.share or not self.seconds:
            return f"{100 * self.share:.12g}%"
        return write_duration(self.seconds)


NO_DELAY = StepDelay()


def parse_step_delay(value: object) -> StepDelay:
    """`10%` or `2ms`. Raises ValueError for a bare number, and above 10 000 %."""
    if isinstance(value, StepDelay):
        return value
    text = str(value).strip()
    try:
        if not text.endswith("%"):
            return StepDelay(seconds=parse_duration_s(text))
        share = float(text[:-1]) / 100
    except ValueError:
        raise ValueError(
            f"{text!r} is not a step delay; write a share of a step's time ('10%') or a duration "
            "('2ms')"
        ) from None
    if not 0 <= share <= _MAX_SHARE:
        raise ValueError(f"{text!r}: expected 0% to {100 * _MAX_SHARE:g}%")
    return StepDelay(share=share)


StepDelayOption = Annotated[
    StepDelay, BeforeValidator(parse_step_delay), PlainSerializer(str, when_used="json")
]
"""A pydantic field read from `10%` or `2ms`."""


class Delayed:
    """An executor with longer steps.

    A pause always takes a little longer than requested, and steps are short: the excess of a pause
    is subtracted from the next, so that the delay is right on average. If a result carries a
    `duration_s`, the delay is added to it.
    """

    def __init__(
        self, executor: Executor, delay: StepDelay, clock: Clock, pause: Callable[[float], None]
    ) -> None:
        self._executor, self._delay = executor, delay
        self._clock, self._pause = clock, pause
        self._owed_s = 0.0

    @property
    def caps(self) -> Caps:
        return self._executor.caps

    def execute(self, batch: StepBatch) -> StepResult:
        began_s = self._clock.now_s()
        result = self._executor.execute(batch)
        ended_s = self._clock.now_s()
        duration_s = ended_s - began_s if result.duration_s is None else result.duration_s
        added_s = self._delay.of(duration_s)
        self._owed_s += added_s
        if self._owed_s > 0:
            self._pause(self._owed_s)
            self._owed_s -= self._clock.now_s() - ended_s
        if result.duration_s is None:
            return result
        return dataclasses.replace(result, duration_s=duration_s + added_s)


def delayed(
    executor: Executor, delay: StepDelay, clock: Clock, pause: Callable[[float], None]
) -> Executor:
    """`executor` with the delay; `executor` itself if the delay is 0."""
    return Delayed(executor, delay, clock, pause) if delay != StepDelay() else executor
