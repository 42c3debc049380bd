"""Hardware of the user's own for the simulator, described in a YAML file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from loadgen.errors import UsageError
from loadgen.registry import Block
from loadgen.units import Seconds, Share
from loadgen.yaml_document import parse_document
from reference_engine.state.cost_model import (
    HARDWARE,
    Hardware,
    ModelOnHardware,
    WeightDtype,
    model_on_hardware,
)
from reference_engine.state.model_config import KvDtype, ModelSource

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_PRESET = HARDWARE["h100"]


class HardwareFile(Block):
    """An accelerator: its ceilings by the datasheet, and the shares of them that kernels reach.
    Ceilings are per device; a key that is left out has the value of the preset `h100`.

    `flops_per_s` is dense bfloat16, `flops_8bit_per_s` dense fp8 or int8 (default: as
    `flops_per_s`). `interconnect_bytes_per_s` is the rate of an all-reduce of long messages.
    `bandwidth_share` and `flops_share` are the shares that kernels reach. A step takes `layer` per
    layer, `step` in all and `sequence` per sequence (durations) in addition to its arithmetic.
    """

    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    bandwidth_bytes_per_s: Positive
    flops_per_s: Positive
    memory_bytes: Positive
    flops_8bit_per_s: Positive | None = None
    interconnect_bytes_per_s: Positive = _PRESET.allreduce_bytes_per_s
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
            link_bytes_per_s=self.host_link_bytes_per_s,
            flops_8bit=self.flops_8bit_per_s or self.flops_per_s,
        )


def read_hardware(path: Path) -> Hardware:
    """The hardware of a file. Raises UsageError with file, line and key of a mistake."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hardware: {path} cannot be read: {error}") from None
    document = parse_document(text, str(path), UsageError)
    document.raise_mistakes()
    try:
        return HardwareFile.model_validate(document.values).hardware()
    except ValidationError as error:
        document.note_validation(error)
    document.raise_mistakes()
    raise AssertionError(f"{path}: an invalid file without a mistake")


def simulated_model(
    source: ModelSource,
    hardware: str,
    kv_dtype: KvDtype = "auto",
    weight_dtype: WeightDtype = "auto",
) -> ModelOnHardware:
    """`model_on_hardware`, where `hardware` may also name a file: `my_gpu.yaml`, or `4xmy_gpu.yaml`
    for four of them."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(.+\.ya?ml)", hardware.strip())
    if match is None:
        return model_on_hardware(source, hardware, kv_dtype, weight_dtype)
    chosen = replace(read_hardware(Path(match[2])), n=int(match[1] or 1))
    return model_on_hardware(source, chosen, kv_dtype, weight_dtype)
