"""From settings (`mode=chunked,shape=8b,hardware=h200`) to a simulated engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadgen.clock import VirtualClock
from loadgen.errors import UsageError, nearest
from reference_engine.core import EngineState
from reference_engine.cost_model import CPU, machine
from reference_engine.executors.base import Caps
from reference_engine.executors.simulated import SIMULATED_CONTEXT, Simulated
from reference_engine.kv import BLOCK_TOKENS, KvPool
from reference_engine.model.zoo import resolve
from reference_engine.plan import Limits
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.predict.quantiles import QuantilePredictor
from reference_engine.simulator import Simulator
from reference_engine.steps import StepLog
from targets.mock_options import split_options


class SimOptions(BaseModel):
    """What can be chosen about a simulated engine. The rest of the keys are the mode's own
    (`policy_args`).

    None: `max_model_len` 32 768 (on `cpu` the shape's), `kv_blocks` all that fit beside the
    weights, `prefix_cache` on where the scenario shares any text. `declared_max_tokens` is what
    every request says it may generate at most, while it ends at the length of its plan; None says
    the plan's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: str = "chunked"
    shape: str = "8b"
    hardware: str = "h200"
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=256, ge=1)
    token_budget: int = Field(default=2048, ge=1)
    kv_blocks: int | None = Field(default=None, ge=1)
    prefix_cache: bool | None = None
    declared_max_tokens: int | None = Field(default=None, ge=1)
    policy_args: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """A built engine at the beginning of its time, and its settings in one line."""

    simulator: Simulator
    policy: Policy
    words: str


def read_settings(text: str) -> dict[str, str]:
    """`mode=chunked,shape=8b` as a mapping. Raises UsageError for a key given twice."""
    settings: dict[str, str] = {}
    for key, value in split_options(text):
        name = key.replace("-", "_")
        if name in settings:
            raise UsageError(f"setting '{key}' is given twice: {settings[name]} and {value}")
        settings[name] = value
    return settings


def sim_options(settings: Mapping[str, Any]) -> SimOptions:
    """Settings by key; one that is a parameter of the mode goes to the mode.

    Raises UsageError with the nearest key, or saying what is wrong with a value.
    """
    mode = POLICIES.get(str(settings.get("mode", SimOptions().mode)))
    own, mode_keys = SimOptions.model_fields, mode.model_fields
    for key in settings:
        if key not in own and key not in mode_keys:
            hint = nearest(key, [*own, *mode_keys])
            raise UsageError(f"unknown setting '{key}' of mode '{mode.kind}'; {hint}")
    chosen = {key: value for key, value in settings.items() if key in own}
    extra = {key: value for key, value in settings.items() if key not in own}
    try:
        return SimOptions.model_validate(
            {**chosen, "policy_args": {**chosen.get("policy_args", {}), **extra}}
        )
    except ValidationError as error:
        raise UsageError(_problem(error)) from None


def build(
    options: SimOptions, is_sharing: bool, policy: Policy | None = None, log: StepLog | None = None
) -> SimulatedEngine:
    """An engine with nothing in it. `policy` instead of the one that the options name."""
    source = resolve(options.shape)
    found = machine(source, options.hardware)
    context = source.config.max_model_len if options.hardware == CPU else SIMULATED_CONTEXT
    max_model_len = options.max_model_len or context
    n_blocks = options.kv_blocks or found.kv_tokens // BLOCK_TOKENS
    limits = Limits(
        max_num_seqs=options.max_num_seqs,
        max_step_tokens=max(options.token_budget, max_model_len) + options.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=source.config.vocab_size,
    )
    prefix_cache = is_sharing if options.prefix_cache is None else options.prefix_cache
    chosen = policy if policy is not None else make_policy(options)
    clock = VirtualClock()
    state = EngineState(
        limits,
        KvPool(n_blocks, BLOCK_TOKENS, prefix_cache),
        clock,
        chosen,
        cost=found.cost,
        predictor=QuantilePredictor(),
        log=log,
    )
    caps = Caps(copy_s=found.copy_token_s * BLOCK_TOKENS)
    words = f"{source.name} on {options.hardware}, {_words(chosen)}, {n_blocks} KV blocks"
    return SimulatedEngine(
        Simulator(state, Simulated(found.cost, clock.advance, caps), clock), chosen, words
    )


def make_policy(options: SimOptions) -> Policy:
    """The mode with its parameters; a limit set for the engine holds for a mode that has it."""
    cls = POLICIES.get(options.mode)
    shared = options.model_dump(include={"max_num_seqs", "token_budget"}, exclude_unset=True)
    known = {key: value for key, value in shared.items() if key in cls.model_fields}
    try:
        return cls.model_validate({**known, **options.policy_args})
    except ValidationError as error:
        raise UsageError(f"mode '{options.mode}': {_problem(error)}") from None


def _words(policy: Policy) -> str:
    changed = policy.model_dump(mode="json", exclude_defaults=True)
    return " ".join([policy.kind, *(f"{key}={value}" for key, value in changed.items())])


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg']}, got {first['input']!r}"
