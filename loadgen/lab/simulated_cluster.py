"""The router and the conductor of simulated replicas, from the settings of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.clock import VirtualClock
from loadgen.lab.sim_options import ClusterOptions
from reference_engine.cluster.autoscaling import Autoscaling, ScalingRule
from reference_engine.cluster.conductors import Cluster, Part
from reference_engine.cluster.disaggregation import disaggregation
from reference_engine.cluster.failures import Failures, RandomFailures, Retries
from reference_engine.cluster.kv_links import KvLinks
from reference_engine.cluster.membership import Membership
from reference_engine.cluster.rebalancing import rebalancing
from reference_engine.cluster.routers import Site, read_router
from reference_engine.cluster.splitting import splitting
from reference_engine.cluster.transfers import Transfers
from reference_engine.core.core import EngineState
from reference_engine.executors.halves import Half
from reference_engine.simulator import Replica, Route, only_replica


@dataclass(frozen=True, slots=True)
class Wiring:
    """A router, and the conductor with its parts; all None for replicas that are only routed to."""

    route: Route
    conductor: Cluster | None = None
    transfers: Transfers | None = None
    failures: Failures | None = None
    scaling: Autoscaling | None = None


def wire(
    options: ClusterOptions,
    replicas: Sequence[Replica],
    clock: VirtualClock,
    renew: Callable[[Replica], EngineState],
) -> Wiring:
    """Connects replicas as their settings state; `renew` builds the engine of a replica anew."""
    if options.is_changing:
        return _changing(options, replicas, clock, renew)
    whole = [replica for replica in replicas if not isinstance(replica.executor, Half)]
    if options.migration.rebalance is not None or any(r.role != "both" for r in whole):
        return _moving(options, replicas, clock)
    if len(replicas) == 1:
        return Wiring(only_replica)
    rng = np.random.default_rng(options.router_seed)
    if len(whole) < len(replicas):
        part = splitting(replicas, clock.now_s, rng, read_router(options.router))
        transfers = Transfers(KvLinks(options.links.link_bytes_per_s))
        return Wiring(part.route, Cluster(transfers, [part]))
    return Wiring(read_router(options.router).route(Site(replicas, clock.now_s, rng)))


def _moving(options: ClusterOptions, replicas: Sequence[Replica], clock: VirtualClock) -> Wiring:
    """Replicas between which requests move."""
    rng, router = np.random.default_rng(options.router_seed), read_router(options.router)
    links = KvLinks(options.links.link_bytes_per_s, options.links.link_latency)
    transfers, parts = Transfers(links, options.links.kv_factor), list[Part]()
    if all(replica.role == "both" for replica in replicas):
        route = router.route(Site(replicas, clock.now_s, rng))
    else:
        decode_router = read_router(options.links.decode_router)
        split = disaggregation(replicas, transfers, clock.now_s, rng, router, decode_router)
        route = split.route
        parts.append(split)
    every_s, gap = options.migration.rebalance, options.migration.rebalance_gap
    if every_s is not None:
        movable = [replica for replica in replicas if replica.role != "prefill"]
        parts.append(rebalancing(movable, transfers, every_s, gap))
    return Wiring(route, Cluster(transfers, parts), transfers)


def _changing(
    options: ClusterOptions,
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
    failing, own = options.failures, options.scaling
    if failing.is_on:
        random = None
        if failing.mtbf is not None:
            rng = np.random.default_rng([seed, 1])
            random = RandomFailures(failing.mtbf, failing.repair, rng)
        retries = Retries(failing.retries, failing.resume)
        failures = Failures(members, renew, failing.planned(), random, retries)
        parts.append(failures)
    if own.target_requests is not None:
        rule = ScalingRule(
            own.min_replicas,
            own.target_requests,
            own.autoscale_every,
            own.startup,
            own.scale_down_after,
        )
        scaling = Autoscaling(members, rule)
        parts.append(scaling)
    conductor = Cluster(Transfers(KvLinks(options.links.link_bytes_per_s)), parts)
    return Wiring(members.route, conductor, None, failures, scaling)
