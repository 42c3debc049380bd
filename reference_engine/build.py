"""From options to an engine: model, KV memory, policy, executor, tokenizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadgen.clock import MonotonicClock
from loadgen.errors import UsageError
from reference_engine.core import EngineState
from reference_engine.executors.base import Executor, Site
from reference_engine.kv import BLOCK_TOKENS, KvPool
from reference_engine.model.config import ModelConfig, ModelSource
from reference_engine.model.zoo import resolve
from reference_engine.plan import Limits
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.serve_options import ServeOptions, executor_of, policy_of
from reference_engine.service import Service
from reference_engine.tokenizer import Tokenizer, load_tokenizer

_KV_BYTES = 1 << 30
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
    max_model_len = min(options.max_model_len or 4096, model.config.max_model_len)
    if options.max_model_len is not None and options.max_model_len > model.config.max_model_len:
        raise UsageError(
            f"max_model_len: {options.max_model_len} is above the {model.config.max_model_len} "
            f"positions of '{model.name}'"
        )
    n_blocks = options.kv_blocks or _default_blocks(model.config, max_model_len)
    policy = policy_of(options.mode, options, options.policy_args)
    budget = getattr(policy, "token_budget", None)
    if options.token_budget is not None and budget is None:
        raise UsageError(f"token_budget: the mode '{options.mode}' has none")
    # A mode chosen later may want more than this one: the engine's limits do not change.
    max_num_seqs = options.max_num_seqs or max(_MAX_NUM_SEQS, getattr(policy, "max_num_seqs", 0))
    # The mode has its own budget; this is what memory for one step is made for.
    most_tokens = max(budget if isinstance(budget, int) else 0, max_model_len, _STEP_TOKENS)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_step_tokens=most_tokens + max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
    )
    clock = MonotonicClock()
    tokenizer = load_tokenizer(
        model.directory, options.printable and model.directory is None, model.config.eos_ids
    )
    site = Site(model, n_blocks, BLOCK_TOKENS, max_model_len, time.sleep)
    executor = executor_of(options).build(site)
    kv = KvPool(n_blocks, prefix_cache=options.prefix_cache)
    state = EngineState(limits, kv, clock, policy, predictor=QuantilePredictor())
    return Engine(model, limits, state, executor, tokenizer, clock)


def _default_blocks(config: ModelConfig, max_model_len: int) -> int:
    affordable = _KV_BYTES // (config.kv_bytes_per_token() * BLOCK_TOKENS)
    return max(-(-max_model_len // BLOCK_TOKENS), min(4096, affordable))
