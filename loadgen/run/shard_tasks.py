"""Divides a run among its load-generating processes: the plan, the connections and the concurrency
limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from loadgen.drive.dispatch import Bounds
from loadgen.drive.task import ShardTask
from loadgen.measure.truncated import has_exact_lengths
from loadgen.run.cores import affine_cores, known_ceiling, our_quota, workers_for
from loadgen.run.example_requests import head_of, sent_tenants
from loadgen.run.target import Target
from loadgen.workload.layout import MOST_SPEED, QUICKEST_S, QUICKEST_TOKENS_PER_S
from loadgen.workload.more_units import MoreUnits
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, split_plan

_MOST_PREOPENED = 1024  # responses of 2 s at 500 requests/s; a request without a connection waits


@dataclass(frozen=True)
class Job:
    """The work of all load-generating processes of a run; each writes `shard-<number>.npz` into
    `parts_dir`. With `more`, processes add rows for users who get through their plan."""

    scenario: Scenario
    plan: Plan
    target: Target
    transport: Literal["fast", "aiohttp"]
    salt: bytes
    run_name: str
    parts_dir: Path
    is_watched: bool = False
    more: MoreUnits | None = None

    def prompts(self) -> Prompts:
        if self.target.prompts is not None:
            return self.target.prompts.salted(self.salt, self.plan.pieces)
        return Prompts(self.scenario.prompts, self.scenario.seed, self.salt, self.plan.pieces)

    def tasks(self, n_shards: int) -> list[ShardTask]:
        """A task for each of `n_shards` processes."""
        prompts, has_spare_core = self.prompts(), spare_cores(n_shards) > 0
        tasks = [shard_task(self, share, prompts) for share in self.shares(n_shards)]
        return [replace(task, decodes_meanwhile=has_spare_core) for task in tasks]

    def shares(self, n_shards: int) -> list[Share]:
        """The share of the plan of each of `n_shards` processes."""
        n_requests = len(self.plan.schedule)
        return [
            Share(number, n_shards, n_requests, part)
            for number, part in enumerate(split_plan(self.plan, n_shards))
        ]


@dataclass(frozen=True)
class Share:
    """Part `number` of a plan of `n_requests` that is divided into `n_shards` parts."""

    number: int
    n_shards: int
    n_requests: int
    plan: Plan


def shard_task(job: Job, share: Share, prompts: Prompts) -> ShardTask:
    """The task of the process with this share; `prompts` are those of the job."""
    scenario, endpoint = job.scenario, job.target.endpoint
    number, n_shards = share.number, share.n_shards
    cap = scenario.limits.max_concurrency
    n_preopen = math.ceil(2 * share.n_requests / least_s(scenario, share.plan)) + 4
    if scenario.has_closed_loop:  # its plan has more rows than are sent, and few are in flight
        n_roots = int(np.count_nonzero(job.plan.schedule["n_parents"] == 0))
        n_preopen = min(n_preopen, 2 * n_roots + 4)
    return ShardTask(
        shard=number,
        schedule=share.plan.schedule,
        edges=share.plan.edges,
        route=endpoint.route,
        head=head_of(endpoint),
        adapter=job.target.adapter,
        prompts=prompts,
        fit=job.target.fit,
        run_name=job.run_name,
        tenants=sent_tenants(scenario),
        bounds=Bounds(
            timeout_s=scenario.limits.timeout,
            max_concurrency=cap // n_shards + (number < cap % n_shards),
            when_full=scenario.limits.when_full,
            horizon_s=scenario.horizon_s,
            drain_s=scenario.phases.drain,
            warmup_s=scenario.phases.warmup,
            n_measured=scenario.requests_in_flow,
        ),
        transport=job.transport,
        connections=endpoint.connections,
        n_preopen=min(
            cap // n_shards,
            len(share.plan.schedule),
            n_preopen // n_shards + 1,
            _MOST_PREOPENED,
        ),
        part_path=job.parts_dir / f"shard-{number}.npz",
        slo_limits_s=scenario.limits_by_class(),
        more=job.more,
        has_exact_lengths=has_exact_lengths(job.target.checks),
        is_watched=job.is_watched,
    )


def least_s(scenario: Scenario, plan: Plan) -> float:
    """The time in which a plan, or a share of it, can be sent at the fastest, seconds. A closed
    loop with a number of requests plans for a user who sends them all, so its users can be through
    with their plans long before the horizon."""
    rows = plan.schedule
    if scenario.phases.requests is None or not scenario.has_closed_loop or not len(rows):
        return scenario.horizon_s
    answers_s = (QUICKEST_S + rows["output_tokens"] / QUICKEST_TOKENS_PER_S) / MOST_SPEED
    n_users = np.count_nonzero(rows["n_parents"] == 0)
    return min(scenario.horizon_s, float((answers_s + rows["think_s"]).sum() / max(1, n_users)))


def spare_cores(n_shards: int) -> int:
    """The cores that affinity and quota allow beyond a core for each shard and a core for the rest,
    such as a server on this machine. Decoding on that core while the run goes on raised the p99 of
    TTFT from 8 to 11 ms on a machine of two cores."""
    quota = our_quota()
    cores = affine_cores()
    return (cores if quota is None else min(cores, math.floor(quota))) - n_shards - 1


def shard_count(scenario: Scenario, plan: Plan, n_workers: int, cache_dir: Path | None) -> int:
    """Number of processes; `n_workers` 0: as many as the token rate needs on this machine."""
    tokens = float(plan.schedule["output_tokens"].sum(dtype=np.float64))
    asked = n_workers or workers_for(
        tokens / least_s(scenario, plan), known_ceiling(cache_dir), affine_cores(), our_quota()
    )
    return min(asked, len(plan.schedule), scenario.limits.max_concurrency)
