"""A fault on purpose: every step takes longer than it would, so that a check can be seen to notice.

What `step_delay` of the engine does: `10%` of each step's own time, or `2ms` more on each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from loadgen.clock import Clock
from loadgen.units import parse_duration_s, write_duration
from reference_engine.executors.base import Caps, Executor
from reference_engine.state.batch import StepBatch, StepResult

_MOST_SHARE = 100.0


@dataclass(frozen=True, slots=True)
class StepDelay:
    """How much longer each step takes: a share of its own duration, and seconds."""

    share: float = 0.0
    seconds: float = 0.0

    def of(self, duration_s: float) -> float:
        """What a step of `duration_s` takes on top, seconds."""
        return self.share * duration_s + self.seconds

    def __str__(self) -> str:
        if self.share or not self.seconds:
            return f"{100 * self.share:.12g}%"
        return write_duration(self.seconds)


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
            f"{text!r} is no delay of a step; write '10%' of its own time, or e.g. '2ms'"
        ) from None
    if not 0 <= share <= _MOST_SHARE:
        raise ValueError(f"{text!r}: expected 0% to {100 * _MOST_SHARE:g}%")
    return StepDelay(share=share)


StepDelayOption = Annotated[
    StepDelay, BeforeValidator(parse_step_delay), PlainSerializer(str, when_used="json")
]
"""A pydantic field read from `10%` or `2ms`."""


class Delayed:
    """An executor with its steps made longer.

    A pause is never exactly as long as asked, and steps are short: what one pause was too long is
    taken off the next, so that the delay is right on average. A result that says how long its step
    took says it with the delay.
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
    """`executor` itself where there is no delay."""
    return Delayed(executor, delay, clock, pause) if delay != StepDelay() else executor
