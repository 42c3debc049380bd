"""The settings of simulated engines as the step core in C takes them, or the reason why only the
Python core simulates them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from loadgen.errors import MissingDependency, SlobenchError
from loadgen.lab.open_loop import is_open_loop
from loadgen.lab.sim_options import ClusterOptions, SimOptions
from loadgen.lab.simulated_engine import SimulatedEngine
from loadgen.system.cache_directory import cache_dir
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from reference_engine.cluster.routers import (
    JoinShortestQueue,
    LeastKv,
    PowerOfTwo,
    RandomReplica,
    RoundRobin,
    read_router,
)
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import Policy
from reference_engine.policies.chunked import Chunked
from reference_engine.policies.continuous import Continuous, Orca
from reference_engine.policies.dynamic import Dynamic
from reference_engine.policies.fixed_batch import FinishedRows, FixedBatchPolicy, Pad
from reference_engine.policies.prefill_first import PrefillFirst
from reference_engine.policies.split_fuse import SplitFuse
from reference_engine.policies.static import Static
from reference_engine.policies.step_budget import Reserve
from reference_engine.simulator import Replica
from reference_engine.state.plan import Limits
from reference_engine.step_core.library import (
    PROGRAM,
    Batching,
    EngineSettings,
    Load,
    Planning,
    Reserved,
    RouterSettings,
    Status,
)

_RESERVED = {
    Reserve.watermark: Reserved.step,
    Reserve.prompt: Reserved.prompt,
    Reserve.max: Reserved.longest,
}


GIVEN_UP = {
    Status.stuck: "a step without progress",
    Status.no_memory: "no memory",
}
"""Why a run that the step core began is simulated in Python."""


class NotCovered(SlobenchError):
    """A setting that the step core does not simulate; the message names it."""


@dataclass(frozen=True)
class _Mode:
    """A mode as the rule and the numbers of `EngineSettings`."""

    planning: Planning
    token_budget: int
    max_num_seqs: int
    watermark: float = 0.0
    long_prefill_tokens: int = 0
    reserved: Reserved = Reserved.step
    pads_to_budget: bool = False
    batch: Batching | None = None


@dataclass(frozen=True)
class ChosenCore:
    """The library of the step core, and the settings for it; `is_open`: all arrivals are known in
    advance, else a client in Python submits the requests."""

    path: Path
    engines: list[EngineSettings]
    router: RouterSettings
    is_open: bool


def chosen_core(
    scenario: Scenario, plan: Plan, options: SimOptions, engine: SimulatedEngine
) -> ChosenCore:
    """The step core for a run. Raises NotCovered if it does not simulate the run, and
    MissingDependency if there is no compiler."""
    if options.core == "python":
        raise NotCovered("core=python")
    engines, router = core_settings(engine, options.cluster)
    return ChosenCore(library(), engines, router, is_open_loop(scenario, plan))


def library() -> Path:
    """The compiled library, compiled at its first use on this machine. Raises MissingDependency."""
    directory = cache_dir(os.environ)
    if directory is None:
        raise MissingDependency(
            "the compiled simulator is kept in the user's cache: set HOME or XDG_CACHE_HOME"
        )
    built = _built(directory, os.environ.get("CC", ""))
    if isinstance(built, str):
        raise MissingDependency(built)
    return built


@cache
def _built(directory: Path, cc: str) -> Path | str:
    """The library in `directory`, or the reason why it cannot be built, which stays the same."""
    try:
        return PROGRAM.compiled(directory, cc)
    except (MissingDependency, OSError) as error:
        return str(error)


def core_settings(
    engine: SimulatedEngine, cluster: ClusterOptions
) -> tuple[list[EngineSettings], RouterSettings]:
    """The replicas and their router for the step core. Raises NotCovered."""
    if engine.wiring.conductor is not None:
        raise NotCovered("requests that move between replicas, failures or autoscaling")
    replicas = engine.simulator.replicas
    if any(r.state.kv.prefix_cache for r in replicas):
        sizes = {r.state.kv.block_tokens for r in replicas}
        if len(sizes) > 1:
            raise NotCovered("prefix caches with blocks of different sizes")
    return [_engine(replica) for replica in replicas], _router(cluster, len(replicas))


def _engine(replica: Replica) -> EngineSettings:
    state, executor = replica.state, replica.executor
    if type(replica) is not Replica or type(executor) is not Simulated:
        raise NotCovered("pipelines and divided GPUs")
    if state.async_depth:
        raise NotCovered("steps that are planned ahead (async_depth)")
    if state.host.n_blocks:
        raise NotCovered("KV in host memory")
    cost = executor.step_cost
    if cost is None:
        raise NotCovered("costs of another kind than StepCost")
    if cost.expert_weights_s:
        raise NotCovered("experts")
    mode, limits = _mode(state.policy, state.limits), state.limits
    return EngineSettings(
        cost=cost,
        planning=mode.planning,
        token_budget=mode.token_budget,
        max_num_seqs=mode.max_num_seqs,
        n_blocks=state.kv.n_blocks,
        block_tokens=state.kv.block_tokens,
        most_seqs=limits.max_num_seqs,
        most_step_tokens=limits.max_step_tokens,
        most_model_len=limits.max_model_len,
        prefix_cache=state.kv.prefix_cache,
        watermark=mode.watermark,
        long_prefill_tokens=mode.long_prefill_tokens,
        reserved=mode.reserved,
        pads_to_budget=mode.pads_to_budget,
        batch=mode.batch,
        delay_share=executor.delay.share,
        delay_s=executor.delay.seconds,
        steps=executor.varying,
    )


def _mode(policy: Policy, limits: Limits) -> _Mode:
    if type(policy) is Chunked:
        if policy.token_budget == "slo":
            raise NotCovered("token_budget=slo")
        if policy.order != "arrival":
            raise NotCovered(f"order={policy.order}")
        return _Mode(
            Planning.chunked,
            policy.token_budget,
            policy.max_num_seqs,
            policy.watermark,
            policy.long_prefill_tokens,
            _reserved(policy.reserve),
        )
    if type(policy) is SplitFuse:
        return _Mode(
            Planning.chunked,
            policy.token_budget,
            policy.max_num_seqs,
            policy.watermark,
            pads_to_budget=policy.pad == "budget",
        )
    if type(policy) is Continuous:
        reserved = _reserved(policy.reserve)
        return _Mode(
            Planning.whole_prompts, 0, policy.max_num_seqs, policy.watermark, reserved=reserved
        )
    if type(policy) is Orca:
        return _Mode(Planning.whole_prompts, 0, policy.max_num_seqs, reserved=Reserved.longest)
    if type(policy) is PrefillFirst:
        budget = policy.max_num_batched_tokens or max(2048, limits.max_model_len)
        return _Mode(Planning.prefill_first, budget, policy.max_num_seqs, policy.watermark)
    if type(policy) is Static:
        batch = _batching(policy, policy.fill_timeout, policy.finished_rows, policy.pad)
        return _Mode(Planning.fixed_batch, 0, policy.batch_size, batch=batch)
    if type(policy) is Dynamic:
        if policy.table:
            raise NotCovered("a table of batch sizes")
        batch = _batching(policy, policy.max_delay, policy.finished_rows, policy.pad)
        batch = replace(batch, preferred_sizes=policy.preferred_sizes, padded_sizes=policy.pad_to)
        return _Mode(Planning.fixed_batch, 0, policy.max_batch_size, batch=batch)
    raise NotCovered(f"the mode {policy.kind}")


def _batching(
    policy: FixedBatchPolicy, window_s: float, finished_rows: FinishedRows, pad: Pad
) -> Batching:
    return Batching(
        window_s,
        finished_rows is FinishedRows.masked,
        pad is Pad.batch_max,
        policy.is_answering_at_end,
    )


def _reserved(reserve: Reserve) -> Reserved:
    if reserve not in _RESERVED:
        raise NotCovered(f"reserve={reserve}")
    return _RESERVED[reserve]


def _router(cluster: ClusterOptions, n_replicas: int) -> RouterSettings:
    if n_replicas == 1:
        return RouterSettings()
    router = read_router(cluster.router)
    if type(router) is RoundRobin:
        return RouterSettings(Load.in_turn)
    if type(router) is RandomReplica:
        return RouterSettings(Load.random)
    if isinstance(router, LeastKv | JoinShortestQueue) and type(router) in (
        LeastKv,
        JoinShortestQueue,
        PowerOfTwo,
    ):
        load = Load.kv if type(router) is LeastKv else Load.requests
        return RouterSettings(load, router.choices or 0, router.stale)
    raise NotCovered(f"the router {router.kind}")
