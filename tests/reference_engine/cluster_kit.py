"""Simulated clusters for tests: replicas by role, and clients that take single steps or many."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from loadgen.system.clock import VirtualClock
from reference_engine.cluster.autoscaling import Autoscaling
from reference_engine.cluster.conductors import Cluster
from reference_engine.cluster.conductors import Part as Part_
from reference_engine.cluster.disaggregation import Disaggregation, disaggregation
from reference_engine.cluster.failures import Failures
from reference_engine.cluster.kv_links import KvLinks
from reference_engine.cluster.membership import Membership
from reference_engine.cluster.rebalancing import Rebalancing
from reference_engine.cluster.routers import read_router
from reference_engine.cluster.splitting import splitting
from reference_engine.cluster.transfers import Transfers
from reference_engine.core.core import EngineState
from reference_engine.executors.halves import SIDES, DividedGpu, Half
from reference_engine.executors.simulated import Simulated
from reference_engine.executors.staged import Staged, Stages
from reference_engine.policies.base import POLICIES
from reference_engine.simulator import PipelinedReplica, Replica, Simulator
from reference_engine.state.cost_model import StepCost
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request, State
from reference_engine.state.step_variation import StepVariation
from reference_engine.state.steps import StepLog

WIDE = Limits(1000, 1 << 20, 1 << 17, 1 << 17)


@dataclass(frozen=True)
class Part:
    """Replicas that are alike."""

    role: str = "both"
    n: int = 1
    step_s: float = 1.0
    n_blocks: int = 1000
    mode: str = "chunked"
    cost: StepCost | None = None
    variation: StepVariation | None = None


def replicas_of(parts, clock, kv_token_bytes=1.0):
    replicas: list[Replica] = []
    for part in parts:
        for _ in range(part.n):
            cost = part.cost or StepCost(step_s=part.step_s)
            state = EngineState(
                WIDE,
                KvPool(part.n_blocks),
                clock,
                POLICIES.build({"kind": part.mode}),
                cost=cost,
                log=StepLog(level="full"),
            )
            name = f"r{len(replicas)}"
            executor = Simulated(cost, variation=part.variation, number=len(replicas))
            replicas.append(Replica(state, executor, name, part.role, kv_token_bytes))
    return replicas


def disaggregated(
    parts,
    link,
    kv_factor=1.0,
    router="round_robin",
    decode_router="round_robin",
    rebalance_s=None,
):
    """A simulator of prefill and decode replicas; its transfers."""
    clock, rng = VirtualClock(), np.random.default_rng(0)
    replicas = replicas_of(parts, clock)
    transfers = Transfers(link, kv_factor)
    part = disaggregation(
        replicas, transfers, clock.now_s, rng, read_router(router), read_router(decode_router)
    )
    parts = [part]
    if rebalance_s is not None:
        decoders = [replica for replica in replicas if replica.role == "decode"]
        parts.append(Rebalancing(transfers, decoders, rebalance_s, gap=0.2))
    simulator = Simulator(replicas, clock, part.route, Cluster(transfers, parts))
    return simulator, transfers


def divided(
    n_gpus=1, cost=None, share=0.5, gain=1.2, slack=1.3, n_blocks=1000, mode="chunked", **args
):
    """A simulator of GPUs that are divided into halves for prompts and decodes."""
    clock, rng, replicas = VirtualClock(), np.random.default_rng(0), list[Replica]()
    for _ in range(n_gpus):
        gpu = DividedGpu(cost or StepCost(token_s=0.01), share, gain, slack)
        kv = KvPool(n_blocks)
        for side in SIDES:
            policy = POLICIES.build({"kind": mode, **args})
            log = StepLog(level="full")
            state = EngineState(WIDE, kv, clock, policy, cost=gpu.cost, log=log)
            replicas.append(Replica(state, Half(gpu, side), f"r{len(replicas)}", side))
    part = splitting(replicas, clock.now_s, rng, read_router("join_shortest_queue"))
    return Simulator(replicas, clock, part.route, Cluster(Transfers(KvLinks(1.0)), [part]))


def lossy(parts, planned=(), retries=None, rule=None, router="round_robin", random=None):
    """A simulator of replicas that fail, as planned or at random, and scale by a rule; failures and
    scaling."""
    clock, rng = VirtualClock(), np.random.default_rng(0)
    replicas = replicas_of(parts, clock)
    members = Membership(replicas, read_router(router), clock.now_s, rng)

    def renew(replica):
        old = replica.state
        kv, cost = KvPool(old.kv.n_blocks), StepCost(step_s=parts[0].step_s)
        return EngineState(WIDE, kv, clock, old.policy, cost=cost, log=old.log)

    failures = Failures(members, renew, planned, random, retries)
    cluster: list[Part_] = [failures]
    scaling = None
    if rule is not None:
        scaling = Autoscaling(members, rule)
        cluster.append(scaling)
    conductor = Cluster(Transfers(KvLinks(1.0)), cluster)
    return Simulator(replicas, clock, members.route, conductor), failures, scaling


def conducted(
    parts,
    link,
    planned=(),
    retries=None,
    rule=None,
    decode_rule=None,
    rebalance_s=None,
    random=None,
    stages=1,
    router="join_shortest_queue",
    n_layers=0,
):
    """A simulator of replicas with roles that fail and scale, between which decoding requests move;
    its conductor's parts by name. With `n_layers` KV is sent layer by layer."""
    clock, rng = VirtualClock(), np.random.default_rng(0)
    replicas = replicas_of(parts, clock)
    if stages > 1:
        replicas = [_pipelined(replica, stages, clock) for replica in replicas]
    transfers, has_roles = Transfers(link), any(r.role != "both" for r in replicas)
    decode_router = read_router(router) if has_roles else None
    members = Membership(replicas, read_router(router), clock.now_s, rng, decode_router)
    decoders = [replica for replica in replicas if replica.role == "decode"]
    split = None
    if has_roles:
        is_layerwise = n_layers > 0
        split = Disaggregation(
            transfers, members.route, decoders, members.decode_route, is_layerwise
        )
        for replica in replicas:
            replica.n_layers = n_layers or 1
            replica.is_single_step = is_layerwise and replica.role == "prefill"

    def renew(replica):
        old = replica.state
        cost = StepCost(step_s=parts[0].step_s)
        kv = KvPool(old.kv.n_blocks)
        return EngineState(WIDE, kv, clock, old.policy, cost=cost, log=old.log)

    failures = Failures(members, renew, planned, random, retries, transfers, split)
    cluster: list[Part_] = [failures]
    scaling = {}
    if rule is not None:
        entry = [replica for replica in replicas if replica.role != "decode"]
        scaling["entry"] = Autoscaling(
            members, rule, entry, lambda simulator: sum(len(r.population) for r in entry)
        )
    if decode_rule is not None:
        scaling["decode"] = Autoscaling(
            members, decode_rule, decoders, lambda s: sum(len(r.population) for r in decoders)
        )
    cluster += [*scaling.values()] + ([] if split is None else [split])
    if rebalance_s is not None:
        movable = [replica for replica in replicas if replica.role != "prefill"]
        cluster.append(Rebalancing(transfers, movable, rebalance_s, 0.2, members.is_open))
    simulator = Simulator(replicas, clock, members.route, Cluster(transfers, cluster))
    return simulator, {"transfers": transfers, "failures": failures, **scaling}


