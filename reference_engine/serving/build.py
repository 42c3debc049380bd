"""From options to an engine: model, KV memory, policy, executor, tokenizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadgen.clock import MonotonicClock
from loadgen.errors import UsageError
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
    model_on_hardware,
)
from reference_engine.state.kv import BLOCK_TOKENS, KvPool
from reference_engine.state.model_config import ModelConfig, ModelSource
from reference_engine.state.plan import Limits
from reference_engine.state.steps import StepLog
from reference_engine.state.swap import HostPool
from reference_engine.state.tokenizer import Tokenizer, load_tokenizer

_KV_BYTES = 1 << 30
_CONTEXT = 4096
_MAX_NUM_SEQS = 256
_STEP_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Engine:
    """A built engine, not yet running."""

    model: ModelSource
    limits: Limits
    state: EngineState
    executor: Executor
    tokenizer: Tokenizer
    clock: MonotonicClock

    def service(self, outbox: int = 1024, max_queue: int = 10_000) -> Service:
        """The engine in a thread; needs a running event loop."""
        return Service(self.state, self.executor, self.tokenizer, self.clock, outbox, max_queue)


def build(options: ServeOptions) -> Engine:
    """The engine that `options` describe. Raises UsageError or MissingDependency naming the
    option."""
    model = resolve(options.shape)
    kind = executor_of(options)
    found = _machine(model, kind)
    longest = model.config.max_model_len if found is None else SIMULATED_CONTEXT
    max_model_len = options.max_model_len or min(longest, _CONTEXT if found is None else longest)
    if max_model_len > longest:
        raise UsageError(
            f"max_model_len: {max_model_len} is above the {longest} positions of '{model.name}'"
        )
    n_blocks = options.kv_blocks or 0
    if not n_blocks and not kind.sizes_itself:
        n_blocks = _default_blocks(model.config, max_model_len, found)
    policy = policy_of(options.mode, options, options.policy_args)
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
        raise UsageError(f"swap_blocks: the device '{options.device}' cannot swap")
    state = EngineState(
        limits,
        KvPool(executor.caps.n_blocks or n_blocks, prefix_cache=options.prefix_cache),
        clock,
        policy,
        cost=_cost(model, kind),
        predictor=QuantilePredictor(),
        log=StepLog(options.log_level),
        host=HostPool(executor.caps.n_host_blocks, executor.caps.copy_s),
        preempt=options.preempt,
        async_depth=options.async_depth,
        is_strict=False,  # a plan that cannot be is counted, not the end of the server
    )
    return Engine(model, limits, state, executor, tokenizer, clock)


def _limits(options: ServeOptions, policy: Policy, max_model_len: int, vocab_size: int) -> Limits:
    budget = getattr(policy, "token_budget", None)
    if options.token_budget is not None and budget is None:
        raise UsageError(f"token_budget: the mode '{options.mode}' has none")
    # A mode chosen later may want more than this one: the engine's limits do not change.
    max_num_seqs = options.max_num_seqs or max(_MAX_NUM_SEQS, getattr(policy, "max_num_seqs", 0))
    # The mode has its own budget; this is what memory for one step is made for.
    most_tokens = max(budget if isinstance(budget, int) else 0, max_model_len, _STEP_TOKENS)
    return Limits(max_num_seqs, most_tokens + max_num_seqs, max_model_len, vocab_size)


def _cost(model: ModelSource, kind: ExecutorKind) -> CostModel | None:
    """What policies are told that steps cost; None where nobody measured it."""
    found = _machine(model, kind)
    if found is not None:
        return found.cost
    if isinstance(kind, ToyExecutor):
        return StepCost(step_s=kind.step_s)
    # A GPU sizes its own memory, and nobody measured what its steps cost.
    return None if kind.sizes_itself else CPU_COSTS.get(model.name)


def _machine(model: ModelSource, kind: ExecutorKind) -> ModelOnHardware | None:
    """What is simulated; None where something is computed."""
    if isinstance(kind, SimulatedExecutor):
        return model_on_hardware(model, kind.hardware, kind.kv_dtype)
    return None


def _default_blocks(config: ModelConfig, max_model_len: int, found: ModelOnHardware | None) -> int:
    full = -(-max_model_len // BLOCK_TOKENS)
    if found is not None:
        return max(full, found.kv_tokens // BLOCK_TOKENS)
    affordable = _KV_BYTES // (config.kv_bytes_per_token() * BLOCK_TOKENS)
    return max(full, min(4096, affordable))
