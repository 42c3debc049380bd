"""Options of a server, and the knobs of its mode and executor, which are set by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from loadgen.errors import MissingDependency, UsageError, nearest
from loadgen.manifest.json_section import JsonObject
from reference_engine.executors.base import EXECUTORS, ExecutorKind
from reference_engine.executors.delayed import StepDelay, StepDelayOption
from reference_engine.policies.base import POLICIES, Policy, is_for_mode
from reference_engine.state.plan import How
from reference_engine.state.steps import Level

M = TypeVar("M", bound=BaseModel)

DEVICES: Mapping[str, str] = {
    "cpu": "torch_cpu",
    "cuda": "torch_cuda",
    "toy": "toy",
    "sim": "simulated",
}


def _origin(text: str) -> str:
    """`*`, or an origin as a browser sends it (RFC 6454 §6.1)."""
    if text != "*" and re.fullmatch(r"https?://[^\s/,]+", text) is None:
        raise ValueError("expected an origin without a path, e.g. http://localhost:3000, or *")
    return text


class ServeOptions(BaseModel):
    """The keys of `--engine`, of `slobench serve` and of `python -m reference_engine`.

    `kv_blocks` None takes 1 GiB of KV, at most 4 096 blocks and at least a full context, and on
    a GPU the memory that is left. `max_num_seqs` and `token_budget` None use the mode's own. With
    `swap_blocks` of host memory, preempted requests may keep their KV there (`preempt`).
    `async_depth` 1 plans a step while the previous one runs. `step_delay` (`10%`, `2ms`) makes
    every step longer, for testing that a check notices. A reader that falls `outbox_tokens` behind
    is cut off. `http_workers` processes handle HTTP; 0 uses the engine's own process, and None is
    0 except on a GPU. Scripts of the origin `cors` (`*`: any) may use the server from a browser;
    None allows no other origin. Requests that change the server need the operator token of the
    variable `operator_token_env`, else a random token; with `operator` open they need none. The
    operator's routes accept `allowed_host` as a name of the server. `policy_args` and
    `executor_args` are further knobs of the mode and of the executor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: str = "chunked"
    shape: str = "tiny"
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_model_len: int | None = Field(default=None, ge=2)
    kv_blocks: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    token_budget: Annotated[int, Field(ge=1)] | Literal["slo"] | None = None
    swap_blocks: int = Field(default=0, ge=0)
    preempt: How = How.auto
    async_depth: int = Field(default=0, ge=0, le=1)
    step_delay: StepDelayOption = StepDelay()
    max_queue: int = Field(default=10_000, ge=1)
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    outbox_tokens: int = Field(default=1024, ge=1)
    http_workers: int | None = Field(default=None, ge=0, le=64)
    seed: int = Field(default=0, ge=0)
    model_name: str | None = None
    printable: bool = True
    prefix_cache: bool = True
    policy_args: JsonObject = Field(default_factory=dict)
    executor_args: JsonObject = Field(default_factory=dict)
    api_key_env: str | None = None
    cors: Annotated[str, AfterValidator(_origin)] | None = None
    operator: Literal["token", "open"] = "token"
    operator_token_env: str | None = None
    allowed_host: tuple[str, ...] = ()
    log_dir: Path | None = None
    log_level: Level = "sizes"
    parent_pid: int | None = Field(default=None, ge=1)
    drain_s: float = Field(default=10.0, ge=0)

    @field_validator("allowed_host", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return tuple(value.split(";")) if isinstance(value, str) else value


_NOT_BY_NAME = ("policy_args", "executor_args", "parent_pid")


def choose(flags: Mapping[str, Any], knobs: Iterable[str] = ()) -> ServeOptions:
    """Options from flags and from `key=value` pairs. A key of a pair is an option, a knob of the
    mode or a knob of the executor. Raises UsageError naming the key and the most similar name."""
    values = dict(flags)
    pairs = [_pair(text) for text in knobs]
    options = [name for name in ServeOptions.model_fields if name not in _NOT_BY_NAME]
    fields = ServeOptions.model_fields
    chosen = dict(pairs)
    policy = POLICIES.get(str(chosen.get("mode", values.get("mode", fields["mode"].default))))
    of_mode = {key for key, value in pairs if is_for_mode(policy, key, value)}
    options = [name for name in options if name not in of_mode]
    values |= {key: value for key, value in pairs if key in options}
    executor = _executor_class(str(values.get("device", fields["device"].default)))
    for key, value in pairs:
        if key in options:
            continue
        if key in policy.model_fields:
            values.setdefault("policy_args", {})[key] = value
        elif key in executor.model_fields:
            values.setdefault("executor_args", {})[key] = value
        else:
            keys = {*options, *policy.model_fields, *executor.model_fields}
            raise UsageError(f"unknown engine option '{key}'; {nearest(key, keys)}")
    return _validated(ServeOptions, "options", values)


def policy_of(options: ServeOptions, mode: str, knobs: Mapping[str, Any]) -> Policy:
    """The policy of a mode, with the options that are common to all modes. Raises UsageError
    naming the knob."""
    cls = POLICIES.get(mode)
    shared = {"max_num_seqs": options.max_num_seqs, "token_budget": options.token_budget}
    return _validated(cls, f"mode '{cls.kind}'", knobs, shared)


def executor_of(options: ServeOptions) -> ExecutorKind:
    """The executor kind of a device. Raises UsageError or MissingDependency."""
    cls = _executor_class(options.device)
    shared = {"threads": options.threads, "seed": options.seed}
    return _validated(cls, f"device '{options.device}'", options.executor_args, shared)


def _validated(
    cls: type[M],
    source: str,
    values: Mapping[str, Any],
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> M:
    """An instance from `values`, and from those `shared` values that it has a field for. Raises
    UsageError with a line about the first invalid value, which begins with `source`."""
    fields = cls.model_fields
    applicable = {k: v for k, v in shared.items() if k in fields and v is not None}
    try:
        return cls.model_validate({**applicable, **values})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            text = f"{source}: unknown key '{key}'; {nearest(key, fields)}"
        else:
            text = f"{source}: {key}: {problem['msg']}, got {problem['input']!r}"
        raise UsageError(text) from None


def _executor_class(device: str) -> type[ExecutorKind]:
    if device not in DEVICES:
        raise UsageError(f"device: unknown device '{device}'; {nearest(device, DEVICES)}")
    try:
        return EXECUTORS.get(DEVICES[device])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            f"device '{device}' needs torch: pip install 'slobench[engine]' "
            "(or use device=toy, which needs no package)"
        ) from error


def _pair(text: str) -> tuple[str, Any]:
    """Key and value of `key=value`. Lists, mappings and null are parsed as JSON; other values stay
    text, which pydantic converts."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UsageError(f"--set: expected key=value, got '{text}'")
    name = key.replace("-", "_")
    if value == "null" or value[:1] in ("[", "{"):
        try:
            return name, json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {key}: {value} is not JSON: {error}") from None
    return name, value
