"""What a sweep was asked to do, and the file that says it: `over:` is what makes it one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from loadgen.cells.cell import Cell
from loadgen.cells.runner import BETWEEN, Between
from loadgen.errors import UsageError
from loadgen.measure.comparison.measures import Measure, measure
from loadgen.registry import Block
from loadgen.sweep.axes import Axis, How, axis, label
from loadgen.sweep.points import Base, cells_of
from loadgen.units import Seconds, as_data
from loadgen.yaml_document import Document, parse_document, write_document

FILE = "sweep.yaml"
SCENARIO = "scenario.yaml"


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, ready to be run. `along` is the axis that lines follow, "" where there is none;
    `cost` is the latency of the trade-off, `benefit` the throughput, per GPU."""

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
    """A sweep as a file: the words of the command line."""

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
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    order_seed: Annotated[int, Field(ge=0)] = 0
    drain: Seconds = 30.0
    reset_cache: bool = True

    @field_validator("engine", mode="before")
    @classmethod
    def _as_settings(cls, value: Any) -> Any:
        """A mapping is as good as `mode=chunked,shape=tiny`."""
        if isinstance(value, Mapping):
            return ",".join(f"{key}={label(one)}" for key, one in value.items())
        return value

    def settings(self) -> list[str]:
        """The scenario keys that it sets, as after `--set`."""
        return [f"{key}={json.dumps(value)}" for key, value in self.set.items()]

    def to_yaml(self) -> str:
        values = as_data(self, exclude_defaults=True)
        return write_document({"schema": self.schema_version, **values})


def is_sweep_file(source: str | None) -> bool:
    """Whether a file says what to vary; a scenario does not."""
    if source is None or not Path(source).is_file():
        return False
    try:
        found = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # whoever reads it as a scenario tells what is wrong
    return isinstance(found, dict) and "over" in found


def sweep_from_flags(given: Mapping[str, Any]) -> SweepFile:
    """The sweep that a command line without a sweep file describes. Raises UsageError."""
    return _checked(Document("command line", UsageError, {"over": {}, **given}))


def read_sweep_file(path: Path, on_top: Mapping[str, Any]) -> SweepFile:
    """A sweep file with what the command line said on top of it: its axes beside the file's. Paths
    that exist beside the file are meant. Raises UsageError with a line per mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    document = parse_document(text, str(path), UsageError)
    for key in ("scenario", "target"):
        beside = path.parent / str(document.values.get(key, ""))
        if beside.is_file():
            document.values[key] = str(beside)
    over = document.values.get("over")
    document.values |= on_top
    if isinstance(over, dict) and "over" in on_top:
        document.values["over"] = {**over, **on_top["over"]}
    return _checked(document)


def sweep_spec(file: SweepFile, base: Base) -> SweepSpec:
    """A sweep file's cells, with everything checked that needs no server. Raises UsageError."""
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
    """The latency of the trade-off. Raises UsageError for a measure of which more is better."""
    found = measure(text)
    if found.metric.direction != "lower":
        raise UsageError(
            f"--metric {text!r}: more of it is better, so it is no cost; name a latency, e.g. "
            "'p99(ttft)'"
        )
    return found


def read_benefit(text: str) -> Measure:
    """The throughput of the trade-off. Raises UsageError for what is no rate."""
    found = measure(text)
    if found.metric.unit != "per_s":
        raise UsageError(
            f"--throughput {text!r}: is no rate; name output_tokens_per_s, requests_per_s, goodput "
            "or goodput_output_tokens_per_s"
        )
    return found


def choose_along(axes: Sequence[Axis], asked: str | None) -> str:
    """The axis that the lines of the figures follow: the one asked for, else the first of load or
    of numbers. Raises UsageError for one that is not swept or has no numbers."""
    numeric = [axis.key for axis in axes if axis.numbers() is not None]
    if asked:
        if asked not in numeric:
            swept = ", ".join(numeric) or "none"
            raise UsageError(f"--along {asked}: no swept key with numbers (there are: {swept})")
        return asked
    loads = [key for key in numeric if key.startswith(("arrivals.", "limits.max_concurrency"))]
    return next(iter([*loads, *numeric]), "")


def _checked(document: Document) -> SweepFile:
    try:
        found = SweepFile.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    document.raise_mistakes()
    return found
