"""Token budgets of tenants: a rate per second and a burst, kept as token buckets."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from loadgen.fields import Rate
from loadgen.registry import Block

_DEFAULT_BURST_S = 10.0
# A shorter wait is a rounding error: it can name an instant that never comes after now.
_TOLERANCE_S = 1e-6


class WhenOver(StrEnum):
    """What happens to a request that its budget cannot pay now. `queue`: it waits until it can.
    `refuse`: it is rejected with the seconds after which to try again."""

    queue = "queue"
    refuse = "refuse"


class Budget(Block):
    """`rate` cost units a second, saved up to `burst` (0: those of 10 s). As text: `1000/s`,
    `1000/s:5000`, `1000/s:5000:refuse`."""

    rate: Rate
    burst: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    when_over: WhenOver = WhenOver.queue

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        rate, *more = value.split(":")
        return {"rate": rate, **dict(zip(("burst", "when_over"), more, strict=False))}

    def bucket(self, now_s: float) -> TokenBucket:
        """A new bucket, full at `now_s`."""
        return TokenBucket(self.rate, self.burst or self.rate * _DEFAULT_BURST_S, now_s)


class TokenBucket:
    """A bucket that holds up to `burst` units and gains `rate` units a second. A cost above `burst`
    can be paid when the bucket is full, and leaves it in debt."""

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at_s = burst, now_s

    def level(self, now_s: float) -> float:
        """Units in the bucket; negative in debt."""
        return min(self._burst, self._level + self._rate * (now_s - self._at_s))

    def due_s(self, cost: float, now_s: float) -> float:
        """The instant at which `cost` can be paid; `now_s` if it can be paid now."""
        missing_s = (min(cost, self._burst) - self.level(now_s)) / self._rate
        return now_s if missing_s <= _TOLERANCE_S else now_s + missing_s

    def take(self, cost: float, now_s: float) -> None:
        """Pay `cost`; a negative cost is paid back."""
        self._level, self._at_s = min(self._burst, self.level(now_s) - cost), now_s


def budget_of(budgets: dict[str, Budget], tenant: str, priority: int) -> tuple[str, Budget | None]:
    """The budget that pays a request, and a name under which it is kept. The first of these keys
    counts: `tenant/priority`, `tenant`, `*/priority`, `*`. The last two give each tenant a budget
    of its own."""
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


def mapping_of_text(value: Any) -> Any:
    """A mapping from the text `a=1 b=2`, as used on a command line; any other value unchanged."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split()]
    if not all(separator for _, separator, _ in pairs):
        raise ValueError(f"expected name=value pairs separated by blanks, got {value!r}")
    return {name: text for name, _, text in pairs}
