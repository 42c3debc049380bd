"""Settings of a sweep, and sweep.yaml: the key `over` distinguishes it from a scenario."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from loadgen.errors import UsageError
from loadgen.fields import Seconds, as_data
from loadgen.measure.measures import Measure, measure
from loadgen.registry import Block
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.runner import BETWEEN, Between
from loadgen.studies.sweep.axes import Axis, How, axis, label
from loadgen.studies.sweep.points import Base, cells_of
from loadgen.workload.traffic_flags import CLOSED_LOOPS
from loadgen.yaml_document import Document, parse_document, read_file, write_document

FILE = "sweep.yaml"
SCENARIO = "scenario.yaml"


@dataclass(frozen=True)
class SweepSpec:
    """Settings of a sweep. `along`: the axis of the lines in figures, "" for none; `cost`: the
    latency of the trade-off, `benefit`: its throughput, per GPU."""

    cells: Sequence[Cell]
    axes: Sequence[Axis]
    how: How
    along: str
    cost: Measure
    benefit: Measure
    repeats: int = 3
    confidence: float = 0.95
    order_seed: int = 0
    between: Between = BETWEEN


class SweepFile(Block):
    """sweep.yaml; its keys are those of the command line."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    scenario: str | None = None
    target: str | None = None
    engine: str = ""
    model: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    over: dict[str, list[Any]]
    how: How = "grid"
    repeats: Annotated[int, Field(ge=1, le=1000)] = 3
    metric: str = "p99(ttft)"
    throughput: str = "output_tokens_per_s"
    along: str | None = None
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    order_seed: Annotated[int, Field(ge=0)] = 0
    drain: Seconds = 30.0
    reset_cache: bool = True

    @field_validator("engine", mode="before")
    @classmethod
    def _as_settings(cls, value: Any) -> Any:
        """Text like `mode=chunked,shape=tiny`, also from a mapping."""
        if isinstance(value, Mapping):
            return ",".join(f"{key}={label(setting)}" for key, setting in value.items())
        return value

    def settings(self) -> list[str]:
        """The scenario settings, as after `--set`."""
        return [f"{key}={json.dumps(value)}" for key, value in self.set.items()]

    def to_yaml(self) -> str:
        values = as_data(self, exclude_defaults=True)
        return write_document({"schema": self.schema_version, **values})


def is_sweep_file(source: str | None) -> bool:
    """Whether a file has the key `over`; a scenario has not."""
    if source is None or not Path(source).exists():
        return False
    try:
        read = yaml.safe_load(read_file(Path(source)))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # the scenario reader reports the problem
    return isinstance(read, dict) and "over" in read


def sweep_from_flags(values: Mapping[str, Any]) -> SweepFile:
    """The sweep that a command line without a sweep file describes. Raises UsageError."""
    return _checked(Document("command line", UsageError, {"over": {}, **values}))


def read_sweep_file(path: Path, on_top: Mapping[str, Any]) -> SweepFile:
    """A sweep file with the values of the command line on top of it (`on_top`); axes are added to
    the file's. Paths are relative to the file, if they exist there. Raises UsageError with a line
    per mistake."""
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    document = parse_document(text, str(path), UsageError)
    for key in ("scenario", "target"):
        neighbour = path.parent / str(document.values.get(key, ""))
        if neighbour.is_file():
            document.values[key] = str(neighbour)
    over = document.values.get("over")
    document.values |= on_top
    if isinstance(over, dict) and "over" in on_top:
        document.values["over"] = {**over, **on_top["over"]}
    return _checked(document)


def sweep_spec(file: SweepFile, base: Base) -> SweepSpec:
    """The settings of a sweep file, checked as far as possible without a server. Raises
    UsageError."""
    axes = [axis(key, values) for key, values in file.over.items()]
    return SweepSpec(
        cells=cells_of(base, axes, file.how),
        axes=axes,
        how=file.how,
        along=choose_along(axes, file.along),
        cost=read_cost(file.metric),
        benefit=read_benefit(file.throughput),
        repeats=file.repeats,
        confidence=file.confidence,
        order_seed=file.order_seed,
        between=Between(drain_s=file.drain, resets_cache=file.reset_cache),
    )


def read_cost(text: str) -> Measure:
    """The latency of the trade-off. Raises UsageError for a measure that should be high."""
    read = measure(text)
    if read.metric.direction != "lower":
        raise UsageError(
            f"--metric {text!r}: higher is better, so it is no cost; name a latency, "
            "e.g. 'p99(ttft)'"
        )
    return read


def read_benefit(text: str) -> Measure:
    """The throughput of the trade-off. Raises UsageError for a measure that is no rate."""
    read = measure(text)
    if read.metric.unit != "per_s":
        raise UsageError(
            f"--throughput {text!r}: is not a rate; name output_tokens_per_s, requests_per_s, "
            "goodput or goodput_output_tokens_per_s"
        )
    return read


def choose_along(axes: Sequence[Axis], key: str | None) -> str:
    """The axis of the lines in figures: `key`, else the first axis of load, else the first axis of
    numbers. Raises UsageError for a key that is not swept or has no numbers."""
    numeric = [axis.key for axis in axes if axis.numbers() is not None]
    if key:
        if key not in numeric:
            swept = ", ".join(numeric) or "none"
            raise UsageError(f"--along {key}: is not a swept key with numbers (those are: {swept})")
        return key
    roots = ("arrivals.", "limits.max_concurrency", *CLOSED_LOOPS)
    loads = [key for key in numeric if key.startswith(roots)]
    return next(iter([*loads, *numeric]), "")


def _checked(document: Document) -> SweepFile:
    try:
        read = SweepFile.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    document.raise_mistakes()
    return read
