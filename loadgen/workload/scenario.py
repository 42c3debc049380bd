"""A scenario: who arrives, what they ask, and against what promise. Frozen, checked, and written as
it reads in YAML.

Durations are seconds and rates per second once read; in YAML both are strings with their unit.
docs/scenarios.md describes every key.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PrivateAttr,
    SerializationInfo,
    ValidationError,
    model_validator,
)

from loadgen.errors import ScenarioError, nearest
from loadgen.measure.slo import Slo, lateness_limit_s, parse_slo, ungrounded
from loadgen.records import OWN_SLO, LimitsS, Names
from loadgen.units import Seconds, Share, as_data
from loadgen.workload.arrivals import ARRIVALS, Arrivals
from loadgen.workload.classes import (
    Chain,
    Problem,
    Session,
    SloList,
    TrafficClass,
    as_validation_error,
    tenants_of,
)
from loadgen.workload.presets import expanded
from loadgen.workload.requests import Requests, Strict
from loadgen.workload.texts import PROMPTS, PromptKind, Synthetic
from loadgen.yaml_document import Document, override, parse_document, write_document

ONLY_CLASS = "default"


class Phases(Strict):
    """Requests arrive during `warmup` and `measure`; only the latter count. `drain` is how long the
    last ones may take to end."""

    warmup: Seconds = 0.0
    measure: Annotated[Seconds, Field(gt=0)]
    drain: Seconds = 30.0


class Limits(Strict):
    """What a request may cost the client. At `max_concurrency` in flight a due request is dropped
    and counted, or waits and shows it as latency."""

    timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    max_concurrency: Annotated[int, Field(ge=1, le=1_000_000)] = 2000
    when_full: Literal["drop", "wait"] = "drop"


class StopWhen(Strict):
    """End the run early when the share of failures over a sliding window reaches `error_rate`, or,
    if asked, when requests have piled up at the server for `saturated`."""

    error_rate: Annotated[Share, Field(gt=0)] = 0.5
    over: Annotated[Seconds, Field(gt=0)] = 20.0
    saturated: Annotated[Seconds, Field(ge=1)] | None = None


class Instrument(Strict):
    """When the client itself is the bottleneck and the run is invalid: p99 dispatch lateness (None:
    max(5 ms, 2 % of the TTFT limit)), p99 event-loop lag, mean wait of bytes in the sockets, CPU
    share, scheduler run delay."""

    lateness: Annotated[Seconds, Field(gt=0)] | None = None
    loop_lag: Annotated[Seconds, Field(gt=0)] = 5e-3
    read_backlog: Annotated[Seconds, Field(gt=0)] = 2.5e-3  # in a burst, the last waits 5 ms
    cpu: Annotated[Share, Field(gt=0)] = 0.9
    run_delay: Annotated[Share, Field(gt=0)] = 0.01


def _fit_for_a_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError(
            f"{name!r} cannot name a run's folder; begin with a letter and use up to 64 letters, "
            "digits, '_', '.' and '-'"
        )
    return name


def _or_never(value: object) -> object:
    return None if value == "never" else value


def _never_or(stop_when: StopWhen | None, info: SerializationInfo) -> object:
    if stop_when is None:
        return "never"
    return as_data(stop_when, info.mode, exclude_defaults=info.exclude_defaults)


def _or_synthetic(value: object) -> object:
    return {"kind": "synthetic", **value} if isinstance(value, dict) else value


class Scenario(Strict):
    """One traffic situation and its promise; equal scenarios give equal schedules, whatever their
    `source`.

    What is asked stands here (`requests`, or a `chain`, as single requests or a `session`), or in
    `classes`, each with promises of its own; then `slo` holds those about all traffic together.
    """

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    name: Annotated[str, AfterValidator(_fit_for_a_folder)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    arrivals: Annotated[Arrivals, ARRIVALS] | None = None
    requests: Requests | None = None
    session: Session | None = None
    chain: Chain = ()
    classes: dict[str, TrafficClass] = Field(default_factory=dict)
    phases: Phases
    limits: Limits = Limits()
    stop_when: Annotated[
        StopWhen | None, BeforeValidator(_or_never), PlainSerializer(_never_or, when_used="json")
    ] = StopWhen()
    prompts: Annotated[PromptKind, PROMPTS, BeforeValidator(_or_synthetic)] = Synthetic()
    slo: SloList = ()
    instrument: Instrument = Instrument()
    _source: str = PrivateAttr(default="")  # no field: it is no key of the file

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scenario) and self.__dict__ == other.__dict__

    @property
    def source(self) -> str:
        """The file or the shipped scenario that it was read from; "" for one that was made of flags
        or in Python."""
        return self._source

    def from_source(self, source: str) -> Self:
        """The same scenario, read from `source`."""
        copy = self.model_copy()
        copy._source = source
        return copy

    def with_values(self, values: Mapping[str, object]) -> Scenario:
        """A scenario of other values, in the form of `resolved`, from the same source."""
        return Scenario.model_validate(values).from_source(self.source)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise as_validation_error(problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        own = TrafficClass.model_construct(
            requests=self.requests, session=self.session, chain=self.chain
        )
        has_texts = self.prompts.gives_lengths
        if not self.classes:
            if self.arrivals is None:
                yield ("arrivals",), "this key is required"
            yield from own.problems(self.arrivals, has_texts)
        else:
            for key in ("requests", "session", "chain"):
                if getattr(self, key):
                    yield (key,), "with classes this stands in each class; move it there"
            yield from self._problems_of_classes(has_texts)
        of_classes = [parse_slo(t) for c in self.classes.values() for t in c.slo_texts()]
        lonely = ungrounded(self.promises(), elsewhere=of_classes)
        if lonely is not None and not self.promised():
            yield ("slo",), lonely

    def _problems_of_classes(self, has_texts: bool) -> Iterator[Problem]:
        shares = [name for name, c in self.classes.items() if c.arrivals is None]
        if shares and self.arrivals is None:
            yield ("arrivals",), f"this key is required: class '{shares[0]}' has none of its own"
        if not shares and self.arrivals is not None:
            yield ("arrivals",), "every class has arrivals of its own; remove these"
        for name, own in self.classes.items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", name):
                yield ("classes", name), f"{name!r} cannot name a class; use letters, digits, _ . -"
            if own.arrivals is not None and own.weight is not None:
                problem = "a weight shares the scenario's arrivals, and this class has its own"
                yield ("classes", name, "weight"), problem
            for path, problem in own.problems(own.arrivals or self.arrivals, has_texts):
                yield ("classes", name, *path), problem

    @property
    def horizon_s(self) -> float:
        """How long requests arrive: warm-up and measured window together."""
        return self.phases.warmup + self.phases.measure

    def traffic(self) -> dict[str, TrafficClass]:
        """Every class by name; a scenario without classes is one, called `default`, without
        promises (those are the scenario's)."""
        if self.classes:
            return self.classes
        own = {"requests": self.requests, "session": self.session, "chain": self.chain}
        return {ONLY_CLASS: TrafficClass.model_validate(own, strict=False)}

    def is_closed_loop(self, class_name: str) -> bool:
        """Whether a class's requests wait for its users' earlier ones."""
        arrivals = self.traffic()[class_name].arrivals or self.arrivals
        return arrivals is not None and arrivals.pause() is not None

    def names(self) -> Names:
        """What class_id and tenant_id of the schedule mean."""
        traffic = self.traffic()
        return Names(classes=tuple(traffic), tenants=tenants_of(list(traffic.values())))

    def slo_texts(self) -> tuple[str, ...]:
        """The promises about all traffic, presets written out."""
        return expanded(self.slo)

    def promises(self) -> tuple[Slo, ...]:
        """The SLO expressions about all traffic, parsed, in the order they are written."""
        return tuple(parse_slo(text) for text in self.slo_texts())

    def promised(self) -> tuple[str, ...]:
        """The per-request metrics of which requests may bring a limit of their own."""
        kinds = (self.arrivals, *(one.arrivals for one in self.classes.values()))
        return tuple(dict.fromkeys(m for kind in kinds if kind for m in kind.promised()))

    def limits_by_class(self) -> tuple[LimitsS, ...]:
        """What each class's requests were promised about the metrics that a server can schedule by,
        by class_id; the tightest where there are several. A request's own limit goes before it."""
        shared = self.promises()
        limits = []
        for asked in self.traffic().values():
            slos = [*shared, *(parse_slo(text) for text in asked.slo_texts())]
            limits.append(tuple(_tightest(slos, metric) for metric in OWN_SLO))
        return tuple(limits)

    @property
    def lateness_limit_s(self) -> float:
        """The p99 dispatch lateness above which a run is invalid: as set, or max(5 ms, 2 % of the
        tightest TTFT limit, of any class)."""
        if self.instrument.lateness is not None:
            return self.instrument.lateness
        texts = [*self.slo_texts(), *(t for c in self.classes.values() for t in c.slo_texts())]
        return lateness_limit_s(parse_slo(text) for text in texts)

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as JSON; `model_validate` reads it back."""
        return as_data(self)

    def to_yaml(self) -> str:
        """The scenario as a file that reads back as an equal one: units as strings, and no key that
        equals its default except `schema`, which every file carries."""
        values = as_data(self, exclude_defaults=True)
        return write_document({"schema": self.schema_version, **values})


def _tightest(slos: Sequence[Slo], metric: str) -> float | None:
    return min((s.limit for s in slos if s.scope == "request" and s.metric == metric), default=None)


def load_scenario(
    path_or_name: str | Path, overrides: Sequence[str] | Mapping[str, object] = ()
) -> Scenario:
    """A scenario from a file, or a shipped one by name (`quickstart`, `scenarios/quickstart.yaml`),
    with `a.b=c` settings applied on top.

    Raises ScenarioError with one `file:line: key.path: problem` line for every mistake.
    """
    label, text = read_source(path_or_name)
    document = parse_document(text, label, ScenarioError)
    document.values.setdefault("name", _name_from(label))
    override(document, overrides)
    return _checked(document).from_source(label)


def varied(scenario: Scenario, settings: Mapping[str, object], flag: str = "--set") -> Scenario:
    """The same scenario with values set by dotted path. Raises ScenarioError that names `flag`."""
    document = parse_document(scenario.to_yaml(), scenario.name, ScenarioError)
    document.lines.clear()  # of a text that nobody wrote
    override(document, settings, flag)
    return _checked(document).from_source(scenario.source)


def scenario_from_flags(
    *,
    rate: str,
    input_len: int | Mapping[str, object],
    output_len: int | Mapping[str, object],
    duration: str,
    warmup: str = "0s",
    max_concurrency: int | None = None,
    slo: Sequence[str] = (),
    seed: int = 0,
    name: str = "command_line",
    overrides: Sequence[str] | Mapping[str, object] = (),
) -> Scenario:
    """The Poisson scenario that a command line without a file describes. Raises ScenarioError that
    names the flag."""
    values: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "arrivals": {"kind": "poisson", "rate": rate},
        "requests": {"input_tokens": input_len, "output_tokens": output_len},
        "phases": {"warmup": warmup, "measure": duration},
        "limits": {} if max_concurrency is None else {"max_concurrency": max_concurrency},
        "slo": list(slo),
    }
    document = Document("command line", ScenarioError, values)
    document.sources = {
        ("seed",): "--seed",
        ("arrivals", "rate"): "--rate",
        ("requests", "input_tokens"): "--input-len",
        ("requests", "output_tokens"): "--output-len",
        ("phases", "measure"): "--duration",
        ("phases", "warmup"): "--warmup",
        ("limits", "max_concurrency"): "--max-concurrency",
        ("slo",): "--slo",
    }
    override(document, overrides)
    return _checked(document)


def shipped_scenarios() -> list[str]:
    """The names of the scenarios that come with slobench, sorted."""
    folder = importlib.resources.files("scenarios")
    files = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in files)


def read_source(path_or_name: str | Path) -> tuple[str, str]:
    """(label, text) of a scenario file or a shipped scenario; the label is what messages call it.

    Raises ScenarioError when there is none, or it cannot be read as UTF-8.
    """
    path = Path(path_or_name)
    name = path.name.removesuffix(".yaml")
    is_shipped_name = path.parent in (Path(), Path("scenarios"))
    try:
        if path.is_file() or not is_shipped_name:
            return str(path), path.read_bytes().decode("utf-8-sig")
        resource = importlib.resources.files("scenarios").joinpath(f"{name}.yaml")
        return f"scenarios/{name}.yaml", resource.read_text("utf-8")
    except FileNotFoundError:
        hint = nearest(name, shipped_scenarios())
        problem = f"no such file, and no scenario '{name}' is shipped; {hint}"
        raise ScenarioError(f"{path_or_name}: {problem}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ScenarioError(f"{path_or_name}:{line}: is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ScenarioError(f"{path_or_name}: cannot be read: {error.strerror}") from None


def _name_from(label: str) -> str:
    letters = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(label).stem)[:64]
    return letters if letters[:1].isalpha() else f"s{letters[:63]}"


def _checked(document: Document) -> Scenario:
    try:
        scenario = Scenario.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise
    document.raise_mistakes()  # duplicate keys and the like
    return scenario
