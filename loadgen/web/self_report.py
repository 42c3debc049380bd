"""What a generating process measured of itself, as it comes from a worker: whether it is one.

The fields are those of `drive.shard_loop.Shard.finish`; the report judges the instrument by them,
so one that is missing or no number must not come that far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from loadgen.web.control_messages import Bad, Count, Text

Share = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Cores(_Fields, frozen=True):
    allowed: list[Count]
    online: Count | None
    own_s: float
    idle_s: float
    programs_s: float
    total_s: float
    most_stolen_s: Seconds | None


class LoopLag(_Fields, frozen=True):
    n: Count
    p50: Seconds
    p99: Seconds
    max: Seconds


class StallsReport(_Fields, frozen=True):
    over_s: Seconds
    spans_s: list[tuple[float, float, float]]


class BacklogReport(_Fields, frozen=True):
    looks: Count
    waiting: Count
    bytes_max: Count
    reads: Count
    wait_mean_s: Seconds


class Processor(_Fields, frozen=True):
    looks: Count
    usual_s: Seconds
    slow_s: Seconds
    slow_in_stalls_s: Seconds
    slow_speed: Share | None


class Gc(_Fields, frozen=True):
    collections: Count
    pause_max_s: Seconds


class Decoding(_Fields, frozen=True):
    cpu_s: Seconds
    wall_s: Seconds


class ConnectionsReport(_Fields, frozen=True):
    opened: Count
    reused: Count
    known: list[Text]
    not_opened_ahead: int = 0


class SelfReport(_Fields, frozen=True):
    shard: Count
    broken: Text
    window_s: Seconds
    cpu_share: Share | None
    run_delay_share: Share | None
    throttled_share: Share | None
    stolen_share: Share | None
    cores: Cores | None
    loop_lag_s: LoopLag
    stalls: StallsReport
    backlog: BacklogReport | None
    processor: Processor | None
    gc: Gc
    decoding: Decoding
    connections: ConnectionsReport
    encoded_late: Count
    spilled_bytes: Count


def check_self_report(told: Mapping[str, Any], shard: int) -> None:
    """That it is whole, of finite numbers, and that shard's. Raises Bad."""
    try:
        found = msgspec.convert(dict(told), SelfReport)
    except msgspec.ValidationError as problem:
        raise Bad(f"what it measured of itself: {problem}") from None
    if found.shard != shard:
        raise Bad(f"what shard {found.shard} measured of itself")
    if not all(math.isfinite(one) for one in _floats(told)):
        raise Bad("what it measured of itself has a number that is none")


def _floats(told: Any) -> Iterator[float]:
    if isinstance(told, float):
        yield told
    elif isinstance(told, Mapping):
        for one in told.values():
            yield from _floats(one)
    elif isinstance(told, (list, tuple)):
        for one in told:
            yield from _floats(one)
