"""The cause of the load generator's own delays, with the remedy for that cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.manifest.sections import InstrumentLimits
from loadgen.manifest.self_report import ClientReport, SelfReport
from loadgen.measure.wording import format_count, format_share, format_value

OTHERS_SHARE = 0.10  # of the time of the client's cores
MOST_OTHERS_SHARE = 0.5  # … above which they are the likeliest cause of any delay
IDLE_SHARE = 0.05  # with this much idle time there is a core to wake up on
STOLEN_SHARE = 0.01
EXPLAINED_SHARE = 0.5  # of the client's stall time that the machine must explain to be the cause
BUSY_SHARE = 0.5  # of a core: below it, more workers would change nothing


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of the load generator's delays, and its remedy: two clauses of a sentence."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CoreSharing:
    """Use of the cores of the worker whose cores were idle least, as shares of their time: used by
    other programs (`others`), used by programs that the run started (`family`), and idle.
    `is_movable`: the worker may use every core of the machine, so the scheduler can move it."""

    n: int
    others: float
    family: float
    idle: float
    is_movable: bool

    def is_shared(self, limit: float) -> bool:
        """Whether other programs keep the cores from ever being idle (decision 46)."""
        return not self.is_movable and self.idle < IDLE_SHARE and self.others > limit


def core_sharing(client: ClientReport) -> CoreSharing | None:
    """None where a worker did not record the time of its cores."""
    recorded = [s.cores for s in client.shards if s.cores is not None and s.cores.total_s > 0]
    if not recorded or len(recorded) < len(client.shards):
        return None
    ours_s = sum(cores.own_s for cores in recorded) + client.family_s
    worst = min(recorded, key=lambda cores: cores.idle_s / cores.total_s)
    return CoreSharing(
        n=len(worst.allowed),
        others=max(0.0, worst.programs_s - ours_s) / worst.total_s,
        family=client.family_s / worst.total_s,
        idle=worst.idle_s / worst.total_s,
        is_movable=1 < len(worst.allowed) == worst.online,
    )


def sharing_limit(limits: InstrumentLimits) -> float:
    """The share of other programs above which the client's cores count as shared."""
    return max(OTHERS_SHARE, limits.run_delay_share)


def cause_of(client: ClientReport, limits: InstrumentLimits) -> Cause:
    """The most specific cause of delays of the load generator; without any recorded, a blocked
    event loop."""
    return recorded_cause(client, limits) or _blocked_loop(client.shards)


def recorded_cause(client: ClientReport, limits: InstrumentLimits) -> Cause | None:
    """The most specific recorded cause of delays of the load generator."""
    shards, sharing = client.shards, core_sharing(client)
    own_cpu = _own_cpu(shards, limits.cpu_share)
    waited = max((shard.run_delay_share or 0.0 for shard in shards), default=0.0)
    stolen = max((shard.stolen_share or 0.0 for shard in shards), default=0.0)
    is_never_idle = sharing is not None and sharing.is_shared(sharing_limit(limits))
    is_others = is_never_idle or waited > stolen
    return (
        _throttled(shards, limits.run_delay_share)
        or (_other_programs(client, limits) if is_others and not own_cpu else None)
        or _machine(shards)
        or own_cpu
        or _other_programs(client, limits)
        or _too_few_workers(shards)
    )


def _throttled(shards: Sequence[SelfReport], limit: float) -> Cause | None:
    share = max((shard.throttled_share or 0.0 for shard in shards), default=0.0)
    if share <= limit:
        return None
    return Cause(
        f"the CPU quota of the container (cgroup) throttled it for {format_share(share)} of the "
        "run",
        "raise the CPU quota (Kubernetes: resources.limits.cpu) or remove it",
    )


def _machine(shards: Sequence[SelfReport]) -> Cause | None:
    if text := steal_cause(shards):
        return Cause(text, "use a machine with dedicated cores, or measure at another time")
    if text := slow_processor_cause(shards):
        return Cause(text, "check the machine for thermal and power limits, or use another machine")
    return None


def _own_cpu(shards: Sequence[SelfReport], limit: float) -> Cause | None:
    share = max((shard.cpu_share or 0.0 for shard in shards), default=0.0)
    if share <= limit:
        return None
    text = f"a worker used {format_share(share)} of a core, so its own CPU was full"
    return Cause(text, _more_workers(shards))


