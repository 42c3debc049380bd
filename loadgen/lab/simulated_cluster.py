"""The router and the conductor of simulated replicas, from the settings of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.lab.sim_options import ClusterOptions, ScalingOptions
from loadgen.system.clock import VirtualClock
from reference_engine.cluster.autoscaling import Autoscaling, ScalingRule
from reference_engine.cluster.conductors import Cluster, Part
from reference_engine.cluster.disaggregation import Disaggregation, check_roles, disaggregation
from reference_engine.cluster.failures import Failures, RandomFailures, Retries
from reference_engine.cluster.kv_links import KvLinks
from reference_engine.cluster.membership import Membership
from reference_engine.cluster.rebalancing import rebalancing
from reference_engine.cluster.routers import Site, read_router
from reference_engine.cluster.splitting import splitting
from reference_engine.cluster.transfers import Transfers
from reference_engine.core.core import EngineState
from reference_engine.executors.halves import Half
from reference_engine.simulator import Replica, Route, Simulator, only_replica


@dataclass(frozen=True, slots=True)
class Wiring:
    """A router, and the conductor with its parts; None and empty for replicas that are only routed
    to."""

    route: Route
    conductor: Cluster | None = None
    transfers: Transfers | None = None
    failures: Failures | None = None
    scaling: tuple[Autoscaling, ...] = ()


def wire(
    options: ClusterOptions,
    replicas: Sequence[Replica],
    clock: VirtualClock,
    renew: Callable[[Replica], EngineState],
) -> Wiring:
    """Connects replicas as their settings state; `renew` builds the engine of a replica anew."""
    whole = [replica for replica in replicas if not isinstance(replica.executor, Half)]
    is_moving = options.migration.rebalance is not None or any_role(whole)
    if options.is_changing or is_moving:
        return _conducted(options, replicas, clock, renew)
    if len(replicas) == 1:
        return Wiring(only_replica)
    rng = np.random.default_rng(options.router_seed)
    if len(whole) < len(replicas):
        part = splitting(replicas, clock.now_s, rng, read_router(options.router))
        transfers = Transfers(KvLinks(options.links.link_bytes_per_s))
        return Wiring(part.route, Cluster(transfers, [part]))
    return Wiring(read_router(options.router).route(Site(replicas, clock.now_s, rng)))


def _conducted(
    options: ClusterOptions,
    replicas: Sequence[Replica],
    clock: VirtualClock,
    renew: Callable[[Replica], EngineState],
) -> Wiring:
    """Replicas between which requests move, and that fail, start and stop."""
    seed, links, has_roles = options.router_seed, options.links, any_role(replicas)
    rng, router = np.random.default_rng(seed), read_router(options.router)
    every_s, gap = options.migration.rebalance, options.migration.rebalance_gap
    transfers = Transfers(KvLinks(links.link_bytes_per_s, links.link_latency), links.kv_factor)
    is_moving = every_s is not None or has_roles
    decode_router = read_router(links.decode_router) if has_roles else None
    split: Disaggregation | None = None
    members: Membership | None = None
    route: Route
    if options.is_changing:
        members = Membership(replicas, router, clock.now_s, rng, decode_router)
        route = members.route
        if has_roles:
            decoders = check_roles(replicas)
            split = Disaggregation(
                transfers, route, decoders, members.decode_route, links.layerwise
            )
    elif decode_router is not None:
        split = disaggregation(
            replicas, transfers, clock.now_s, rng, router, decode_router, links.layerwise
        )
        route = split.route
    else:
        route = router.route(Site(replicas, clock.now_s, rng))
    if links.layerwise:
        for replica in replicas:
            replica.is_single_step = replica.role == "prefill"
    parts, failures = list[Part](), None
    if members is not None and options.failures.is_on:
        failures = _failures(options, members, renew, transfers if is_moving else None, split)
        parts.append(failures)
    scaling = () if members is None else _scaling(options.scaling, members, split)
    parts += scaling
    if split is not None:
        parts.append(split)
    if every_s is not None:
        movable = [replica for replica in replicas if replica.role != "prefill"]
        is_open = None if members is None else members.is_open
        parts.append(rebalancing(movable, transfers, every_s, gap, is_open))
    conductor = Cluster(transfers, parts)
    return Wiring(route, conductor, transfers if is_moving else None, failures, scaling)


def any_role(replicas: Sequence[Replica]) -> bool:
    return any(replica.role != "both" for replica in replicas)


def _failures(
    options: ClusterOptions,
    members: Membership,
    renew: Callable[[Replica], EngineState],
    transfers: Transfers | None,
    split: Disaggregation | None,
) -> Failures:
    failing, random = options.failures, None
    if failing.mtbf is not None:
        rng = np.random.default_rng([options.router_seed, 1])
        random = RandomFailures(failing.mtbf, failing.repair, rng)
    retries = Retries(failing.retries, failing.resume)
    return Failures(members, renew, failing.planned(), random, retries, transfers, split)


def _scaling(
    own: ScalingOptions, members: Membership, split: Disaggregation | None
) -> tuple[Autoscaling, ...]:
    """The autoscaling of all replicas, or of those for prompts and those that decode, each by its
    own requests."""
    if own.target_requests is None:
        return ()
    rule = ScalingRule(
        own.min_replicas,
        own.target_requests,
        own.autoscale_every,
        own.startup,
        own.scale_down_after,
    )
    if split is None:
        return (Autoscaling(members, rule),)
    entry = [replica for replica in members.replicas if replica.role != "decode"]
    decoders = [replica for replica in members.replicas if replica.role == "decode"]
    decode_rule = rule._replace(
        least=own.decode_min_replicas or rule.least,
        target=own.decode_target_requests or rule.target,
    )

    def at_entry(simulator: Simulator) -> int:
        return simulator.n_at_router + sum(len(r.population) for r in entry)

    def at_decoders(simulator: Simulator) -> int:
        on_way = sum(len(r.coming) + len(r.copying) for r in decoders)
        return on_way + split.n_without_target + sum(len(r.population) for r in decoders)

    return (
        Autoscaling(members, rule, entry, at_entry),
        Autoscaling(members, decode_rule, decoders, at_decoders),
    )
