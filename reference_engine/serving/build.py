"""Construction of an engine from options: model, KV memory, policy, executor, tokenizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadgen.errors import UsageError
from loadgen.system.clock import MonotonicClock
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Executor, ExecutorKind, Site
from reference_engine.executors.delayed import delayed
from reference_engine.executors.simulated import SIMULATED_CONTEXT, SimulatedExecutor
from reference_engine.executors.toy import ToyExecutor
from reference_engine.model.zoo import resolve
from reference_engine.policies.base import Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.serving.serve_options import ServeOptions, executor_of, policy_of
from reference_engine.serving.service import Service
from reference_engine.state.cost_model import (
    CPU_COSTS,
    CostModel,
    ModelOnHardware,
    StepCost,
)
from reference_engine.state.kv import BLOCK_TOKENS, KvPool
from reference_engine.state.model_config import ModelConfig, ModelSource
from reference_engine.state.plan import Limits
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool
from reference_engine.state.tokenizer import Tokenizer, load_tokenizer

_KV_BYTES, _KV_BLOCKS = 1 << 30, 4096  # default size of the KV memory: the smaller of both
_CONTEXT = 4096
_MAX_NUM_SEQS = 256
_STEP_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of an engine that is not running yet."""

    model: ModelSource
    limits: Limits
    state: EngineState
    executor: Executor
    tokenizer: Tokenizer
    clock: MonotonicClock

    def service(self, outbox: int = 1024, max_queue: int = 10_000) -> Service:
        """A service with this engine; start it on a running event loop."""
        return Service(self.state, self.executor, self.tokenizer, self.clock, outbox, max_queue)


def build(options: ServeOptions) -> Engine:
    """Build the engine that `options` describe. Raises UsageError or MissingDependency naming the
    option."""
    model = resolve(options.shape)
    kind = executor_of(options)
    simulated = None  # or the simulated model and hardware
    if isinstance(kind, SimulatedExecutor):
        simulated = kind.model(model)
    longest = SIMULATED_CONTEXT if simulated else model.config.max_model_len
    max_model_len = options.max_model_len or (longest if simulated else min(longest, _CONTEXT))
    if max_model_len > longest:
        raise UsageError(
            f"max_model_len: {max_model_len} is above the {longest} positions of '{model.name}'"
        )
    n_blocks = options.kv_blocks or 0
    if not n_blocks and not kind.sizes_itself:
        n_blocks = _default_blocks(model.config, max_model_len, simulated)
    policy = policy_of(options, options.mode, options.policy_args)
    limits = _limits(options, policy, max_model_len, model.config.vocab_size)
    clock = MonotonicClock()
    tokenizer = load_tokenizer(
        model.directory, options.printable and model.directory is None, model.config.eos_ids
    )
    site = Site(
        model,
        n_blocks,
        BLOCK_TOKENS,
        max_model_len,
        time.sleep,
        options.swap_blocks,
        limits.max_num_seqs,
        limits.max_step_tokens,
    )
    executor = delayed(kind.build(site), options.step_delay, clock, site.pause)
    if options.swap_blocks and not executor.caps.can_swap:
        raise UsageError(
            f"swap_blocks: device '{options.device}' cannot swap; set swap_blocks to 0"
        )
    state = EngineState(
        limits,
        KvPool(executor.caps.n_blocks or n_blocks, prefix_cache=options.prefix_cache),
        clock,
        policy,
        cost=_cost(model, kind, simulated),
        predictor=QuantilePredictor(),
        log=StepLog(options.log_level),
        host=HostPool(executor.caps.n_host_blocks, executor.caps.copy_s),
        preempt=options.preempt,
        async_depth=options.async_depth,
        is_strict=False,  # an invalid plan is counted and replaced; the server goes on
    )
    return Engine(model, limits, state, executor, tokenizer, clock)


def _limits(options: ServeOptions, policy: Policy, max_model_len: int, vocab_size: int) -> Limits:
    """The engine's limits, which stay when an operator switches to a mode with larger limits."""
    budget = getattr(policy, "token_budget", None)
    if options.token_budget is not None and budget is None:
        raise UsageError(f"token_budget: the mode '{options.mode}' has none")
    max_num_seqs = options.max_num_seqs or max(_MAX_NUM_SEQS, getattr(policy, "max_num_seqs", 0))
    # The mode applies its own budget; this limit sizes the memory for a step.
    most_tokens = max(budget if isinstance(budget, int) else 0, max_model_len, _STEP_TOKENS)
    return Limits(max_num_seqs, most_tokens + max_num_seqs, max_model_len, vocab_size)


def _cost(
    model: ModelSource, kind: ExecutorKind, simulated: ModelOnHardware | None
) -> CostModel | None:
    """The cost of steps for policies; None without a measurement, as on every GPU."""
    if simulated is not None:
        return simulated.cost
    if isinstance(kind, ToyExecutor):
        return StepCost(step_s=kind.step_s)
    return None if kind.sizes_itself else CPU_COSTS.get(model.name)


def _default_blocks(
    config: ModelConfig, max_model_len: int, simulated: ModelOnHardware | None
) -> int:
    """KV blocks: all of a simulated device's memory, else 1 GiB or 4 096 blocks, whichever is less;
    at least a full context."""
    full = -(-max_model_len // BLOCK_TOKENS)
    if simulated is not None:
        return max(full, simulated.kv_tokens // BLOCK_TOKENS)
    affordable = _KV_BYTES // (config.kv_bytes_per_token() * BLOCK_TOKENS)
    return max(full, min(_KV_BLOCKS, affordable))
