"""All validity checks of a run, as a table.

A *gate* that fails makes the run INVALID. Gates of the evidence (rows, traffic) do so whatever the
latencies. *Timing* checks show the load generator's own delays; the gate "instrument error", which
`survival` adds, fails if these leave the verdict open. Other checks only give findings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.measure.attainment import measured_window
from loadgen.measure.load import LoadByQuarter
from loadgen.measure.per_request import Mask, PerRequest, Seconds
from loadgen.measure.slo import Slo
from loadgen.measure.stalls import stalls
from loadgen.measure.summary import ValidityCheck
from loadgen.measure.validity.client_checks import (
    client_stalls,
    connections,
    encoding,
    held_by_cap,
    lateness,
    loop_lag,
    on_schedule,
    processor_speed,
    read_backlog,
    share_of_time,
    shared_cores,
    steal,
)
from loadgen.measure.validity.imported_checks import imported_checks
from loadgen.measure.validity.traffic_checks import (
    cache,
    client_limits,
    grown_load,
    input_lengths,
    output_lengths,
    record,
    stimulus,
)
from loadgen.records import Run


def checks(
    run: Run, columns: PerRequest, due: Mask, slos: Sequence[Slo], load: LoadByQuarter | None
) -> list[ValidityCheck]:
    """All checks of a run, gates first; the limits come from the manifest."""
    if run.manifest.imported is not None:
        return imported_checks(run, run.manifest.imported, due, load)
    limits, shards = run.manifest.instrument_limits, run.instrument.shards
    return [
        record(run),
        *client_limits(run),
        stimulus(run),
        on_schedule(run, own_lateness(run, columns), due, measured_window(run).length_s),
        lateness(run, columns, due, slos, limits),
        loop_lag(run.instrument, limits),
        read_backlog(run.instrument, limits),
        share_of_time(
            "client CPU",
            "of one core used by the load generator",
            "it ran out of CPU; use more workers (--workers) or a lower rate",
            shards,
            lambda shard: shard.cpu_share,
            limits.cpu_share,
        ),
        share_of_time(
            "run delay",
            "of the run spent waiting for a CPU core",
            "other programs used the machine",
            shards,
            lambda shard: shard.run_delay_share,
            limits.run_delay_share,
        ),
        shared_cores(run.instrument, limits),
        share_of_time(
            "throttling",
            "of the run throttled by the CPU quota of the container (cgroup)",
            "raise the quota or lower the rate",
            shards,
            lambda shard: shard.throttled_share,
            limits.run_delay_share,
        ),
        steal(shards),
        processor_speed(shards),
        client_stalls(stalls(run, columns, due), int(np.count_nonzero(due))),
        grown_load(load),
        cache(run, due),
        output_lengths(run, columns, due),
        input_lengths(run, due),
        connections(shards),
        encoding(run, shards),
    ]


def own_lateness(run: Run, columns: PerRequest) -> Seconds:
    """Sent − released of each row, NaN where the scenario's concurrency limit held it back."""
    late_s: Seconds = np.where(held_by_cap(run), np.nan, columns.queue_client_s)
    return late_s


def is_disturbed(table: Sequence[ValidityCheck]) -> bool:
    """Whether any check shows that the load generator was held up."""
    return any(c.ok is False and (c.is_timing or c.name == "stalls") for c in table)


def is_trusted(table: Sequence[ValidityCheck]) -> bool:
    return not any(check.is_gate and check.ok is False for check in table)
