"""What the machine under the client took from it: a host's time, or a processor's speed.

No gates: what they do to the client, lateness and the event loop's lag show, and name them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.measure.validity.check import ValidityCheck
from loadgen.measure.wording import format_share, format_value
from loadgen.self_report import SelfReport

STOLEN_SHARE = 0.01
EXPLAINED_SHARE = 0.5  # of what the client stalled for, where the machine took less than those


def taken(shards: Sequence[SelfReport]) -> str:
    """What the machine under the client took from it; "" where it did not, or is not known."""
    return _stolen(shards) or _slowed(shards)


def steal(shards: Sequence[SelfReport]) -> ValidityCheck:
    if all(shard.stolen_share is None for shard in shards):
        return ValidityCheck("steal", None, "not recorded on this platform")
    share = _stolen_share(shards)
    limit = f"limit {format_share(STOLEN_SHARE)}"
    if share > STOLEN_SHARE:
        return ValidityCheck("steal", False, f"{_stolen(shards)}; {limit}")
    detail = f"{format_share(share)} of the machine's time was taken by its host; {limit}"
    return ValidityCheck("steal", True, detail)


def processor_speed(shards: Sequence[SelfReport]) -> ValidityCheck:
    known = [shard.processor for shard in shards if shard.processor is not None]
    if not known:
        return ValidityCheck("processor speed", None, "the client did not look at it")
    if told := _slowed(shards):
        return ValidityCheck("processor speed", False, told)
    slow_s = max(processor.slow_s for processor in known)
    if not slow_s:
        return ValidityCheck("processor speed", True, "never below a third of the usual")
    detail = (
        f"below a third of the usual for {format_value(slow_s, 's')}; no cause of the "
        "client's stalls"
    )
    return ValidityCheck("processor speed", True, detail)


def _stolen(shards: Sequence[SelfReport]) -> str:
    """What a host that took the machine's time away did; "" where it did not, or is not known, and
    where what it took was little and is less than half of what a client stalled for."""
    if (share := _stolen_share(shards)) > STOLEN_SHARE:
        given = f"gave {format_share(share)} of its time to others (steal)"
        return f"the host of this virtual machine {given}"
    told = [of_one for shard in shards if (of_one := _stalled_as_stolen(shard))]
    return told[0] if told else ""


def _stolen_share(shards: Sequence[SelfReport]) -> float:
    return max((shard.stolen_share or 0.0 for shard in shards), default=0.0)


def _stalled_as_stolen(shard: SelfReport) -> str:
    """A client stalls on one core at a time; what the host took of all, on average, says less."""
    stalled_s = _stalled_s(shard)
    stolen_s = 0.0 if shard.cores is None else shard.cores.most_stolen_s or 0.0
    if not stalled_s or stolen_s < EXPLAINED_SHARE * stalled_s:
        return ""
    return (
        f"the host of this virtual machine took {format_value(stolen_s, 's')} of one core's time "
        "(steal),"
        f" and the client stalled for {format_value(stalled_s, 's')}"
    )


def _slowed(shards: Sequence[SelfReport]) -> str:
    """What processors did that were slowed down for at least half of what the clients stalled for;
    "" where they were not, or are not known."""
    known = [shard.processor for shard in shards if shard.processor is not None]
    stalled_s = math.fsum(map(_stalled_s, shards))
    slow_s = math.fsum(processor.slow_in_stalls_s for processor in known)
    speeds = [processor.slow_speed or 1.0 for processor in known]
    if not stalled_s or slow_s < EXPLAINED_SHARE * stalled_s:
        return ""
    return (
        f"the processor ran at {format_share(min(speeds))} of its usual speed for "
        f"{format_value(slow_s, 's')}"
        f" of the {format_value(stalled_s, 's')} for which the client stalled (throttled for "
        "heat or power,"
        " clocked down, or slowed by the host of a virtual machine)"
    )


def _stalled_s(shard: SelfReport) -> float:
    spans = () if shard.stalls is None else shard.stalls.spans_s
    return sum(until_s - from_s for from_s, until_s, _ in spans)
