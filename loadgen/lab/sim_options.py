"""The settings of a simulated engine, such as `mode=chunked,shape=8b,hardware=h200`, in blocks that
each state their own rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from loadgen.errors import UsageError, nearest
from loadgen.fields import Seconds, Share
from loadgen.units import parse_duration_s
from reference_engine.cluster.failures import Failure
from reference_engine.cluster.routers import read_router
from reference_engine.executors.delayed import NO_DELAY, StepDelayOption
from reference_engine.executors.halves import SPLIT_GAIN
from reference_engine.policies.base import POLICIES, is_for_mode
from reference_engine.simulator import Role
from reference_engine.state.cost_model import WeightDtype
from reference_engine.state.kv import BLOCK_TOKENS
from reference_engine.state.model_config import KvDtype
from reference_engine.state.plan import How
from targets.mock_script import split_options

_GROUP = re.compile(r"([1-9]\d{0,3})(?::(.+))?")  # of replicas: a number, and settings of theirs
_SEVERAL = re.compile(r"\s*([1-9]\d*)x")  # GPUs of a replica
_FAILURE = re.compile(r"([1-9]\d*)@([^:]+):(.+)")  # replica, instant, time of repair


class SettingsBlock(BaseModel):
    """Settings that belong together. A user writes the keys of all blocks side by side; validation
    sorts them into the blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    @classmethod
    def blocks(cls) -> dict[str, type[SettingsBlock]]:
        """The inner blocks by field."""
        types = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: inner
            for name, inner in types.items()
            if isinstance(inner, type) and issubclass(inner, SettingsBlock)
        }

    @classmethod
    def all_keys(cls) -> Iterator[str]:
        """Every key of this block and of its inner blocks."""
        blocks = cls.blocks()
        for name in cls.model_fields:
            if name in blocks:
                yield from blocks[name].all_keys()
            else:
                yield name

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        sorted_settings = dict(settings)
        for name, block in cls.blocks().items():
            own = {key: sorted_settings.pop(key) for key in block.all_keys() if key in settings}
            if own:
                sorted_settings[name] = own
        return sorted_settings

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raises UsageError for settings that do not fit together."""

    def given(self) -> dict[str, Any]:
        """The settings that were given, by key, as they are written."""
        inner, settings = self.blocks(), dict[str, Any]()
        for name, value in self.model_dump(mode="json", exclude_unset=True).items():
            settings |= getattr(self, name).given() if name in inner else {name: value}
        return settings

    def _check_effect(self, keys: tuple[str, ...], needed: tuple[str, ...], example: str) -> None:
        """Raises UsageError for a given setting without an effect: none of `needed` is set."""
        idle = [key for key in keys if key in self.model_fields_set]
        if idle and not any(getattr(self, key) for key in needed):
            raise UsageError(
                f"{idle[0]}: has no effect without {' or '.join(needed)}, e.g. {example}"
            )


class MemoryOptions(SettingsBlock):
    """KV blocks on the GPU and in host memory.

    None means: `kv_blocks` as many as fit next to the weights, `prefix_cache` on if the scenario
    shares text. Host memory of `swap_blocks`, or `host_memory` bytes, keeps the KV of preempted
    requests, and with `host_prefixes` also the blocks that leave the prefix cache. `preempt`
    decides what is computed again. A copy takes `host_latency` and its bytes at `host_bytes_per_s`
    (None: the link of the hardware), and the step waits for it.
    """

    block_tokens: int = Field(default=BLOCK_TOKENS, ge=1)
    kv_blocks: int | None = Field(default=None, ge=1)
    swap_blocks: int = Field(default=0, ge=0)
    host_memory: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    host_bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    host_latency: Annotated[Seconds, Field(ge=0)] = 0.0
    host_prefixes: bool = False
    preempt: How = How.auto
    prefix_cache: bool | None = None

    def check(self) -> None:
        self._check_effect(
            ("host_bytes_per_s", "host_latency", "host_prefixes"),
            ("host_memory", "swap_blocks"),
            "host_memory=200e9",
        )
        if self.host_memory is not None and self.swap_blocks:
            raise UsageError("host_memory: leave out swap_blocks, or host_memory")


class LinkOptions(SettingsBlock):
    """Copies of KV between replicas, over links of `link_bytes_per_s`, to a replica that
    `decode_router` selects. `kv_factor` is the share of the KV's bytes that is copied, as a
    compression leaves it. With `layerwise`, the KV of a layer is sent while the layers after it are
    computed."""

    decode_router: str = "join_shortest_queue"
    link_bytes_per_s: float = Field(default=50e9, gt=0, allow_inf_nan=False)
    link_latency: Annotated[Seconds, Field(ge=0)] = 0.0
    kv_factor: float = Field(default=1.0, gt=0, le=1)
    layerwise: bool = False

    def check(self) -> None:
        read_router(self.decode_router, "decode_router")


class MigrationOptions(SettingsBlock):
    """Each `rebalance` (a duration; None: never), a decoding request moves from the most to the
    least loaded replica if their loads differ by more than `rebalance_gap` of the mean."""

    rebalance: Annotated[Seconds, Field(gt=0)] | None = None
    rebalance_gap: Annotated[Share, Field(ge=0)] = 0.2

    def check(self) -> None:
        self._check_effect(("rebalance_gap",), ("rebalance",), "rebalance=1s")


class FailureOptions(SettingsBlock):
    """`fail` lists failures (`2@30s:60s`: replica 2 fails after 30 s and is back 60 s later); with
    `mtbf` replicas fail at random, after this mean time of service, and are back after `repair`. A
    request without a token is sent again up to `retries` times, and with `resume` also a request
    with a part of its answer."""

    fail: str = ""
    mtbf: Annotated[Seconds, Field(gt=0)] | None = None
    repair: Annotated[Seconds, Field(gt=0)] = 60.0
    retries: int = Field(default=0, ge=0)
    resume: bool = False

    def check(self) -> None:
        self._check_effect(("retries", "resume"), ("fail", "mtbf"), "fail=2@30s:60s")
        self._check_effect(("repair",), ("mtbf",), "mtbf=1h")
        self.planned()

    @property
    def is_on(self) -> bool:
        return bool(self.fail) or self.mtbf is not None

    def planned(self) -> list[Failure]:
        """The listed failures. Raises UsageError for another form."""
        failures: list[Failure] = []
        for entry in self.fail.split("+") if self.fail else ():
            match = _FAILURE.fullmatch(entry.strip())
            try:
                if match is None:
                    raise ValueError("expected replica@instant:repair")
                at_s, repair_s = parse_duration_s(match[2]), parse_duration_s(match[3])
                failures.append(Failure(at_s, int(match[1]) - 1, repair_s))
            except ValueError as error:
                raise UsageError(f"fail: '{entry.strip()}': {error}, e.g. 2@30s:60s") from None
        return failures


class ScalingOptions(SettingsBlock):
    """With `target_requests` per replica, `min_replicas` to all replicas are on: their number is
    computed every `autoscale_every`, a replica receives requests `startup` after its start, and
    replicas stop only for numbers that were lower during all of `scale_down_after`. With roles,
    these are the requests and replicas for prompts; those that decode have limits of their own
    (None: the same)."""

    min_replicas: int = Field(default=1, ge=1)
    target_requests: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    decode_min_replicas: int | None = Field(default=None, ge=1)
    decode_target_requests: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    autoscale_every: Annotated[Seconds, Field(gt=0)] = 15.0
    startup: Annotated[Seconds, Field(ge=0)] = 60.0
    scale_down_after: Annotated[Seconds, Field(ge=0)] = 300.0

    def check(self) -> None:
        self._check_effect(
            (
                "min_replicas",
                "autoscale_every",
                "startup",
                "scale_down_after",
                "decode_min_replicas",
                "decode_target_requests",
            ),
            ("target_requests",),
            "target_requests=64",
        )

    @property
    def is_on(self) -> bool:
        return self.target_requests is not None

    def check_numbers(self, n_replicas: int, n_decoders: int, has_roles: bool) -> None:
        """Raises UsageError for more replicas than there are, or limits of replicas that decode
        where none only decodes."""
        idle = sorted(self.model_fields_set & {"decode_min_replicas", "decode_target_requests"})
        if idle and not has_roles:
            raise UsageError(f"{idle[0]}: has no effect without replicas with role=decode")
        numbers = [("min_replicas", self.min_replicas, n_replicas - n_decoders)]
        if has_roles:
            numbers.append(
                ("decode_min_replicas", self.decode_min_replicas or self.min_replicas, n_decoders)
            )
        for key, least, n in numbers:
            if least > n:
                of = " for them" if has_roles else ""
                raise UsageError(f"{key}: {least} is more than the {n} of replicas{of}")


class ClusterOptions(SettingsBlock):
    """`replicas` of the engine behind a `router`: `8`, or groups that differ from the other
    settings, `4+4:hardware=a100;mode=static`. `router_seed` is the seed of its random choices."""

    replicas: str = "1"
    router: str = "round_robin"
    router_seed: int = Field(default=0, ge=0)
    links: LinkOptions = LinkOptions()
    migration: MigrationOptions = MigrationOptions()
    failures: FailureOptions = FailureOptions()
    scaling: ScalingOptions = ScalingOptions()

    def check(self) -> None:
        read_router(self.router)

    @property
    def is_changing(self) -> bool:
        """Whether replicas fail, start or stop."""
        return self.failures.is_on or self.scaling.is_on

    def check_replicas(self, placements: list[PlacementOptions]) -> None:
        """Raises UsageError for what is not simulated with replicas of these placements."""
        has_roles = any(placement.role != "both" for placement in placements)
        has_moves = self.migration.rebalance is not None or has_roles
        if (has_moves or self.is_changing) and any(p.split is not None for p in placements):
            raise UsageError(
                "split: role, rebalance, failures and autoscaling of divided GPUs are not simulated"
            )
        idle = sorted(self.links.model_fields_set)
        if idle and not has_moves:
            raise UsageError(
                f"{idle[0]}: has no effect, because no KV is copied; set rebalance=1s, or replicas "
                "of two roles: 2:role=prefill+6:role=decode"
            )
        if self.links.layerwise and not has_roles:
            raise UsageError(
                "layerwise: has no effect without replicas of two roles: "
                "2:role=prefill+6:role=decode"
            )
        n_replicas = len(placements)
        for failure in self.failures.planned():
            if failure.number >= n_replicas:
                raise UsageError(
                    f"fail: there is no replica {failure.number + 1}; known: 1 to {n_replicas}"
                )
        if self.scaling.is_on:
            n_decoders = sum(placement.role == "decode" for placement in placements)
            self.scaling.check_numbers(n_replicas, n_decoders, has_roles)


class PlacementOptions(SettingsBlock):
    """The parts of a replica that compute prompts and decodes.

    With a `pipeline` of n stages, a replica has its layers on n times the hardware. Up to
    `pipeline_batches` (None: n) batches of its scheduler are under way, each in a stage or waiting
    for it. A batch admits requests while it has fewer than `pipeline_batch_seqs` (None: its part of
    `max_num_seqs`).

    A group with `role=prefill` computes prompts and first tokens; the KV of each request is then
    copied to a replica with `role=decode`.

    With `split`, a replica computes prompts and decodes at the same time, on two parts of its GPU:
    prompts on this share of the multiprocessors; with `auto` on the largest with which decodes
    take at most `split_slack` times as long as on the whole GPU. Both parts together do at most
    `split_gain` times the work of the whole GPU.
    """

    pipeline: int = Field(default=1, ge=1, le=64)
    pipeline_batches: int | None = Field(default=None, ge=1, le=256)
    pipeline_batch_seqs: int | None = Field(default=None, ge=1)
    role: Role = "both"
    split: Annotated[Share, Field(gt=0, lt=1)] | Literal["auto"] | None = None
    split_gain: float = Field(default=SPLIT_GAIN, ge=1, le=2)
    split_slack: float = Field(default=1.3, ge=1, allow_inf_nan=False)

    def check(self) -> None:
        self._check_effect(("split_gain", "split_slack"), ("split",), "split=70%")
        idle = self.model_fields_set & {"pipeline_batches", "pipeline_batch_seqs"}
        if idle and self.pipeline == 1:
            raise UsageError(f"{min(idle)}: has no effect without pipeline, e.g. pipeline=4")
        if self.split is not None and (self.pipeline > 1 or self.role != "both"):
            raise UsageError("split: not simulated together with pipeline or role")


def _read_shares(value: Any) -> Any:
    """`77% 45% 24%` as shares."""
    return tuple(value.split()) if isinstance(value, str) else value


class DraftOptions(SettingsBlock):
    """Speculative decoding: as many tokens are drafted per request and step as there are shares in
    `draft_acceptance`. Each is the share of the drafts that are accepted up to this token. The
    draft of a token takes `draft_step`, and a step of the model `draft_shape` (None: of no model).
    """

    draft_acceptance: Annotated[
        tuple[Annotated[Share, Field(ge=0, le=1)], ...], BeforeValidator(_read_shares)
    ] = ()
    draft_shape: str | None = None
    draft_step: Annotated[Seconds, Field(ge=0)] = 0.0

    def check(self) -> None:
        needed = "draft_acceptance=77% 45% 24%"
        self._check_effect(("draft_shape", "draft_step"), ("draft_acceptance",), needed)
        if any(later > before for before, later in pairwise(self.draft_acceptance)):
            raise UsageError(
                "draft_acceptance: the shares must not rise: a token is accepted only if all "
                f"before it are, e.g. {needed}"
            )


class SimOptions(SettingsBlock):
    """The settings of a simulated engine. All other keys are parameters of the mode
    (`policy_args`).

    None means: `max_model_len` 32 768 (on `cpu` the shape's), `max_num_seqs` and `token_budget` the
    mode's. `fused_attention` is the efficiency of a kernel that computes the attention of prompts
    and decodes at the same time; None computes them one after the other. With `expert_parallel`,
    each of several devices has whole experts. `declared_max_tokens` is
    the generation limit that every request declares, although it ends at its planned length; None
    declares the planned length. `step_delay` makes every step longer, as an injected fault.
    `core=python` computes the steps in Python even where the step core in C could.
    """

    mode: str = "chunked"
    shape: str = "8b"
    hardware: str = "h200"
    kv_dtype: KvDtype = "auto"
    weight_dtype: WeightDtype = "auto"
    fused_attention: Annotated[Share, Field(gt=0, le=1)] | None = None
    expert_parallel: bool = False
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int | None = Field(default=None, ge=1)
    token_budget: Annotated[int, Field(ge=1)] | Literal["slo"] | None = None
    draft: DraftOptions = DraftOptions()
    memory: MemoryOptions = MemoryOptions()
    async_depth: int = Field(default=0, ge=0, le=1)
    step_delay: StepDelayOption = NO_DELAY
    declared_max_tokens: int | None = Field(default=None, ge=1)
    core: Literal["auto", "python"] = "auto"
    cluster: ClusterOptions = ClusterOptions()
    placement: PlacementOptions = PlacementOptions()
    policy_args: dict[str, Any] = Field(default_factory=dict)

    def check(self) -> None:
        self.cluster.check_replicas([replica.placement for replica in self.each_replica()])
        if self.async_depth and self.placement.pipeline > 1:
            raise UsageError("async_depth: a pipeline plans ahead by itself; use async_depth=0")
        placement = self.placement
        if self.draft.draft_acceptance and (placement.pipeline > 1 or placement.split is not None):
            raise UsageError("draft_acceptance: not simulated together with pipeline or split")

    @property
    def n_gpus(self) -> int:
        """The GPUs of all replicas: the number in `4xh200`, times the stages of a pipeline."""
        return sum(
            int(match[1] if (match := _SEVERAL.match(own.hardware)) else 1) * own.placement.pipeline
            for own in self.each_replica()
        )

    def each_replica(self) -> list[SimOptions]:
        """The settings of every replica. Raises UsageError for a malformed `replicas`."""
        of_cluster = {*ClusterOptions.all_keys()}
        shared = {key: value for key, value in self.given().items() if key not in of_cluster}
        replicas: list[SimOptions] = []
        for group in self.cluster.replicas.split("+"):
            match = _GROUP.fullmatch(group.strip())
            if match is None:
                raise UsageError(
                    "replicas: expected a number, or 4:hardware=h200;mode=static + …, got "
                    f"'{group}'"
                )
            own = read_settings((match[2] or "").replace(";", ","))
            if own.keys() & {*of_cluster, "declared_max_tokens", "core"}:
                raise UsageError(f"replicas: '{group}': a setting of all replicas together")
            settings = {**shared, **own}
            if own.get("mode", self.mode) != self.mode:
                settings.pop("policy_args", None)
            replicas += [sim_options(settings) if own else self] * int(match[1])
        if len({replica.memory.block_tokens for replica in replicas}) > 1:
            # a request has one chain of hashes
            raise UsageError("replicas: block_tokens is a setting of all replicas together")
        return replicas


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
    mode = POLICIES.get(str(settings.get("mode", SimOptions.model_fields["mode"].default)))
    own, mode_keys = [*SimOptions.all_keys()], mode.model_fields
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
        return SimOptions.model_validate(
            {**chosen, "policy_args": {**chosen.get("policy_args", {}), **extra}}
        )
    except ValidationError as error:
        raise UsageError(problem_of(error)) from None


def problem_of(error: ValidationError) -> str:
    """The first problem, after the key that has it."""
    first = error.errors()[0]
    blocks = {*SimOptions.blocks(), *ClusterOptions.blocks()}
    key = next(part for part in first["loc"] if part not in blocks)
    value = first["input"]
    if first["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return f"{key}: unknown value {value!r}; {nearest(str(value), known)}"
    if first["type"] == "value_error":  # of this project, with the value
        return f"{key}: {first['ctx']['error']}"
    return f"{key}: {first['msg']}, got {value!r}"
