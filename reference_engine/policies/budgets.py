"""Tokens a tenant may use: so many a second, saved up to a burst. Pure: instants come in."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from loadgen.registry import Block
from loadgen.units import Rate

_DEFAULT_BURST_S = 10.0
_HAIR_S = 1e-6  # so much too early is on time, or rounding would make instants that never come


class WhenOver(StrEnum):
    """What becomes of a request its tenant cannot pay for now: it waits until it can, or it is
    refused with the seconds after which to try again."""

    queue = "queue"
    refuse = "refuse"


class Budget(Block):
    """`rate` cost units a second, saved up to `burst` (0: those of 10 s). As text:
    `1000/s`, `1000/s:5000`, `1000/s:5000:refuse`."""

    rate: Rate
    burst: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    when_over: WhenOver = WhenOver.queue

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        rate, *more = given.split(":")
        return {"rate": rate, **dict(zip(("burst", "when_over"), more, strict=False))}

    def bucket(self, now_s: float) -> TokenBucket:
        """A full one."""
        return TokenBucket(self.rate, self.burst or self.rate * _DEFAULT_BURST_S, now_s)


class TokenBucket:
    """Holds up to `burst` units and gains `rate` a second. What costs more than `burst` can be paid
    when it is full, and leaves it in debt."""

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at_s = burst, now_s

    def level(self, now_s: float) -> float:
        """Units in it; negative in debt."""
        return min(self._burst, self._level + self._rate * (now_s - self._at_s))

    def due_s(self, cost: float, now_s: float) -> float:
        """The instant at which `cost` can be paid; `now_s` if it can be now."""
        missing_s = (min(cost, self._burst) - self.level(now_s)) / self._rate
        return now_s if missing_s <= _HAIR_S else now_s + missing_s

    def take(self, cost: float, now_s: float) -> None:
        """Pay, or with a negative cost get back."""
        self._level, self._at_s = min(self._burst, self.level(now_s) - cost), now_s


def budget_of(budgets: dict[str, Budget], tenant: str, priority: int) -> tuple[str, Budget | None]:
    """The name and the budget a request is paid from. Budgets are named `tenant/priority`,
    `tenant`, `*/priority` or `*`, the first of these that is there; `*` is every tenant by itself.
    """
    of_class = f"{tenant}/{priority}"
    for name, key in (
        (of_class, of_class),
        (tenant, tenant),
        (of_class, f"*/{priority}"),
        (tenant, "*"),
    ):
        if key in budgets:
            return name, budgets[key]
    return tenant, None


def mapping_of_text(given: Any) -> Any:
    """`a=1 b=2` as a mapping, so that a mapping can be given on a command line; anything else as it
    is."""
    if not isinstance(given, str):
        return given
    pairs = [part.partition("=") for part in given.split()]
    if not all(separator for _, separator, _ in pairs):
        raise ValueError(f"expected name=value, several of them apart by blanks, got {given!r}")
    return {name: value for name, _, value in pairs}
