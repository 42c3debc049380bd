"""A simulated engine, or a cluster of them, built from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from loadgen.errors import UsageError
from loadgen.lab.sim_options import (
    DraftOptions,
    MemoryOptions,
    PlacementOptions,
    SimOptions,
    problem_of,
)
from loadgen.lab.simulated_cluster import Wiring, wire
from loadgen.system.clock import VirtualClock
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Caps
from reference_engine.executors.delayed import NO_DELAY
from reference_engine.executors.halves import SIDES, DividedGpu, Half
from reference_engine.executors.simulated import SIMULATED_CONTEXT, Simulated
from reference_engine.executors.staged import Staged, Stages
from reference_engine.model.hardware_file import simulated_model
from reference_engine.model.zoo import resolve
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import PipelinedReplica, Replica, Simulator
from reference_engine.state.cost_model import (
    CPU,
    HARDWARE,
    CostModel,
    ModelOnHardware,
    stored_weight_bytes,
)
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits
from reference_engine.state.speculation import Draft, SpeculativeCost
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool

_MAX_NUM_SEQS = 256
_STEP_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """An engine, or replicas of it, at time zero; the policy of the first; a short description;
    the connection of the replicas."""

    simulator: Simulator
    policy: Policy
    description: str
    wiring: Wiring


def build(
    options: SimOptions, is_sharing: bool, policy: Policy | None = None, log: StepLog | None = None
) -> SimulatedEngine:
    """Idle engines behind their router. `policy` replaces the policy that the options name; `log`
    receives the steps of all replicas."""
    clock = VirtualClock()
    texts: list[str] = []
    renewals: dict[Replica, Callable[[], EngineState]] = {}
    for number, own in enumerate(options.each_replica(), 1):
        n_layers = resolve(own.shape).config.n_layers
        for replica, renew, text in _engines(own, is_sharing, clock, policy, log, number):
            renewals[replica], replica.n_layers = renew, n_layers
            if text not in texts:
                texts.append(text)
    replicas = list(renewals)
    chosen = replicas[0].state.policy
    wiring = wire(options.cluster, replicas, clock, lambda replica: renewals[replica]())
    simulator = Simulator(replicas, clock, wiring.route, wiring.conductor)
    if len(replicas) == 1 and wiring.conductor is None:
        return SimulatedEngine(simulator, chosen, texts[0], wiring)
    n_whole = sum(r.partner is None or r.role == "prefill" for r in replicas)
    description = f"{n_whole} replicas behind {options.cluster.router}: {'; '.join(texts)}"
    if n_whole == 1:
        description = texts[0]
    if wiring.transfers is not None:
        description += f"; KV over links of {options.cluster.links.link_bytes_per_s / 1e9:g} GB/s"
    return SimulatedEngine(simulator, chosen, description, wiring)


def _engines(
    options: SimOptions,
    is_sharing: bool,
    clock: VirtualClock,
    policy: Policy | None,
    log: StepLog | None,
    number: int,
) -> Iterator[tuple[Replica, Callable[[], EngineState], str]]:
    """The idle engine of a replica, or of the halves of its GPU: each with a function that builds
    it anew, and a description."""
    memory, placement = options.memory, options.placement
    model, n_stages = resolve(options.shape), placement.pipeline
    fit = simulated_model(
        model,
        options.hardware,
        options.kv_dtype,
        options.weight_dtype,
        n_stages,
        options.expert_parallel,
    )
    step_cost = replace(fit.cost, fused_attention=options.fused_attention or 0.0)
    cost: CostModel = step_cost
    if options.draft.draft_acceptance:
        fit, draft = _with_draft(fit, options)
        cost = SpeculativeCost(step_cost, draft)
    context = model.config.max_model_len if options.hardware == CPU else SIMULATED_CONTEXT
    max_model_len = options.max_model_len or context
    block_tokens = memory.block_tokens
    n_blocks = memory.kv_blocks or fit.kv_tokens // block_tokens
    prefix_cache = is_sharing if memory.prefix_cache is None else memory.prefix_cache
    chosen = policy if policy is not None else make_policy(options)
    limits = _limits(options, chosen, max_model_len, model.config.vocab_size)
    caps = _host_memory(memory, fit)

    def new(cost: CostModel, kv: KvPool, host: HostPool) -> EngineState:
        return EngineState(
            limits,
            kv,
            clock,
            chosen,
            cost=cost,
            predictor=QuantilePredictor(),
            log=log,
            host=host,
            preempt=memory.preempt,
            async_depth=options.async_depth,
        )

    def pools() -> tuple[KvPool, HostPool]:
        kv = KvPool(n_blocks, block_tokens, prefix_cache)
        host = HostPool(caps.n_host_blocks, caps.copy_s, caps.copy_latency_s, memory.host_prefixes)
        return kv, host

    def renew() -> EngineState:
        return new(cost, *pools())

    description = (
        f"{model.name} on {options.hardware}, {_policy_text(chosen)}, {n_blocks} KV blocks"
    )
    if fit.cost_error is not None:
        description += f", costs measured (error {fit.cost_error:.1%})"
    if fit.variation is not None and placement.split is None:
        description += ", steps vary as measured"
    if options.kv_dtype != "auto":
        description += f" of {options.kv_dtype}"
    if options.weight_dtype != "auto":
        description += f", weights of {options.weight_dtype}"
    if caps.n_host_blocks:
        kinds = "preempted KV and prefixes" if memory.host_prefixes else "preempted KV"
        description += f", {caps.n_host_blocks} blocks of host memory for {kinds}"
    if options.fused_attention is not None:
        description += f", attention of prompts and decodes fused at {options.fused_attention:.0%}"
    if options.draft.draft_acceptance:
        description += f", {_draft_text(options.draft)}"
    if options.expert_parallel:
        description += ", whole experts on each device"
    if options.step_delay != NO_DELAY:
        description += f", every step delayed by {options.step_delay}"
    if placement.role != "both":
        description += f", {placement.role} only"
    if n_stages > 1:
        description += f", {_pipeline_text(placement)}"
    if placement.split is not None:
        is_auto = placement.split == "auto"
        description += f", its GPU divided: {_split_text(placement.split)}"
        share = None if is_auto else float(placement.split)
        gpu = DividedGpu(step_cost, share, placement.split_gain, placement.split_slack)
        kv, host = pools()
        for side in SIDES:
            state = new(cost if is_auto else gpu.part(side), kv, host)
            half = Half(gpu, side, caps, options.step_delay)
            name = f"replica {number}, {side} half"
            yield Replica(state, half, name, side, fit.kv_token_bytes), renew, description
        return
    simulated = Simulated(cost, caps, options.step_delay, fit.variation, number)
    settings = f"replica {number}", placement.role, fit.kv_token_bytes
    if n_stages == 1:
        yield Replica(renew(), simulated, *settings), renew, description
        return
    n_batches = placement.pipeline_batches or n_stages
    _check_batches(chosen, n_batches)
    staged = Staged(simulated, Stages(fit.stage_shares, fit.hop_s, fit.hop_token_s), clock)
    replica = PipelinedReplica(renew(), staged, *settings, n_batches, placement.pipeline_batch_seqs)
    yield replica, renew, description


def _with_draft(fit: ModelOnHardware, options: SimOptions) -> tuple[ModelOnHardware, Draft]:
    """The model with the memory that a draft leaves, and the draft. Raises UsageError for costs
    that were measured on a server, whose drafts they have."""
    own = options.draft
    if options.hardware == CPU or fit.cost_error is not None:
        raise UsageError(
            "draft_acceptance: costs that were measured on a server are those of its drafts; "
            f"choose an accelerator: {', '.join(HARDWARE)}"
        )
    if own.draft_shape is None:
        return fit, Draft(own.draft_acceptance, own.draft_step)
    source = resolve(own.draft_shape)
    model = simulated_model(source, options.hardware, options.kv_dtype, options.weight_dtype)
    token_bytes = fit.kv_token_bytes + model.kv_token_bytes
    room = fit.kv_tokens * fit.kv_token_bytes
    room -= stored_weight_bytes(source.config, options.weight_dtype)
    n_tokens = int(room // token_bytes)
    if n_tokens < options.memory.block_tokens:
        raise UsageError(
            f"draft_shape: {source.name} leaves no memory for KV on {options.hardware}"
        )
    together = replace(
        fit,
        kv_tokens=n_tokens,
        kv_token_bytes=token_bytes,
        copy_token_s=fit.copy_token_s + model.copy_token_s,
    )
    return together, Draft(own.draft_acceptance, own.draft_step, model.cost)


def _draft_text(draft: DraftOptions) -> str:
    shares = " ".join(f"{share:.0%}" for share in draft.draft_acceptance)
    by = "" if draft.draft_shape is None else f" of {draft.draft_shape}"
    return f"{len(draft.draft_acceptance)} drafted tokens{by}, accepted {shares}"


def _check_batches(policy: Policy, n_batches: int) -> None:
    """Raises UsageError for a mode that cannot have several batches under way."""
    if n_batches > 1 and type(policy).on_step_end is not Policy.on_step_end:
        raise UsageError(
            f"pipeline: the mode '{policy.kind}' follows one batch from step to step; use "
            "pipeline_batches=1, or another mode, e.g. chunked"
        )


def _pipeline_text(placement: PlacementOptions) -> str:
    n_batches = placement.pipeline_batches or placement.pipeline
    return f"a pipeline of {placement.pipeline} stages with up to {n_batches} batches under way"


def _host_memory(memory: MemoryOptions, fit: ModelOnHardware) -> Caps:
    """The host memory of an engine."""
    block_bytes, n_blocks = fit.kv_token_bytes * memory.block_tokens, memory.swap_blocks
    if memory.host_memory is not None:
        n_blocks = int(memory.host_memory // block_bytes)
    copy_s = fit.copy_token_s * memory.block_tokens
    if memory.host_bytes_per_s is not None:
        copy_s = block_bytes / memory.host_bytes_per_s
    return Caps(n_blocks, copy_s=copy_s, copy_latency_s=memory.host_latency)


def _split_text(split: float | str) -> str:
    return "by the present decodes" if split == "auto" else f"{split:.0%} for prompts"


def make_policy(options: SimOptions) -> Policy:
    """The mode with its parameters; an engine-wide limit also applies to a mode with that
    parameter."""
    cls = POLICIES.get(options.mode)
    shared = options.model_dump(include={"max_num_seqs", "token_budget"}, exclude_none=True)
    if "token_budget" in shared and "token_budget" not in cls.model_fields:
        raise UsageError(f"token_budget: the mode '{options.mode}' has none")
    applicable = {key: value for key, value in shared.items() if key in cls.model_fields}
    try:
        return cls.model_validate({**applicable, **options.policy_args})
    except ValidationError as error:
        raise UsageError(f"mode '{options.mode}': {problem_of(error)}") from None


def _limits(options: SimOptions, policy: Policy, max_model_len: int, vocab_size: int) -> Limits:
    """The limits of a server: those of the mode, but always room for a whole long prompt in a
    step."""
    max_num_seqs = options.max_num_seqs or max(_MAX_NUM_SEQS, getattr(policy, "max_num_seqs", 0))
    budget = getattr(policy, "token_budget", None)
    most_tokens = max(budget if isinstance(budget, int) else 0, max_model_len, _STEP_TOKENS)
    return Limits(max_num_seqs, most_tokens + max_num_seqs, max_model_len, vocab_size)


def _policy_text(policy: Policy) -> str:
    changed = policy.model_dump(mode="json", exclude_defaults=True)
    return " ".join([policy.kind, *(f"{key}={value}" for key, value in changed.items())])