def _pipelined(replica, n, clock):
    state = replica.state
    staged = Staged(Simulated(StepCost(step_s=1.0)), Stages((1 / n,) * n), clock)
    return PipelinedReplica(state, staged, replica.name, replica.role, replica.kv_token_bytes)


def rebalanced(parts, link, every_s, gap, route):
    """A simulator of equal replicas that rebalance; its transfers."""
    clock, transfers = VirtualClock(), Transfers(link)
    replicas = replicas_of(parts, clock)
    part = Rebalancing(transfers, replicas, every_s, gap)
    return Simulator(replicas, clock, route, Cluster(transfers, [part])), transfers


class Steps:
    """Submits requests at their arrivals and cancels some; takes single steps."""

    def __init__(self, requests, cancel_s=()):
        self.todo = [(r.arrived_s, 0, k, r) for k, r in enumerate(requests)]
        self.todo += [(at_s, 1, k, name) for k, (at_s, name) in enumerate(cancel_s)]
        self.todo.sort(key=lambda entry: entry[:3], reverse=True)
        self.requests = requests
        self.ended, self.lost, self.accounts = [], [], {}

    @property
    def is_closed(self):
        return not self.todo

    def next_s(self):
        return self.todo[-1][0] if self.todo else None

    def act(self, engine):
        while self.todo and self.todo[-1][0] <= engine.now_s:
            _, is_cancel, _, subject = self.todo.pop()
            if is_cancel:
                engine.cancel(subject)
            else:
                engine.submit(subject)

    def receive(self, events, engine):
        for request in events.ends:
            self.ended.append(request)
            self.accounts[request.id] = engine.explain(request.id)

    def refuse(self, request, error):
        raise error

    def lose(self, request, reason, engine):
        self.lost.append((request.id, reason, engine.now_s))


class Jumps(Steps):
    """As `Steps`; the engines take many steps at once."""

    def quiet_until_s(self):
        next_s = self.next_s()
        return math.inf if next_s is None else next_s


def prompt(name, n_prompt, n_output, at_s=0.0, text=None):
    token = sum(name.encode()) if text is None else text
    return Request(name, [token] * n_prompt, n_output, at_s, token_times_s=[])


def link(bytes_per_s, latency_s=0.0):
    return KvLinks(bytes_per_s, latency_s)


def check_conserved(simulator, transfers, requests, n_blocks):
    """After a run: no request is on its way, the bytes sent were received, every block is free or
    lent, and every request has ended, with all its tokens unless it was cancelled."""
    transfers.population.check("transfers")
    assert len(transfers.population) == 0
    links = transfers.links
    assert sum(links.sent_bytes.values()) == pytest.approx(sum(links.received_bytes.values()))
    for replica in simulator.replicas:
        replica.state.check()
        lent = replica.state.lent  # the run may end before a copy
        assert replica.state.kv.n_free + sum(map(len, lent.values())) == n_blocks
    for request in requests:
        assert request.state.is_over
        if request.state is not State.finished_abort:
            assert len(request.token_times_s) == request.max_tokens


def course_of(simulator, client):
    """All that single steps and many at once must have in common."""
    return (
        [(r.token_times_s, r.state, r.finished_s) for r in client.requests],
        [list(replica.state.log.steps) for replica in simulator.replicas],
        [list(replica.state.log.events) for replica in simulator.replicas],
        client.accounts,
    )
