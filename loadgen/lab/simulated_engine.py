"""A simulated engine, built from settings such as `mode=chunked,shape=8b,hardware=h200`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadgen.clock import VirtualClock
from loadgen.errors import UsageError, nearest
from loadgen.lab.simulated_cluster import Wiring, read_failures, wire
from loadgen.units import Seconds, Share
from reference_engine.cluster.routers import read_router
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Caps
from reference_engine.executors.delayed import NO_DELAY, StepDelayOption
from reference_engine.executors.halves import SIDES, SPLIT_GAIN, DividedGpu, Half
from reference_engine.executors.simulated import SIMULATED_CONTEXT, Simulated
from reference_engine.executors.staged import Staged, Stages
from reference_engine.model.hardware_file import simulated_model
from reference_engine.model.zoo import resolve
from reference_engine.policies.base import POLICIES, Policy, is_for_mode
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import Replica, Role, Simulator
from reference_engine.state.cost_model import CPU, ModelOnHardware, StepCost, WeightDtype
from reference_engine.state.kv import BLOCK_TOKENS, KvPool
from reference_engine.state.model_config import KvDtype
from reference_engine.state.plan import How, Limits
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool
from targets.mock_script import split_options

_MAX_NUM_SEQS = 256
_GROUP = re.compile(r"([1-9]\d{0,3})(?::(.+))?")  # of replicas: a number, and settings of theirs
_STEP_TOKENS = 1 << 15
_OF_THE_CLUSTER = {
    *("replicas", "router", "router_seed"),
    *("decode_router", "link_bytes_per_s", "link_latency", "kv_factor"),
    *("rebalance", "rebalance_gap"),
    *("fail", "mtbf", "repair", "retries", "resume"),
    *("min_replicas", "target_requests", "autoscale_every", "startup", "scale_down_after"),
}

# Settings without an effect unless another is set, too.
_NEEDS = {
    ("retries", "resume"): ("fail", "mtbf"),
    ("repair",): ("mtbf",),
    ("min_replicas", "autoscale_every", "startup", "scale_down_after"): ("target_requests",),
    ("rebalance_gap",): ("rebalance",),
    ("split_gain", "split_slack"): ("split",),
    ("host_bytes_per_s", "host_latency", "host_prefixes"): ("host_memory", "swap_blocks"),
}
_NEEDED_EXAMPLE = {
    "fail": "fail=2@30s:60s",
    "mtbf": "mtbf=1h",
    "target_requests": "target_requests=64",
    "rebalance": "rebalance=1s",
    "split": "split=70%",
    "host_memory": "host_memory=200e9",
}


class SimOptions(BaseModel):
    """The settings of a simulated engine. All other keys are parameters of the mode
    (`policy_args`).

    None means: `max_model_len` 32 768 (on `cpu` the shape's), `max_num_seqs` and `token_budget` the
    mode's, `kv_blocks` as many as fit next to the weights, `prefix_cache` on if the scenario shares
    text. `fused_attention` is the efficiency of a kernel that computes the attention of prompts and
    decodes at the same time; None computes them one after the other. `declared_max_tokens` is the
    generation limit that every request declares, although it ends at its planned length; None
    declares the planned length. `step_delay` makes every step longer, as an injected fault.

    Host memory of `swap_blocks`, or `host_memory` bytes, keeps the KV of preempted requests, and
    with `host_prefixes` also the blocks that leave the prefix cache. `preempt` decides what is
    computed again. A copy takes `host_latency` and its bytes at `host_bytes_per_s` (None: the
    link of the hardware), and the step waits for it.

    With a `pipeline` of n stages, a replica has its layers on n times the hardware. Its n engines
    have a part of the KV memory each, and their steps pass the stages one after the other. The
    router selects among all engines.

    With `split`, a replica computes prompts and decodes at the same time, on two parts of its GPU:
    prompts on this share of the multiprocessors; with `auto` on the largest with which decodes
    take at most `split_slack` times as long as on the whole GPU. Both parts together do at most
    `split_gain` times the work of the whole GPU.

    `replicas` of the engine stand behind a `router`: `8`, or groups that differ from the other
    settings, `4+4:hardware=a100;mode=static`. `router_seed` is the seed of its random choices.

    A group with `role=prefill` computes prompts and first tokens; the KV of each request is then
    copied over links of `link_bytes_per_s` to a replica with `role=decode`, which `decode_router`
    selects. `kv_factor` is the share of the KV's bytes that is copied, as a compression leaves it.
    Each `rebalance` (a duration; None: never), a decoding request moves from the most to the least
    loaded replica if their loads differ by more than `rebalance_gap` of the mean.

    `fail` lists failures (`2@30s:60s`: replica 2 fails after 30 s and is back 60 s later); with
    `mtbf` replicas fail at random, after this mean time of service, and are back after `repair`. A
    request without a token is sent again up to `retries` times, and with `resume` also a request
    with a part of its answer.

    With `target_requests` per replica, `min_replicas` to all replicas are on: their number is
    computed every `autoscale_every`, a replica receives requests `startup` after its start, and
    replicas stop only for numbers that were lower during all of `scale_down_after`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    mode: str = "chunked"
    shape: str = "8b"
    hardware: str = "h200"
    kv_dtype: KvDtype = "auto"
    weight_dtype: WeightDtype = "auto"
    fused_attention: Annotated[Share, Field(gt=0, le=1)] | None = None
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int | None = Field(default=None, ge=1)
    token_budget: Annotated[int, Field(ge=1)] | Literal["slo"] | None = None
    block_tokens: int = Field(default=BLOCK_TOKENS, ge=1)
    kv_blocks: int | None = Field(default=None, ge=1)
    swap_blocks: int = Field(default=0, ge=0)
    host_memory: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    host_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    host_latency: Annotated[Seconds, Field(ge=0)] = 0.0
    host_prefixes: bool = False
    preempt: How = How.auto
    prefix_cache: bool | None = None
    async_depth: int = Field(default=0, ge=0, le=1)
    step_delay: StepDelayOption = NO_DELAY
    declared_max_tokens: int | None = Field(default=None, ge=1)
    replicas: str = "1"
    router: str = "round_robin"
    router_seed: int = Field(default=0, ge=0)
    pipeline: int = Field(default=1, ge=1, le=64)
    role: Role = "both"
    split: Annotated[Share, Field(gt=0, lt=1)] | Literal["auto"] | None = None
    split_gain: float = Field(default=SPLIT_GAIN, ge=1, le=2)
    split_slack: float = Field(default=1.3, ge=1, allow_inf_nan=False)
    decode_router: str = "join_shortest_queue"
    link_bytes_per_s: float = Field(default=50e9, gt=0, allow_inf_nan=False)
    link_latency: Annotated[Seconds, Field(ge=0)] = 0.0
    kv_factor: float = Field(default=1.0, gt=0, le=1)
    rebalance: Annotated[Seconds, Field(gt=0)] | None = None
    rebalance_gap: Annotated[Share, Field(ge=0)] = 0.2
    fail: str = ""
    mtbf: Annotated[Seconds, Field(gt=0)] | None = None
    repair: Annotated[Seconds, Field(gt=0)] = 60.0
    retries: int = Field(default=0, ge=0)
    resume: bool = False
    min_replicas: int = Field(default=1, ge=1)
    target_requests: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    autoscale_every: Annotated[Seconds, Field(gt=0)] = 15.0
    startup: Annotated[Seconds, Field(ge=0)] = 60.0
    scale_down_after: Annotated[Seconds, Field(ge=0)] = 300.0
    policy_args: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """An engine, or replicas of it, at time zero; the policy of the first; a short description;
    the connection of the replicas."""

    simulator: Simulator
    policy: Policy
    description: str
    wiring: Wiring


def read_settings(text: str) -> dict[str, str]:
    """`mode=chunked,shape=8b` as a mapping. Raises UsageError for a repeated key."""
    settings: dict[str, str] = {}
    for key, value in split_options(text):
        name = key.replace("-", "_")
        if name in settings:
            raise UsageError(f"setting '{key}' is given twice: {settings[name]} and {value}")
        settings[name] = value
    return settings


def sim_options(settings: Mapping[str, Any]) -> SimOptions:
    """The settings as options; a parameter of the mode goes to the mode.

    Raises UsageError with the nearest key, or with the reason why a value is invalid.
    """
    mode = POLICIES.get(str(settings.get("mode", SimOptions().mode)))
    own, mode_keys = SimOptions.model_fields, mode.model_fields
    for key in settings:
        if key not in own and key not in mode_keys:
            hint = nearest(key, [*own, *mode_keys])
            raise UsageError(f"unknown setting '{key}' of mode '{mode.kind}'; {hint}")
    of_mode = {
        key for key, value in settings.items() if key not in own or is_for_mode(mode, key, value)
    }
    chosen = {key: value for key, value in settings.items() if key not in of_mode}
    extra = {key: value for key, value in settings.items() if key in of_mode}
    try:
        options = SimOptions.model_validate(
            {**chosen, "policy_args": {**chosen.get("policy_args", {}), **extra}}
        )
    except ValidationError as error:
        raise UsageError(_problem(error)) from None
    _check_has_effect(options)
    each_replica(options)
    read_router(options.router)
    read_router(options.decode_router, "decode_router")
    read_failures(options.fail)
    return options


def _check_has_effect(options: SimOptions) -> None:
    """Raises UsageError for a setting of failures, scaling or migration in a cluster without it."""
    given = options.model_fields_set
    for keys, needed in _NEEDS.items():
        idle = [key for key in keys if key in given]
        if idle and not any(getattr(options, key) for key in needed):
            raise UsageError(
                f"{idle[0]}: has no effect without {' or '.join(needed)}, "
                f"e.g. {_NEEDED_EXAMPLE[needed[0]]}"
            )


def each_replica(options: SimOptions) -> list[SimOptions]:
    """The settings of every replica. Raises UsageError for a malformed `replicas`."""
    shared = options.model_dump(mode="json", exclude_unset=True, exclude=_OF_THE_CLUSTER)
    replicas: list[SimOptions] = []
    for group in options.replicas.split("+"):
        match = _GROUP.fullmatch(group.strip())
        if match is None:
            raise UsageError(
                f"replicas: expected a number, or 4:hardware=h200;mode=static + …, got '{group}'"
            )
        own = read_settings((match[2] or "").replace(";", ","))
        if own.keys() & {*_OF_THE_CLUSTER, "declared_max_tokens"}:
            raise UsageError(f"replicas: '{group}': a setting of all replicas together")
        if "mode" in own and own["mode"] != options.mode:
            settings = {key: value for key, value in shared.items() if key != "policy_args"}
        else:
            settings = shared
        replicas += [sim_options({**settings, **own}) if own else options] * int(match[1])
    if len({replica.block_tokens for replica in replicas}) > 1:  # a request has one chain of hashes
        raise UsageError("replicas: block_tokens is a setting of all replicas together")
    return replicas


def build(
    options: SimOptions, is_sharing: bool, policy: Policy | None = None, log: StepLog | None = None
) -> SimulatedEngine:
    """Idle engines behind their router. `policy` replaces the policy that the options name; `log`
    receives the steps of all replicas."""
    clock = VirtualClock()
    texts: list[str] = []
    renewals: dict[Replica, Callable[[], EngineState]] = {}
    for number, own in enumerate(each_replica(options), 1):
        for replica, renew, text in _engines(own, is_sharing, clock, policy, log, number):
            renewals[replica] = renew
            if text not in texts:
                texts.append(text)
    replicas = list(renewals)
    chosen = replicas[0].state.policy
    wiring = wire(options, replicas, clock, lambda replica: renewals[replica]())
    simulator = Simulator(replicas, clock, wiring.route, wiring.conductor)
    if len(replicas) == 1 and wiring.conductor is None:
        return SimulatedEngine(simulator, chosen, texts[0], wiring)
    n_whole = sum(r.partner is None or r.role == "prefill" for r in replicas)
    description = f"{n_whole} replicas behind {options.router}: {'; '.join(texts)}"
    if n_whole == 1:
        description = texts[0]
    if wiring.transfers is not None:
        description += f"; KV over links of {options.link_bytes_per_s / 1e9:g} GB/s"
    return SimulatedEngine(simulator, chosen, description, wiring)


def _engines(
    options: SimOptions,
    is_sharing: bool,
    clock: VirtualClock,
    policy: Policy | None,
    log: StepLog | None,
    number: int,
) -> Iterator[tuple[Replica, Callable[[], EngineState], str]]:
    """The idle engine of a replica, or as many as its pipeline has stages: each with a function
    that builds it anew, and a description."""
    model, n_stages = resolve(options.shape), options.pipeline
    fit = simulated_model(model, options.hardware, options.kv_dtype, options.weight_dtype, n_stages)
    cost = replace(fit.cost, fused_attention=options.fused_attention or 0.0)
    context = model.config.max_model_len if options.hardware == CPU else SIMULATED_CONTEXT
    max_model_len = options.max_model_len or context
    block_tokens = options.block_tokens
    n_blocks = options.kv_blocks or fit.kv_tokens // block_tokens // n_stages
    prefix_cache = is_sharing if options.prefix_cache is None else options.prefix_cache
    chosen = policy if policy is not None else make_policy(options)
    limits = _limits(options, chosen, max_model_len, model.config.vocab_size)
    caps = _host_memory(options, fit, n_stages)

    def new(cost: StepCost, kv: KvPool, host: HostPool) -> EngineState:
        return EngineState(
            limits,
            kv,
            clock,
            chosen,
            cost=cost,
            predictor=QuantilePredictor(),
            log=log,
            host=host,
            preempt=options.preempt,
            async_depth=options.async_depth,
        )

    def memory() -> tuple[KvPool, HostPool]:
        kv = KvPool(n_blocks, block_tokens, prefix_cache)
        host = HostPool(caps.n_host_blocks, caps.copy_s, caps.copy_latency_s, options.host_prefixes)
        return kv, host

    def renew() -> EngineState:
        return new(cost, *memory())

    description = (
        f"{model.name} on {options.hardware}, {_policy_text(chosen)}, {n_blocks} KV blocks"
    )
    if fit.held_out_error is not None:
        description += f", costs measured (error {fit.held_out_error:.1%})"
    if fit.variation is not None and options.split is None:
        description += ", steps vary as measured"
    if options.kv_dtype != "auto":
        description += f" of {options.kv_dtype}"
    if options.weight_dtype != "auto":
        description += f", weights of {options.weight_dtype}"
    if caps.n_host_blocks:
        kinds = "preempted KV and prefixes" if options.host_prefixes else "preempted KV"
        description += f", {caps.n_host_blocks} blocks of host memory for {kinds}"
    if options.fused_attention is not None:
        description += f", attention of prompts and decodes fused at {options.fused_attention:.0%}"
    if options.step_delay != NO_DELAY:
        description += f", every step delayed by {options.step_delay}"
    if options.role != "both":
        description += f", {options.role} only"
    if n_stages > 1:
        description += f", one of {n_stages} engines of a pipeline of {n_stages} stages"
    if options.split is not None:
        if n_stages > 1 or options.role != "both":
            raise UsageError("split: not simulated together with pipeline or role")
        is_auto = options.split == "auto"
        description += f", its GPU divided: {_split_text(options.split)}"
        share = None if is_auto else float(options.split)
        gpu = DividedGpu(cost, share, options.split_gain, options.split_slack)
        kv, host = memory()
        for side in SIDES:
            state = new(cost if is_auto else gpu.part(side), kv, host)
            half = Half(gpu, side, caps, options.step_delay)
            name = f"replica {number}, {side} half"
            yield Replica(state, half, name, side, fit.kv_token_bytes), renew, description
        return
    stages = Stages(n_stages, fit.hop_s, fit.hop_token_s)
    for k in range(n_stages):
        simulated = Simulated(cost, caps, options.step_delay, fit.variation, number)
        executor = simulated if n_stages == 1 else Staged(simulated, stages, clock)
        name = f"replica {number}" if n_stages == 1 else f"replica {number}, engine {k + 1}"
        yield Replica(renew(), executor, name, options.role, fit.kv_token_bytes), renew, description


def _host_memory(options: SimOptions, fit: ModelOnHardware, n_engines: int) -> Caps:
    """The host memory of an engine, of which a replica has `n_engines`."""
    block_bytes, n_blocks = fit.kv_token_bytes * options.block_tokens, options.swap_blocks
    if options.host_memory is not None:
        if n_blocks:
            raise UsageError("host_memory: leave out swap_blocks, or host_memory")
        n_blocks = int(options.host_memory // block_bytes) // n_engines
    copy_s = fit.copy_token_s * options.block_tokens
    if options.host_bytes_per_s is not None:
        copy_s = block_bytes / options.host_bytes_per_s
    return Caps(n_blocks, copy_s=copy_s, copy_latency_s=options.host_latency)


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
        raise UsageError(f"mode '{options.mode}': {_problem(error)}") from None


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


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key, value = first["loc"][0], first["input"]
    if first["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return f"{key}: unknown value {value!r}; {nearest(str(value), known)}"
    if first["type"] == "value_error":  # of this project, with the value
        return f"{key}: {first['ctx']['error']}"
    return f"{key}: {first['msg']}, got {value!r}"
