"""nightly.yaml: what is measured every night, what decides, and where the baseline is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from loadgen.errors import ScenarioError, UsageError
from loadgen.measure.comparison.judgement import Options
from loadgen.measure.comparison.measures import measure
from loadgen.measure.slo import parse_slo
from loadgen.registry import Strict
from loadgen.units import Seconds, Share
from loadgen.workload.classes import Problem, as_validation_error
from loadgen.workload.scenario import Scenario, load_scenario
from loadgen.yaml_document import parse_document

EVERY = "default"
"""The margin of every measure that has none of its own."""
OURS = ("reference", "sim", "mock")
"""Targets that take engine settings."""


def _measure(text: str) -> str:
    try:
        return measure(text).text
    except UsageError as error:
        raise ValueError(str(error).removeprefix("--metric ")) from None


def _promise(text: str) -> str:
    parse_slo(text)
    return text


def _one_or_several(value: object) -> object:
    """A list, from one word too; tuples are what the model holds."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _named(value: object) -> object:
    """`name: thing` pairs, from a list of things too, which are then named after themselves."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    named: dict[str, object] = {}
    for item in value:
        name = _name_of(str(item))
        if name in named:
            both = f"{{{name}: {named[name]}, {name}2: {item}}}"
            raise ValueError(f"two of them are called {name}; give them names: {both}")
        named[name] = item
    return named


def _name_of(text: str) -> str:
    word = Path(text).name if text.endswith((".yaml", ".yml")) else text
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", re.sub(r"\.ya?ml$", "", word)).strip("-.") or "x"


Words = Annotated[tuple[str, ...], BeforeValidator(_one_or_several)]
Named = Annotated[dict[str, str], BeforeValidator(_named), Field(min_length=1)]


class Control(Strict):
    """What is measured right beside every run, so that the machine's own pace cancels out: a target
    in the words of `targets`. The bundled engine has the settings of the cell it stands beside;
    `engine` are more of them, its mode included. `servers` says whether both are up together, so
    that one run follows the other at once, or in turns; without it, together where both are of
    ours, compute on the CPU and listen at two places: idle they take nothing from each other.
    """

    target: str
    engine: str = ""
    servers: Literal["together", "in_turns"] | None = None


def _control(value: object) -> object:
    return {"target": value} if isinstance(value, str) else value


class NightlyFile(Strict):
    """The cells of a night are targets × scenarios × modes; each is measured `repeats` times, in
    turns, and compared with the last `window` nights of its baseline.

    `targets`, `scenarios` and `modes` are lists, or mappings from a name to a value where the name
    is to stay when the value changes. A mode is a batching mode of the bundled engine, `engine` are
    settings for all of them. With a `control` every run has one beside it, and what is compared is
    the cell relative to it. `slo` replaces the scenarios' promises. Paths are relative to the file;
    the baseline keeps `keep` nights of a cell.
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
        tuple[Annotated[str, AfterValidator(_promise)], ...], BeforeValidator(_one_or_several)
    ] = ()
    margins: dict[str, Annotated[Share, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    effect: Annotated[Share, Field(gt=0)] | None = None
    confidence: Annotated[Share, Field(gt=0.5, lt=1)] = 0.95
    window: Annotated[int, Field(ge=1, le=365)] = 14
    keep: Annotated[int, Field(ge=1, le=3650)] = 90
    warm_up: Seconds = 0.0
    baseline: str = "baseline"
    fail_on: Literal["worse", "inconclusive", "invalid"] = "worse"

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
        for key, given in (("modes", self.modes), ("engine", self.engine)):
            if given and not ours:
                yield (key,), f"is for a server of ours, and no target is one of {', '.join(OURS)}"
        if control and control.engine and control.target not in OURS:
            yield ("control", "engine"), "is for a server of ours; a target file says its own flags"
        if control and len({spec == "sim" for spec in specs}) > 1:
            yield (
                ("control",),
                "sim runs in a time of its own, and shares no machine with a server in real time",
            )
        if control and control.servers == "together" and control.target == "sim":
            yield ("control", "servers"), "sim has no server that could stay up"
        for name in self.margins:
            try:
                if name != EVERY:
                    _measure(name)
            except ValueError as error:
                yield ("margins", name), str(error)
        if self.keep < self.window:
            yield ("keep",), f"{self.keep} nights are fewer than the window of {self.window}"

    def options(self) -> Options:
        """How tonight is compared."""
        margins = {"" if k == EVERY else measure(k).text: v for k, v in self.margins.items()}
        return Options(
            metrics=self.metrics, margins=margins, confidence=self.confidence, effect=self.effect
        )


def load_nightly(path: Path) -> NightlyFile:
    """The file, checked. Raises UsageError with one `file:line: key.path: problem` line for every
    mistake; the scenarios and target files it names are not read yet."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    document = parse_document(text, str(path), UsageError)
    try:
        found = NightlyFile.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    document.raise_mistakes()
    return found


def is_nightly(path: Path) -> bool:
    """Whether a file is a nightly file, by its keys, rather than a scenario or none of ours."""
    try:
        values = parse_document(path.read_text(encoding="utf-8-sig"), str(path), UsageError).values
    except (OSError, UnicodeDecodeError, UsageError):
        return False  # whoever reads it as a scenario says what is wrong
    return "targets" in values and "scenarios" in values


def beside(folder: Path, text: str) -> str:
    """A path as the file means it, if there is such a file beside it; else the text (a name)."""
    there = folder / text
    return str(there) if there.is_file() else text


def read_scenarios(file: NightlyFile, folder: Path, label: str) -> dict[str, Scenario]:
    """The scenarios by name, with the file's own promises. Raises UsageError naming the key."""
    overrides = {"slo": list(file.slo)} if file.slo else {}
    found: dict[str, Scenario] = {}
    for name, text in file.scenarios.items():
        try:
            found[name] = load_scenario(beside(folder, text), overrides)
        except ScenarioError as error:
            raise UsageError(f"{label}: scenarios.{name}: {error}") from None
    return found
