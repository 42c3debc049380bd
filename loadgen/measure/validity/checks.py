"""Whether a run can be believed: all checks of a run in one table.

A *gate* that fails makes the run INVALID, whatever the latencies say; the other checks only tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.measure.load import LoadByQuarter
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo import Slo
from loadgen.measure.stalls import stalls
from loadgen.measure.validity.check import ValidityCheck
from loadgen.measure.validity.client_checks import (
    connections,
    encoding,
    lateness,
    loop_lag,
    read_backlog,
    share_of_time,
    shared_cores,
    stalls_of_our_own,
)
from loadgen.measure.validity.machine_checks import processor_speed, steal
from loadgen.measure.validity.sent_checks import client_limits, record, stimulus
from loadgen.measure.validity.served_checks import cache, grown_load, input_lengths, output_lengths
from loadgen.records import Run


def checks(
    run: Run, columns: PerRequest, due: Mask, slos: Sequence[Slo], load: LoadByQuarter | None
) -> list[ValidityCheck]:
    """All checks of a run, gates first; the limits are the manifest's."""
    limits, shards = run.manifest.instrument_limits, run.instrument.shards
    return [
        record(run),
        *client_limits(run),
        lateness(run, columns, due, slos, limits, shards),
        loop_lag(shards, limits.loop_lag_s),
        read_backlog(shards, limits.read_backlog_s),
        share_of_time(
            "client CPU",
            "of one core used by the client",
            "the client ran out of CPU; use more workers or a lower rate",
            shards,
            lambda shard: shard.cpu_share,
            limits.cpu_share,
        ),
        share_of_time(
            "run delay",
            "of the run spent runnable but not running",
            "the machine was too busy to schedule the client",
            shards,
            lambda shard: shard.run_delay_share,
            limits.run_delay_share,
        ),
        shared_cores(run, shards, limits.run_delay_share),
        share_of_time(
            "throttling",
            "of the run throttled by the cgroup",
            "the container's CPU quota held the client back",
            shards,
            lambda shard: shard.throttled_share,
            limits.run_delay_share,
        ),
        steal(shards),
        processor_speed(shards),
        stimulus(run),
        stalls_of_our_own(stalls(run, columns, due), int(np.count_nonzero(due))),
        grown_load(load),
        cache(run, due),
        output_lengths(run, columns, due),
        input_lengths(run, due),
        connections(shards),
        encoding(run, shards),
    ]


def is_trusted(found: Sequence[ValidityCheck]) -> bool:
    return not any(check.is_gate and check.ok is False for check in found)
