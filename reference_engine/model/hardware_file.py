"""Hardware of the user's own for the simulator, described in a YAML file: an accelerator by its
datasheet, or the costs of a server's steps as `slobench calibrate` measured them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from loadgen.errors import UsageError
from loadgen.fields import Seconds, Share
from loadgen.registry import Block
from loadgen.system.whole_file import replacing
from loadgen.yaml_document import Document, parse_document, read_file, write_document
from reference_engine.state.cost_model import (
    HARDWARE,
    Hardware,
    MeasuredSteps,
    ModelOnHardware,
    StepCost,
    WeightDtype,
    model_on_hardware,
)
from reference_engine.state.model_config import KvDtype, ModelSource
from reference_engine.state.step_variation import StepVariation

Cost = Annotated[Seconds, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_PRESET = HARDWARE["h100"]
_BYTES = 2  # of a number of KV, on a calibrated server
T = TypeVar("T", bound=Block)


class HardwareFile(Block):
    """An accelerator: its ceilings by the datasheet, and the shares of them that kernels reach.
    Ceilings are per device; a key that is left out has the value of the preset `h100`.

    `flops_per_s` is dense bfloat16, `flops_8bit_per_s` dense fp8 or int8 (default: as
    `flops_per_s`). `interconnect_bytes_per_s` is the rate of an all-reduce of long messages,
    `all_to_all_bytes_per_s` that at which a device sends to the experts of others.
    `bandwidth_share` and `flops_share` are the shares that kernels reach. A step takes `layer` per
    layer, `step` in all and `sequence` per sequence (durations) in addition to its arithmetic.
    """

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    bandwidth_bytes_per_s: Positive
    flops_per_s: Positive
    memory_bytes: Positive
    flops_8bit_per_s: Positive | None = None
    interconnect_bytes_per_s: Positive = _PRESET.allreduce_bytes_per_s
    all_to_all_bytes_per_s: Positive = _PRESET.all_to_all_bytes_per_s
    host_link_bytes_per_s: Positive = _PRESET.link_bytes_per_s
    bandwidth_share: Annotated[Share, Field(gt=0, le=1)] = _PRESET.eta_bandwidth
    flops_share: Annotated[Share, Field(gt=0, le=1)] = _PRESET.eta_flops
    layer: Annotated[Seconds, Field(ge=0)] = _PRESET.layer_s
    step: Annotated[Seconds, Field(ge=0)] = _PRESET.step_s
    sequence: Annotated[Seconds, Field(ge=0)] = _PRESET.seq_s

    def hardware(self) -> Hardware:
        return Hardware(
            self.name,
            self.bandwidth_bytes_per_s,
            self.flops_per_s,
            self.memory_bytes,
            self.bandwidth_share,
            self.flops_share,
            self.layer,
            step_s=self.step,
            seq_s=self.sequence,
            allreduce_bytes_per_s=self.interconnect_bytes_per_s,
            all_to_all_bytes_per_s=self.all_to_all_bytes_per_s,
            link_bytes_per_s=self.host_link_bytes_per_s,
            flops_8bit=self.flops_8bit_per_s or self.flops_per_s,
        )


class StepCosts(Block):
    """The coefficients of `StepCost` as durations: of every step, sequence, sequence with a piece
    of its prompt, token, token of KV read, and pair of tokens in the attention of a prompt.
    `weights` is the time of a step's matrices however few its tokens are, `sharpness` that of the
    transition to `token`; `added_token` comes in addition. Decodes alone are rounded up to the next
    of `graph_rows`, each of which takes `row`. Of the pairs [k, duration] in `pieces`, each takes
    its duration for each of the first k sequences."""

    step: Cost = 0.0
    sequence: Cost = 0.0
    prefill_sequence: Cost = 0.0
    token: Cost = 0.0
    added_token: Cost = 0.0
    weights: Cost = 0.0
    sharpness: Positive = 4.0
    context_token: Cost = 0.0
    prefill_attention: Cost = 0.0
    row: Cost = 0.0
    graph_rows: tuple[Annotated[int, Field(ge=1)], ...] = ()
    pieces: tuple[tuple[int, Cost], ...] = ()

    @field_validator("graph_rows")
    @classmethod
    def _rises(cls, rows: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in pairwise(rows)):
            raise ValueError("the numbers of rows must rise")
        return rows

    def step_cost(self) -> StepCost:
        return StepCost(
            step_s=self.step,
            seq_s=self.sequence,
            prefill_seq_s=self.prefill_sequence,
            token_s=self.token,
            weights_s=self.weights,
            context_token_s=self.context_token,
            prefill_attention_s=self.prefill_attention,
            added_token_s=self.added_token,
            row_s=self.row,
            sharpness=self.sharpness,
            graph_rows=self.graph_rows,
            seq_pieces=self.pieces,
        )


class Variation(Block):
    """How the times of steps vary around their costs (`StepVariation`): the fastest share `up_to`
    of the steps took the `ratio` of their cost on average, the next share the next. The share
    `lasting` of this variation fades to 1/e in `memory` steps, the rest differs from step to step.
    The share `pausing` of the steps took one of the equally likely `pauses` (durations) longer."""

    up_to: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(min_length=1)
    ratio: tuple[Positive, ...]
    lasting: float = Field(ge=0, le=1)
    memory: Positive
    pausing: float = Field(0.0, ge=0, le=1)
    pauses: tuple[Cost, ...] = ()

    @field_validator("up_to")
    @classmethod
    def _rises_to_1(cls, up_to: tuple[float, ...]) -> tuple[float, ...]:
        if up_to[-1] != 1 or any(a >= b for a, b in pairwise(up_to)):
            raise ValueError("the shares must rise, and the last must be 1")
        return up_to

    @model_validator(mode="after")
    def _has_a_ratio_per_share(self) -> Self:
        if len(self.ratio) != len(self.up_to):
            raise ValueError(f"{len(self.ratio)} ratios for {len(self.up_to)} shares")
        return self

    def step_variation(self) -> StepVariation:
        return StepVariation(
            self.up_to, self.ratio, self.lasting, self.memory, self.pausing, self.pauses
        )


_Relative = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # above 1: more than 100 %


class CostError(Block):
    """The relative error of the costs of a kind of step: the mean over its sizes, its 95 %
    interval, and the error at the worst size (`at`)."""

    mean: float = Field(ge=0, allow_inf_nan=False)
    interval: tuple[_Relative, _Relative]
    worst: float = Field(allow_inf_nan=False)
    at: str = ""


Range = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]


class MeasuredSizes(Block):
    """The least and the most of each quantity of the measured steps of a kind (`MeasuredSteps`)."""

    prompts: Range = (0, 0)
    prompt_tokens: Range = (0, 0)
    prompt_attention: Range = (0, 0)
    decodes: Range = (0, 0)
    context_tokens: Range = (0, 0)


Kind = Literal["prompt", "decode", "mixed"]


class CalibratedFile(Block):
    """A model on a server: the costs of its steps, fitted to measurements.

    The costs hold for the shape `model` alone, and for steps of the `measured` sizes; without
    `measured` they hold for all. `errors` are those of the costs by kind of step; a file with an
    error above 8 % is refused unless it is `forced`. `form` states the form of the costs in words.
    `request` is the time of a request outside the engine's steps (HTTP, tokenizing), which no
    simulation includes. `source` and `n_steps` describe the measurements. Without `variation`,
    equal steps take equal times.
    """

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    model: str = Field(min_length=1)
    kv_tokens: int = Field(ge=16)
    form: str = ""
    forced: bool = False
    request: Cost | None = None
    source: str = ""
    n_steps: int = Field(0, ge=0)
    errors: dict[Kind, CostError] = Field(default_factory=dict)
    measured: dict[Kind, MeasuredSizes] = Field(default_factory=dict)
    costs: StepCosts
    variation: Variation | None = None

    @property
    def cost_error(self) -> float:
        """The largest error of the costs at a kind and size of step."""
        return max((max(e.mean, abs(e.worst)) for e in self.errors.values()), default=0.0)

    def step_cost(self) -> StepCost:
        """The costs, with the sizes for which they hold."""
        measured = tuple(
            MeasuredSteps(kind, **sizes.model_dump()) for kind, sizes in self.measured.items()
        )
        return replace(self.costs.step_cost(), measured=measured)


MOST_ERROR = 0.08
"""Error of the costs of a kind and size of step above which a calibrated file is refused."""


def read_hardware(path: Path) -> Hardware:
    """The hardware of a file. Raises UsageError with file, line and key of a mistake."""
    return _validated(HardwareFile, _document(path)).hardware()


def read_calibrated(path: Path) -> CalibratedFile:
    """The costs in a file. Raises UsageError with file, line and key of a mistake."""
    return _validated(CalibratedFile, _document(path))


def write_calibrated(
    path: Path,
    cost: StepCost,
    request_s: float | None,
    facts: Mapping[str, object],
    variation: StepVariation | None = None,
    errors: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Write a file that `read_calibrated` reads; `errors` are those of `CalibratedFile`, `facts`
    its other keys. Costs (s) keep six digits."""
    seconds = {
        "step": cost.step_s,
        "sequence": cost.seq_s,
        "prefill_sequence": cost.prefill_seq_s,
        "token": cost.token_s,
        "weights": cost.weights_s,
        "context_token": cost.context_token_s,
        "prefill_attention": cost.prefill_attention_s,
    }
    costs = {key: _duration(value_s) for key, value_s in seconds.items()}
    if cost.weights_s:
        costs["added_token"] = _duration(cost.added_token_s)
        costs["sharpness"] = f"{cost.sharpness:g}"
    if cost.graph_rows:
        costs["row"] = _duration(cost.row_s)
        costs["graph_rows"] = str(list(cost.graph_rows))
    if cost.seq_pieces:
        pieces = (f"[{k}, {_duration(piece_s)}]" for k, piece_s in cost.seq_pieces)
        costs["pieces"] = f"[{', '.join(pieces)}]"
    request = {} if request_s is None else {"request": _duration(request_s)}
    values = {**facts, **request}
    blocks: dict[str, dict[str, object]] = {}
    if errors:
        blocks["errors"] = {kind: _flow(error) for kind, error in errors.items()}
    if cost.measured:
        blocks["measured"] = {
            steps.kind: _flow(
                {
                    field.name: [float(value) for value in getattr(steps, field.name)]
                    for field in fields(steps)
                    if field.name != "kind" and getattr(steps, field.name)[1]
                }
            )
            for steps in cost.measured
        }
    blocks["costs"] = dict(costs)
    if variation is not None:
        blocks["variation"] = {
            "up_to": list(variation.up_to),
            "ratio": [float(f"{ratio:.4g}") for ratio in variation.ratio],
            "lasting": float(f"{variation.lasting:.3g}"),
            "memory": float(f"{variation.memory:.3g}"),
            "pausing": float(f"{variation.pausing:.3g}"),
            "pauses": f"[{', '.join(map(_duration, variation.pause_s))}]",
        }
    lines = [write_document(values)]
    for name, block in blocks.items():
        lines += [f"{name}:\n", *(f"  {key}: {value}\n" for key, value in block.items())]
    text = "".join(lines)
    _validated(CalibratedFile, parse_document(text, str(path), UsageError))
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _flow(values: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{key}: {_item(value)}" for key, value in values.items()) + "}"


