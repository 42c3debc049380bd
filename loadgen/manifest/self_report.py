"""Measurements that the load generator takes of itself during a run, one report per worker.

A worker is a load-generating process. Each fills its report at its end, `measure.validity` judges
it, and manifest.json keeps it under `instrument`. Durations are seconds; a share is a fraction of
`window_s`, the time that the worker measured. None: the system does not state the value.
"""

from __future__ import annotations

from loadgen.manifest.json_section import JsonSection

PROBE_PERIOD_S = 0.01  # between two probes of a worker's event loop, on average
LONGEST_PROBE_GAP_S = 1.5 * PROBE_PERIOD_S


class CoreSeconds(JsonSection, frozen=True):
    """Time of the cores that a worker may run on, added up over them: of its own thread (`own_s`),
    idle, of all programs, and in all. `most_stolen_s` is the time that the host of a virtual
    machine took from the core that it took most from. `online` counts the machine's cores."""

    allowed: tuple[int, ...]
    online: int | None
    own_s: float
    idle_s: float
    programs_s: float
    total_s: float
    most_stolen_s: float | None


class LoopLag(JsonSection, frozen=True):
    """Delay of the event loop, from `n` probes: how late an alarm was, seconds."""

    n: int
    p50: float
    p99: float
    max: float


class StallsReport(JsonSection, frozen=True):
    """Probes of the event loop that came later than `over_s`, as (from, until, delay of the latest
    probe), in seconds since the run epoch and by time."""

    over_s: float
    spans_s: tuple[tuple[float, float, float], ...]


class BacklogReport(JsonSection, frozen=True):
    """Bytes waiting in the sockets to be read: `waiting` of `looks` at a socket found some;
    `wait_mean_s` is the mean time that bytes waited, estimated from them and `reads`."""

    looks: int
    waiting: int
    bytes_max: int
    reads: int
    wait_mean_s: float


class ProcessorReport(JsonSection, frozen=True):
    """Speed of the processor, from the same small work timed at each of `looks`. It usually took
    `usual_s`. `slow_s` is the time during which it took three times as long, `slow_in_stalls_s` the
    part of that inside stalls, `slow_speed` the speed then over the usual speed (None: never
    slow)."""

    looks: int
    usual_s: float
    slow_s: float
    slow_in_stalls_s: float
    slow_speed: float | None


class GcReport(JsonSection, frozen=True):
    """Garbage collections while measuring."""

    collections: int
    pause_max_s: float


class DecodingReport(JsonSection, frozen=True):
    """Time that decoding the recorded bytes took after the run, seconds. `helper_cpu_s` is the CPU
    time of the process that decoded while the run went on, 0 without it."""

    cpu_s: float
    wall_s: float
    helper_cpu_s: float = 0.0


class ConnectionsReport(JsonSection, frozen=True):
    """Connections of a worker. `known` are the addresses that the target's name stands for;
    `not_opened_ahead` counts connections that were to be open before the first request and were
    not."""

    opened: int
    reused: int
    known: tuple[str, ...]
    not_opened_ahead: int = 0


class ThreadUse(JsonSection, frozen=True):
    """Use of the processor by a worker's thread: shares of `window_s` (s), None where the system
    does not state them."""

    window_s: float
    cpu_share: float | None
    run_delay_share: float | None
    throttled_share: float | None
    stolen_share: float | None
    cores: CoreSeconds | None


class SelfReport(ThreadUse, frozen=True):
    """Measurements of one worker. `broken` is the error that ended it early, "" without one;
    `encoded_late` counts requests whose bytes were made only when they were due; `spilled_bytes`
    were written to disk while measuring."""

    shard: int
    broken: str
    loop_lag_s: LoopLag
    stalls: StallsReport | None
    backlog: BacklogReport | None
    processor: ProcessorReport | None
    gc: GcReport
    decoding: DecodingReport
    connections: ConnectionsReport
    encoded_late: int
    spilled_bytes: int


class ClientReport(JsonSection, frozen=True):
    """Reports of all workers of a run, none for a simulated run. `family_s` is the CPU time, on the
    workers' cores, of the controlling process and of a server that it started."""

    shards: tuple[SelfReport, ...] = ()
    family_s: float = 0.0
