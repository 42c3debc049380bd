"""nightly.yaml: the cells of a night, the measures that decide, and the place of the baseline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from loadgen.errors import ScenarioError, UsageError
from loadgen.fields import Seconds, Share
from loadgen.measure.measures import measure
from loadgen.measure.slo import parse_slo
from loadgen.registry import Strict
from loadgen.studies.compare.judgement import Options
from loadgen.workload.classes import Problem, as_validation_error
from loadgen.workload.scenario import Scenario, load_scenario
from loadgen.yaml_document import parse_document, read_file

EVERY = "default"
"""Key of the margin for all measures without a margin of their own."""
OURS = ("reference", "sim", "mock")
"""Targets that take engine settings."""


def _measure(text: str) -> str:
    try:
        return measure(text).text
    except UsageError as error:
        raise ValueError(str(error).removeprefix("--metric ")) from None


def _slo(text: str) -> str:
    parse_slo(text)
    return text


def _one_or_several(value: object) -> object:
    """A tuple, also from a single word."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _named(value: object) -> object:
    """`name: value` pairs; a list's values are named after themselves."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    named: dict[str, object] = {}
    for item in value:
        name = _name_of(str(item))
        if name in named:
            both = f"{{{name}: {named[name]}, {name}2: {item}}}"
            raise ValueError(f"two values have the name {name}; name them yourself: {both}")
        named[name] = item
    return named


def _name_of(text: str) -> str:
    word = Path(text).name if text.endswith((".yaml", ".yml")) else text
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", re.sub(r"\.ya?ml$", "", word)).strip("-.") or "x"


Words = Annotated[tuple[str, ...], BeforeValidator(_one_or_several)]
Named = Annotated[dict[str, str], BeforeValidator(_named), Field(min_length=1)]


class Control(Strict):
    """A target measured right before or after every run, so that changes in machine speed cancel
    out.

    As a control the bundled engine has the settings of the cell it is measured with; `engine` adds
    settings, its mode included. `servers`: whether both servers are up together, so that the runs
    follow each other at once, or in turns. The default is together where both are servers that
    slobench starts, compute on the CPU and listen at different ports: an idle one uses no CPU.
    """

    target: str
    engine: str = ""
    servers: Literal["together", "in_turns"] | None = None


def _control(value: object) -> object:
    return {"target": value} if isinstance(value, str) else value


class NightlyFile(Strict):
    """The cells of a night are targets × scenarios × modes; each is measured `repeats` times, in
    turns, and compared with the last `window` nights of its baseline.

    `targets`, `scenarios` and `modes` are lists, or mappings from a name to a value; a name stays
    the same when its value changes. A mode is a batching mode of the bundled engine; `engine` has
    settings for all modes. With a `control`, cells are compared relative to it. `slo` replaces the
    scenarios' SLOs. Paths are relative to the file; the baseline stores `keep` nights of a cell.
    """

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    targets: Named
    scenarios: Named
    modes: Annotated[dict[str, str], BeforeValidator(_named)] = Field(default_factory=dict)
    engine: str = ""
    control: Annotated[Control | None, BeforeValidator(_control)] = None
    repeats: Annotated[int, Field(ge=2, le=100)] = 5
    metrics: Annotated[
        tuple[Annotated[str, AfterValidator(_measure)], ...], BeforeValidator(_one_or_several)
    ] = ()
    slo: Annotated[
        tuple[Annotated[str, AfterValidator(_slo)], ...], BeforeValidator(_one_or_several)
    ] = ()
    margins: dict[str, Annotated[Share, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    effect: Annotated[Share, Field(gt=0)] | None = None
    confidence: Annotated[Share, Field(gt=0.5, lt=1)] = 0.95
    window: Annotated[int, Field(ge=1, le=365)] = 14
    keep: Annotated[int, Field(ge=1, le=3650)] = 90
    warm_up: Seconds = 0.0
    baseline: str = "baseline"
    fail_on: Literal["worse", "inconclusive"] = "worse"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise as_validation_error(problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        control = self.control
        specs = [*self.targets.values(), *([control.target] if control else [])]
        ours = [spec for spec in specs if spec in OURS]
        for key, value in (("modes", self.modes), ("engine", self.engine)):
            if value and not ours:
                yield (
                    (key,),
                    f"needs a target that is a server of slobench: {', '.join(OURS)}",
                )
        if control and control.engine and control.target not in OURS:
            yield (
                ("control", "engine"),
                "needs a server that slobench starts; a target file has its own flags",
            )
        if control and len({spec == "sim" for spec in specs}) > 1:
            yield (
                ("control",),
                "sim runs in virtual time and is no control for a server in real time",
            )
        if control and control.servers == "together" and control.target == "sim":
            yield ("control", "servers"), "sim has no server"
        for name in self.margins:
            try:
                if name != EVERY:
                    _measure(name)
            except ValueError as error:
                yield ("margins", name), str(error)
        if self.keep < self.window:
            yield ("keep",), f"{self.keep} nights are fewer than the window of {self.window}"

    def options(self) -> Options:
        """The options of the comparison."""
        margins = {"" if k == EVERY else measure(k).text: v for k, v in self.margins.items()}
        return Options(
            metrics=self.metrics, margins=margins, confidence=self.confidence, effect=self.effect
        )


def load_nightly(path: Path) -> NightlyFile:
    """The checked file. Raises UsageError with a line `file:line: key.path: problem` for every
    mistake. The scenarios and target files that it names are not read."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    document = parse_document(text, str(path), UsageError)
    try:
        file = NightlyFile.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    document.raise_mistakes()
    return file


def is_nightly(path: Path) -> bool:
    """Whether a file is a nightly file, judged by its keys."""
    try:
        values = parse_document(read_file(path).decode("utf-8-sig"), str(path), UsageError).values
    except (OSError, UnicodeDecodeError, UsageError):
        return False  # the scenario reader reports the problem
    return "targets" in values and "scenarios" in values


def resolved_path(folder: Path, text: str) -> str:
    """The path of a file in `folder`, if it exists; else the text itself (a name)."""
    path = folder / text
    return str(path) if path.is_file() else text


def read_scenarios(file: NightlyFile, folder: Path, label: str) -> dict[str, Scenario]:
    """The scenarios by name, with the file's SLOs. Raises UsageError with the key."""
    overrides = {"slo": list(file.slo)} if file.slo else {}
    scenarios: dict[str, Scenario] = {}
    for name, text in file.scenarios.items():
        try:
            scenarios[name] = load_scenario(resolved_path(folder, text), overrides)
        except ScenarioError as error:
            raise UsageError(f"{label}: scenarios.{name}: {error}") from None
    return scenarios
