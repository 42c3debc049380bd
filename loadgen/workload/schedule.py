"""The schedule: every request of a run as one row, made before the clock starts.

A pure function of the scenario. Each purpose (arrivals, input lengths, …) draws from its own PCG64
stream, so that changing one leaves the others as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from loadgen.errors import ScenarioError
from loadgen.records import SCHEDULE, Phase, Schedule
from loadgen.workload.scenario import Scenario

MAX_REQUESTS = 20_000_000
"""About 1.2 GB of schedule; more is a mistyped rate."""


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of what a seed means: append, never
    renumber."""

    arrivals = 0
    input_tokens = 1
    output_tokens = 2
    prefix = 3
    prompt = 4


def stream(seed: int, purpose: Purpose) -> np.random.Generator:
    """The generator of one purpose: independent of every other one with the same seed.

    Source: M. E. O'Neill, PCG (2014); NumPy's SeedSequence spawn keys.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose,))))


def make_schedule(scenario: Scenario) -> Schedule:
    """All requests of a run, dtype `records.SCHEDULE` [n], sorted by time, request_id 0 … n − 1.

    Equal scenarios give identical bytes on one machine type. `input_tokens` counts the shared
    prefix; prefix_id is 1 … groups, or 0 for none. Raises ScenarioError when nothing would arrive
    in the measured window, or absurdly much.
    """
    instants = _instants(scenario)
    n, seed, asked = len(instants), scenario.seed, scenario.requests
    rows = np.zeros(n, SCHEDULE)
    rows["request_id"] = rows["session_id"] = np.arange(n)
    rows["scheduled_s"] = instants
    rows["phase"] = np.where(instants < scenario.phases.warmup, Phase.warmup, Phase.measure)
    rows["input_tokens"] = asked.input_tokens.draw(stream(seed, Purpose.input_tokens), n)
    rows["output_tokens"] = asked.output_tokens.draw(stream(seed, Purpose.output_tokens), n)
    if asked.shared_prefix is not None:
        groups = asked.shared_prefix.groups
        rows["prefix_id"] = stream(seed, Purpose.prefix).integers(1, groups, n, endpoint=True)
        rows["prefix_tokens"] = asked.shared_prefix.tokens
        rows["input_tokens"] += rows["prefix_tokens"]
    rows["prompt_seed"] = stream(seed, Purpose.prompt).integers(0, 2**64, n, np.uint64)
    return rows


def split(schedule: Schedule, n_shards: int) -> list[Schedule]:
    """One part per shard, by session: a session's rows stay together and in order, and the sessions
    are dealt out in turn, so each shard sees the same process thinned, not a stretch of it."""
    assert n_shards >= 1, f"a schedule cannot be split into {n_shards} parts"
    _, rank = np.unique(schedule["session_id"], return_inverse=True)
    return [schedule[rank % n_shards == shard] for shard in range(n_shards)]


def merge(parts: Sequence[Schedule]) -> Schedule:
    """The schedule that `split` took apart, byte for byte."""
    rows = np.concatenate([np.empty(0, SCHEDULE), *parts])
    return rows[np.argsort(rows["request_id"], kind="stable")]


def schedule_sha256(schedule: Schedule) -> str:
    """The fingerprint by which two runs are known to have sent the same requests (hex).

    Across machine types compare recorded files: the last bit of a logarithm may differ.
    """
    return hashlib.sha256(np.ascontiguousarray(schedule).tobytes()).hexdigest()


def _instants(scenario: Scenario) -> np.ndarray:
    horizon_s = scenario.horizon_s
    rate = scenario.arrivals.mean_rate_per_s(horizon_s)
    if rate is not None and rate * horizon_s > MAX_REQUESTS:
        raise ScenarioError(
            f"{scenario.name}: {rate:g}/s over {horizon_s:g}s asks for {rate * horizon_s:.3g} "
            f"requests, at most {MAX_REQUESTS:.0e}; lower arrivals.rate or phases.measure"
        )
    instants = scenario.arrivals.times(stream(scenario.seed, Purpose.arrivals), horizon_s)
    if not np.any(instants >= scenario.phases.warmup):
        raise ScenarioError(
            f"{scenario.name}: no request arrives in the measured {scenario.phases.measure:g}s "
            f"({scenario.arrivals!r}); lengthen phases.measure or raise arrivals.rate"
        )
    return instants