def _item(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_item, value))}]"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    return str(value)


def _duration(seconds: float) -> str:
    unit, factor = (
        ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6) if seconds >= 1e-6 else ("ns", 1e9)
    )
    return f"{seconds * factor:.6g}{unit}"


def simulated_model(
    source: ModelSource,
    hardware: str,
    kv_dtype: KvDtype = "auto",
    weight_dtype: WeightDtype = "auto",
    pipeline: int = 1,
    expert_parallel: bool = False,
) -> ModelOnHardware:
    """`model_on_hardware`, where `hardware` may also name a file: `my_gpu.yaml`, `4xmy_gpu.yaml`
    for four of them, or a file of `slobench calibrate`."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(.+\.ya?ml)", hardware.strip())
    if match is None:
        return model_on_hardware(
            source, hardware, kv_dtype, weight_dtype, pipeline, expert_parallel
        )
    path = Path(match[2])
    document = _document(path)
    if "costs" in document.values:
        is_changed = match[1] is not None or (kv_dtype, weight_dtype) != ("auto", "auto")
        is_changed = is_changed or pipeline > 1 or expert_parallel
        return _calibrated(source, path, _validated(CalibratedFile, document), is_changed)
    chosen = replace(_validated(HardwareFile, document).hardware(), n=int(match[1] or 1))
    return model_on_hardware(source, chosen, kv_dtype, weight_dtype, pipeline, expert_parallel)


def _calibrated(
    source: ModelSource, path: Path, file: CalibratedFile, is_changed: bool
) -> ModelOnHardware:
    if source.name != file.model:
        raise UsageError(
            f"hardware: {path} has the costs of '{file.model}', not of '{source.name}'; "
            f"use shape={file.model}"
        )
    if is_changed:
        raise UsageError(
            f"hardware: {path} has the costs of one server as it was measured; a number of "
            "devices or stages, expert_parallel, kv_dtype and weight_dtype need another calibration"
        )
    if file.cost_error > MOST_ERROR and not file.forced:
        kind = max(file.errors, key=lambda kind: abs(file.errors[kind].worst))
        worst = file.errors[kind]
        raise UsageError(
            f"hardware: {path}: its costs of {kind} steps are wrong by {abs(worst.worst):.1%}"
            f"{f' at {worst.at}' if worst.at else ''}, above {MOST_ERROR:.0%}; measure longer on "
            "an idle machine, or accept the error with slobench calibrate --force"
        )
    token_bytes = source.config.kv_bytes_per_token(_BYTES)
    variation = None if file.variation is None else file.variation.step_variation()
    return ModelOnHardware(
        file.step_cost(),
        file.kv_tokens,
        0.0,
        file.cost_error if file.errors else None,
        token_bytes,
        variation=variation,
    )


def _document(path: Path) -> Document:
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hardware: {path} cannot be read: {error}") from None
    document = parse_document(text, str(path), UsageError)
    document.raise_mistakes()
    return document


def _validated(kind: type[T], document: Document) -> T:
    try:
        return kind.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
    document.raise_mistakes()
    raise AssertionError(f"{document.label}: an invalid file without a mistake")
