"""The router and the conductor of simulated replicas, from the settings of an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.clock import VirtualClock
from loadgen.errors import UsageError
from loadgen.units import parse_duration_s
from reference_engine.cluster.autoscaling import Autoscaling, ScalingRule
from reference_engine.cluster.conductors import Cluster, Part
from reference_engine.cluster.disaggregation import disaggregation
from reference_engine.cluster.failures import Failure, Failures, RandomFailures, Retries
from reference_engine.cluster.kv_links import KvLinks
from reference_engine.cluster.membership import Membership
from reference_engine.cluster.rebalancing import rebalancing
from reference_engine.cluster.routers import Site, read_router
from reference_engine.cluster.splitting import splitting
from reference_engine.cluster.transfers import Transfers
from reference_engine.core.core import EngineState
from reference_engine.executors.halves import Half
from reference_engine.executors.staged import Staged
from reference_engine.simulator import Replica, Route, only_replica

if TYPE_CHECKING:
    from loadgen.lab.simulated_engine import SimOptions

_OF_COPIES = {"decode_router", "link_bytes_per_s", "link_latency", "kv_factor"}
_FAILURE = re.compile(r"([1-9]\d*)@([^:]+):(.+)")  # replica, instant, time of repair


@dataclass(frozen=True, slots=True)
class Wiring:
    """A router, and the conductor with its parts; all None for replicas that are only routed to."""

    route: Route
    conductor: Cluster | None = None
    transfers: Transfers | None = None
    failures: Failures | None = None
    scaling: Autoscaling | None = None


def wire(
    options: SimOptions,
    replicas: Sequence[Replica],
    clock: VirtualClock,
    renew: Callable[[Replica], EngineState],
) -> Wiring:
    """Connects replicas as their settings state; `renew` builds the engine of a replica anew.
    Raises UsageError for settings that do not fit together."""
    is_split = any(isinstance(replica.executor, Half) for replica in replicas)
    whole = [replica for replica in replicas if not isinstance(replica.executor, Half)]
    has_moves = options.rebalance is not None or any(r.role != "both" for r in whole)
    has_members = is_changing(options)
    if has_moves and has_members:
        raise UsageError(
            "replicas: failures and autoscaling are not simulated together with role or rebalance"
        )
    if (has_moves or has_members) and any(isinstance(r.executor, Staged) for r in replicas):
        raise UsageError(
            "pipeline: roles, migration, failures and autoscaling of the engines of a pipeline are "
            "not simulated; use pipeline=1"
        )
    if (has_moves or has_members) and is_split:
        raise UsageError(
            "split: role, rebalance, failures and autoscaling of divided GPUs are not simulated"
        )
    idle = sorted(_OF_COPIES & options.model_fields_set)
    if idle and not has_moves:
        raise UsageError(
            f"{idle[0]}: has no effect, because no KV is copied; set rebalance=1s, or replicas of "
            "two roles: 2:role=prefill+6:role=decode"
        )
    if has_members:
        return _changing(options, replicas, clock, renew)
    if has_moves:
        return _moving(options, replicas, clock)
    if len(replicas) == 1:
        return Wiring(only_replica)
    if is_split:
        rng = np.random.default_rng(options.router_seed)
        part = splitting(replicas, clock.now_s, rng, read_router(options.router))
        return Wiring(part.route, Cluster(Transfers(KvLinks(options.link_bytes_per_s)), [part]))
    rng = np.random.default_rng(options.router_seed)
    return Wiring(read_router(options.router).route(Site(replicas, clock.now_s, rng)))


def is_changing(options: SimOptions) -> bool:
    """Whether replicas fail, start or stop."""
    return bool(options.fail) or options.mtbf is not None or options.target_requests is not None


def read_failures(text: str) -> list[Failure]:
    """`2@30s:60s + 5@90s:10s`: replica 2 fails after 30 s and is back 60 s later. Raises UsageError
    for another form."""
    failures: list[Failure] = []
    for entry in text.split("+") if text else ():
        match = _FAILURE.fullmatch(entry.strip())
        try:
            if match is None:
                raise ValueError("expected replica@instant:repair")
            at_s, repair_s = parse_duration_s(match[2]), parse_duration_s(match[3])
            failures.append(Failure(at_s, int(match[1]) - 1, repair_s))
        except ValueError as error:
            raise UsageError(f"fail: '{entry.strip()}': {error}, e.g. 2@30s:60s") from None
    return failures


def _moving(options: SimOptions, replicas: Sequence[Replica], clock: VirtualClock) -> Wiring:
    """Replicas between which requests move."""
    rng, router = np.random.default_rng(options.router_seed), read_router(options.router)
    links = KvLinks(options.link_bytes_per_s, options.link_latency)
    transfers, parts = Transfers(links, options.kv_factor), list[Part]()
    if all(replica.role == "both" for replica in replicas):
        route = router.route(Site(replicas, clock.now_s, rng))
    else:
        decode_router = read_router(options.decode_router)
        split = disaggregation(replicas, transfers, clock.now_s, rng, router, decode_router)
        route = split.route
        parts.append(split)
    if options.rebalance is not None:
        movable = [replica for replica in replicas if replica.role != "prefill"]
        parts.append(rebalancing(movable, transfers, options.rebalance, options.rebalance_gap))
    return Wiring(route, Cluster(transfers, parts), transfers)


def _changing(
    options: SimOptions,
    replicas: Sequence[Replica],
    clock: VirtualClock,
    renew: Callable[[Replica], EngineState],
) -> Wiring:
    """Replicas that fail, start and stop."""
    seed = options.router_seed
    members = Membership(
        replicas, read_router(options.router), clock.now_s, np.random.default_rng(seed)
    )
    parts, failures, scaling = list[Part](), None, None
    planned = read_failures(options.fail)
    for failure in planned:
        if failure.number >= len(replicas):
            raise UsageError(
                f"fail: there is no replica {failure.number + 1}; known: 1 to {len(replicas)}"
            )
    if planned or options.mtbf is not None:
        random = None
        if options.mtbf is not None:
            rng = np.random.default_rng([seed, 1])
            random = RandomFailures(options.mtbf, options.repair, rng)
        retries = Retries(options.retries, options.resume)
        failures = Failures(members, renew, planned, random, retries)
        parts.append(failures)
    if options.target_requests is not None:
        if options.min_replicas > len(replicas):
            raise UsageError(
                f"min_replicas: {options.min_replicas} is more than the {len(replicas)} of replicas"
            )
        rule = ScalingRule(
            options.min_replicas,
            options.target_requests,
            options.autoscale_every,
            options.startup,
            options.scale_down_after,
        )
        scaling = Autoscaling(members, rule)
        parts.append(scaling)
    conductor = Cluster(Transfers(KvLinks(options.link_bytes_per_s)), parts)
    return Wiring(members.route, conductor, None, failures, scaling)