def _other_programs(client: ClientReport, limits: InstrumentLimits) -> Cause | None:
    delay = max((shard.run_delay_share or 0.0 for shard in client.shards), default=0.0)
    sharing = core_sharing(client)
    is_shared = sharing is not None and sharing.is_shared(sharing_limit(limits))
    is_delayed = delay > limits.run_delay_share or any(map(_waited_in_stalls, client.shards))
    is_crowded = sharing is not None and sharing.others > MOST_OTHERS_SHARE
    if not (is_delayed or is_shared or is_crowded):
        return None
    waited = f"it waited {format_share(delay)} of the run for a core"
    if sharing is None:
        text = f"other programs used the machine: {waited}"
    elif sharing.family > sharing.others:
        share = f"{format_share(sharing.family)} of the time of its {_cores(sharing.n)}"
        return Cause(
            f"the server that this run started used up to {share}, and {waited}",
            "run the server on other cores (taskset) or on another machine",
        )
    else:
        share = f"{format_share(sharing.others)} of the time of its {_cores(sharing.n)}"
        text = f"other programs used {share}, and {waited}"
    return Cause(text, "stop the other programs, or give slobench cores or a machine of its own")


def _waited_in_stalls(shard: SelfReport) -> bool:
    """Whether the time that a worker waited for a core explains half of its stalls."""
    delays_s = [] if shard.stalls is None else [late_s for _, _, late_s in shard.stalls.spans_s]
    waited_s = (shard.run_delay_share or 0.0) * shard.window_s
    return bool(delays_s) and waited_s >= EXPLAINED_SHARE * math.fsum(delays_s)


def _too_few_workers(shards: Sequence[SelfReport]) -> Cause | None:
    share = max((shard.cpu_share or 0.0 for shard in shards), default=0.0)
    if share < BUSY_SHARE:
        return None
    text = f"a worker used {format_share(share)} of a core on average and fell behind in bursts"
    return Cause(text, _more_workers(shards))


def _more_workers(shards: Sequence[SelfReport]) -> str:
    """More workers where cores are left for them."""
    cores = {core for shard in shards if shard.cores is not None for core in shard.cores.allowed}
    if cores and len(cores) <= len(shards):
        return "lower the rate, or send the load from a machine with more cores"
    return "use more workers (--workers), or lower the rate"


def _blocked_loop(shards: Sequence[SelfReport]) -> Cause:
    pause_s = max((shard.gc.pause_max_s for shard in shards), default=0.0)
    return Cause(
        "something in its own process blocked the event loop (longest garbage collection "
        f"{format_value(pause_s, 's')})",
        "look for slow code in plug-ins, which runs inside the workers",
    )


def _cores(n: int) -> str:
    return "core" if n == 1 else f"{format_count(n)} cores"


def steal_cause(shards: Sequence[SelfReport]) -> str:
    """The time that the host took from this virtual machine, where it exceeds 1 % or half of a
    worker's stall time; else ""."""
    if (share := stolen_share(shards)) > STOLEN_SHARE:
        given = f"gave {format_share(share)} of its time to others (steal)"
        return f"the host of this virtual machine {given}"
    return next(filter(None, map(_stolen_in_stalls, shards)), "")


def stolen_share(shards: Sequence[SelfReport]) -> float:
    return max((shard.stolen_share or 0.0 for shard in shards), default=0.0)


def _stolen_in_stalls(shard: SelfReport) -> str:
    """The time taken from a core: a worker stalls on a single core at a time, and the average over
    all cores would hide it."""
    stalled_s = _stalled_s(shard)
    stolen_s = 0.0 if shard.cores is None else shard.cores.most_stolen_s or 0.0
    if not stalled_s or stolen_s < EXPLAINED_SHARE * stalled_s:
        return ""
    return (
        f"the host of this virtual machine took {format_value(stolen_s, 's')} of one core's time "
        f"(steal), and the load generator stalled for {format_value(stalled_s, 's')}"
    )


def slow_processor_cause(shards: Sequence[SelfReport]) -> str:
    """The slowdown of the processor, where it covers at least half of the stall time; else ""."""
    recorded = [shard.processor for shard in shards if shard.processor is not None]
    stalled_s = math.fsum(map(_stalled_s, shards))
    slow_s = math.fsum(processor.slow_in_stalls_s for processor in recorded)
    speeds = [processor.slow_speed or 1.0 for processor in recorded]
    if not stalled_s or slow_s < EXPLAINED_SHARE * stalled_s:
        return ""
    return (
        f"the processor ran at {format_share(min(speeds))} of its usual speed for "
        f"{format_value(slow_s, 's')} of the {format_value(stalled_s, 's')} for which the load "
        "generator stalled (throttled for heat or power, clocked down, or slowed by the host of a "
        "virtual machine)"
    )


def _stalled_s(shard: SelfReport) -> float:
    spans = () if shard.stalls is None else shard.stalls.spans_s
    return sum(until_s - from_s for from_s, until_s, _ in spans)
