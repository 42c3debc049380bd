"""Scenarios: the traffic of a run and its SLOs, immutable and validated.

In Python durations are in seconds and rates per second; in YAML both are strings with a unit.
docs/scenarios.md describes every key.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
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
from loadgen.fields import Seconds, Share, as_data
from loadgen.manifest.json_section import JsonObject
from loadgen.measure.slo import (
    Slo,
    lateness_limit_s,
    mistaken_trees,
    needs_stream,
    own_slo,
    parse_slo,
    ungrounded,
)
from loadgen.records import OWN_SLO, LimitsS, Names
from loadgen.registry import Strict
from loadgen.units import parse_duration_s, write_duration
from loadgen.workload.agents.block import Agents
from loadgen.workload.arrivals import ARRIVALS, Arrivals, Users, window_rate_per_s
from loadgen.workload.classes import (
    Chain,
    Problem,
    Session,
    SloList,
    TrafficClass,
    as_validation_error,
)
from loadgen.workload.counted_window import CLOSED_LOOP_S, MOST_REQUESTS, window_s
from loadgen.workload.dataset_forms import FORMATS
from loadgen.workload.layout import RandomStreams
from loadgen.workload.presets import expanded
from loadgen.workload.requests import Requests, SamplingFields
from loadgen.workload.texts import (
    PROMPTS,
    PromptKind,
    RecordedPrompts,
    ShareGPTPrompts,
    Synthetic,
)
from loadgen.workload.trace_arrivals import TraceArrivals
from loadgen.workload.traces.trace import TRACES
from loadgen.workload.traffic_flags import CLOSED_LOOPS, FILES, FLAGS, LOADS, TrafficFlags, flag_of
from loadgen.yaml_document import Document, override, parse_document, read_file, write_document

ONLY_CLASS = "default"
NO_FLAGS: Mapping[str, object] = {}
_MOST_IN_FLIGHT = 1_000_000


class Phases(Strict):
    """Requests arrive during a warm-up and a measured window; only those in the window count. The
    last requests have `drain` to end.

    The window is `measure` long, or it ends with the last of `requests` that count, after `at_most`
    at the latest.
    """

    warmup: Seconds = 0.0
    stated_s: Annotated[Seconds, Field(gt=0)] | None = Field(None, alias="measure")
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = None
    at_most: Annotated[Seconds, Field(gt=0)] | None = None
    drain: Seconds = 30.0
    _counted_s: float | None = PrivateAttr(default=None)  # follows from the scenario's arrivals

    @property
    def measure(self) -> float:
        """The length of the measured window, seconds. With `requests` that wait for answers it is
        the longest possible length."""
        length_s = self.stated_s if self.requests is None else self._counted_s
        assert length_s is not None, "a scenario checks its phases"
        return length_s

    def of_length(self, counted_s: float) -> Self:
        """The same phases with the length of the window of `requests`."""
        copy = self.model_copy()
        copy._counted_s = counted_s
        return copy

    def problems(self) -> Iterator[Problem]:
        """Contradictions between the keys."""
        if self.requests is not None and self.stated_s is not None:
            problem = (
                f"{self.requests} requests end the measured window, and so does phases.measure "
                f"({write_duration(self.stated_s)}); remove one of the two"
            )
            yield ("phases", "requests"), problem
        elif self.requests is None and self.stated_s is None:
            yield ("phases", "measure"), "this key is required (or phases.requests, a number)"
        elif self.requests is None and self.at_most is not None:
            problem = "is the longest time for phases.requests; with phases.measure remove it"
            yield ("phases", "at_most"), problem


class Limits(Strict):
    """Limits of the client. With `max_concurrency` requests in flight, a due request is dropped and
    counted, or waits (`when_full`); the waiting time is part of its latency."""

    timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    max_concurrency: Annotated[int, Field(ge=1, le=_MOST_IN_FLIGHT)] = 2000
    when_full: Literal["drop", "wait"] = "drop"


class StopWhen(Strict):
    """Ends the run early if the share of failures in a sliding window `over` reaches `error_rate`
    or, if set, if requests have piled up at the server for `saturated`."""

    error_rate: Annotated[Share, Field(gt=0)] = 0.5
    over: Annotated[Seconds, Field(gt=0)] = 20.0
    saturated: Annotated[Seconds, Field(ge=1)] | None = None


class Instrument(Strict):
    """Limits above which the load generator itself is the bottleneck and the run is invalid: p99
    dispatch lateness (None: max(5 ms, 2 % of the TTFT limit)), p99 event-loop lag, mean wait of
    bytes in the sockets, CPU share, scheduler run delay."""

    lateness: Annotated[Seconds, Field(gt=0)] | None = None
    loop_lag: Annotated[Seconds, Field(gt=0)] = 5e-3
    read_backlog: Annotated[Seconds, Field(gt=0)] = 2.5e-3  # in a burst, the last waits 5 ms
    cpu: Annotated[Share, Field(gt=0)] = 0.9
    run_delay: Annotated[Share, Field(gt=0)] = 0.01


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_ADDRESS = re.compile(r"\w+://.+|[\w.-]+:\d+(/.*)?", re.ASCII)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a run's folder; begin with a letter and use up to 64 letters, "
            "digits, '_', '.' and '-'"
        )
    return name


def _none_if_never(value: object) -> object:
    return None if value == "never" else value


def _stop_when_as_data(stop_when: StopWhen | None, info: SerializationInfo) -> object:
    if stop_when is None:
        return "never"
    return as_data(stop_when, info.mode, exclude_defaults=info.exclude_defaults)


def _synthetic_by_default(value: object) -> object:
    return {"kind": "synthetic", **value} if isinstance(value, dict) else value


class Scenario(Strict):
    """A traffic situation and its SLOs; equal scenarios give equal schedules, whatever their
    `source`.

    The requests are described here (`requests` with an optional `session`, a `chain`, or `agents`)
    or in `classes`. Each class has SLOs of its own; `slo` then holds those about all traffic. Every
    request is sent with the fields of `sampling`.
    """

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    name: Annotated[str, AfterValidator(_checked_name)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    arrivals: Annotated[Arrivals, ARRIVALS] | None = None
    requests: Requests | None = None
    session: Session | None = None
    chain: Chain = ()
    agents: Agents | None = None
    classes: dict[str, TrafficClass] = Field(default_factory=dict)
    sampling: SamplingFields | None = None
    phases: Phases
    limits: Limits = Limits()
    stop_when: Annotated[
        StopWhen | None,
        BeforeValidator(_none_if_never),
        PlainSerializer(_stop_when_as_data, when_used="json"),
    ] = StopWhen()
    prompts: Annotated[PromptKind, PROMPTS, BeforeValidator(_synthetic_by_default)] = Synthetic()
    slo: SloList = ()
    stream: bool = True
    instrument: Instrument = Instrument()
    _source: str = PrivateAttr(default="")  # no field: it is no key of the file

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scenario) and self.__dict__ == other.__dict__

    @property
    def source(self) -> str:
        """The file or the shipped scenario that it was read from; "" for a scenario that was made
        from flags or in Python."""
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
    def _is_consistent(self) -> Self:
        problems = [*self.phases.problems(), *self._problems()] or list(self._count())
        if problems:
            raise as_validation_error(problems)
        return self

    def _count(self) -> Iterator[Problem]:
        """Finds the length of a window that a number of requests limits."""
        phases, closed = self.phases, [self.is_closed_loop(name) for name in self.traffic()]
        if phases.requests is None:
            return
        length_s = phases.at_most or CLOSED_LOOP_S
        if any(closed) and not all(closed):
            problem = (
                f"{phases.requests} requests of open and closed loops together make no window: "
                "their shares would depend on the server; state phases.measure instead"
            )
            yield ("phases", "requests"), problem
        elif not any(closed):
            try:
                length_s = window_s(
                    self._processes(), phases.warmup, phases.requests, phases.at_most
                )
            except ValueError as error:
                yield ("phases", "requests"), str(error)
        # past the immutability: the length belongs to this scenario, the given block may be shared
        self.__dict__["phases"] = phases.of_length(length_s)

    def _processes(self) -> Iterator[tuple[Arrivals, RandomStreams]]:
        """Each arrival process with its random streams."""
        if self.arrivals is not None:
            yield self.arrivals, RandomStreams(self.seed)
        for name, own in self.classes.items():
            if own.arrivals is not None:
                yield own.arrivals, RandomStreams(self.seed, (name,))

    def _problems(self) -> Iterator[Problem]:
        own = TrafficClass.model_construct(
            requests=self.requests, session=self.session, chain=self.chain, agents=self.agents
        )
        has_texts = self.prompts.gives_lengths
        if not self.classes:
            if self.arrivals is None:
                yield ("arrivals",), "this key is required"
            yield from own.problems(self.arrivals, has_texts)
        else:
            for key in ("requests", "session", "chain", "agents"):
                if getattr(self, key):
                    yield (key,), "with classes this key belongs in each class; move it there"
            yield from self._problems_of_classes(has_texts)
        problem = ungrounded(self.slos(), elsewhere=self.all_slos())
        if problem is not None and not self.own_slo_metrics():
            yield ("slo",), problem
        has_agents = any(own.agents is not None for own in self.traffic().values())
        if (mistake := mistaken_trees(self.all_slos(), has_agents)) is not None:
            yield ("slo",), mistake
        if not self.stream:
            own_slos = (own_slo(metric) for metric in self.own_slo_metrics())
            if (problem := needs_stream((*self.all_slos(), *own_slos))) is not None:
                yield ("slo",), problem

    def _problems_of_classes(self, has_texts: bool) -> Iterator[Problem]:
        sharing = [name for name, c in self.classes.items() if c.arrivals is None]
        if sharing and self.arrivals is None:
            yield ("arrivals",), f"this key is required: class '{sharing[0]}' has no arrivals"
        if not sharing and self.arrivals is not None:
            yield ("arrivals",), "every class has arrivals of its own; remove these"
        for name, own in self.classes.items():
            if not _NAME.fullmatch(name):
                yield ("classes", name), f"{name!r} cannot name a class; use letters, digits, _ . -"
            if own.arrivals is not None and own.weight is not None:
                problem = "a weight shares the scenario's arrivals, and this class has its own"
                yield ("classes", name, "weight"), problem
            for path, problem in own.problems(own.arrivals or self.arrivals, has_texts):
                yield ("classes", name, *path), problem

    @property
    def horizon_s(self) -> float:
        """The length of the arrivals: warm-up plus measured window."""
        return self.phases.warmup + self.phases.measure

    @property
    def requests_in_flow(self) -> int | None:
        """The number of requests that ends the measured window during the run, because requests
        wait for answers: in a closed loop, in sessions and chains. None for a window whose end the
        schedule gives."""
        waits = self.has_closed_loop or any(
            own.session is not None or own.chain or own.agents is not None
            for own in self.traffic().values()
        )
        return self.phases.requests if waits else None

    def with_known_window(self) -> Scenario:
        """The same traffic with `phases.measure` in place of a number of requests, as far as the
        schedule gives the length."""
        if self.phases.requests is None or self.requests_in_flow is not None:
            return self
        values = self.resolved()
        length = write_duration(self.phases.measure)
        values["phases"] |= {"measure": length, "requests": None, "at_most": None}
        return self.with_values(values)

    def traffic(self) -> dict[str, TrafficClass]:
        """Every class by name. A scenario without classes has the class `default`, without SLOs
        (they are the scenario's)."""
        if self.classes:
            return self.classes
        own = {
            "requests": self.requests,
            "session": self.session,
            "chain": self.chain,
            "agents": self.agents,
        }
        return {ONLY_CLASS: TrafficClass.model_validate(own, strict=False)}

    def is_closed_loop(self, class_name: str) -> bool:
        """Whether a class is a closed loop: its users wait for a response before the next
        request."""
        arrivals = self.traffic()[class_name].arrivals or self.arrivals
        return arrivals is not None and arrivals.pause() is not None

    def requested_rate_per_s(self) -> float | None:
        """The mean rate of all arrivals in the measured window, in closed form: of requests, or of
        the starts of sessions and chains. None with a closed loop or a kind without a mean rate."""
        kinds = [self.arrivals, *(own.arrivals for own in self.classes.values())]
        rates = [self._window_rate_per_s(kind) for kind in kinds if kind is not None]
        stated = [rate for rate in rates if rate is not None]
        return sum(stated) if len(stated) == len(rates) else None

    def requested_rates_per_s(self) -> dict[str, float | None]:
        """The same by class; None also for classes that share a trace, which names its classes."""
        sharing = {name: own for name, own in self.traffic().items() if own.arrivals is None}
        whole = None if self.arrivals is None else self._window_rate_per_s(self.arrivals)
        if len(sharing) > 1 and self.arrivals is not None and self.arrivals.gives_lengths:
            whole = None
        total = sum(own.weight or 1.0 for own in sharing.values())
        return {
            name: self._window_rate_per_s(own.arrivals)
            if own.arrivals is not None
            else None
            if whole is None
            else whole * (own.weight or 1.0) / total
            for name, own in self.traffic().items()
        }

    def _window_rate_per_s(self, arrivals: Arrivals) -> float | None:
        if arrivals.pause() is not None:
            return None
        return window_rate_per_s(arrivals, self.phases.warmup, self.horizon_s)

    @property
    def has_closed_loop(self) -> bool:
        """Whether any class is a closed loop."""
        return any(map(self.is_closed_loop, self.traffic()))

    def notes(self) -> tuple[str, ...]:
        """The rows of the scenario's traces and prompts that were left out, reordered or
        approximated on reading, with the file. Reads the files."""
        kinds = [self.arrivals, *(own.arrivals for own in self.classes.values())]
        sources = [*(kind for kind in kinds if isinstance(kind, TraceArrivals)), self.prompts]
        read = [
            (source.path, source.notes())
            for source in sources
            if isinstance(source, TraceArrivals | RecordedPrompts)
        ]
        agents = [own.agents for own in self.traffic().values() if own.agents is not None]
        read += [(own.path, own.corpus.notes) for own in agents]
        return tuple(f"{path}: {note}" for path, notes in read for note in notes)

    def names(self) -> Names:
        """The names behind class_id and tenant_id of the schedule."""
        traffic = self.traffic()
        tenants = dict.fromkeys(own.tenant for own in traffic.values())
        return Names(classes=tuple(traffic), tenants=tuple(tenants))

    def slo_texts(self) -> tuple[str, ...]:
        """The SLO expressions about all traffic, with presets expanded."""
        return expanded(self.slo)

    def slos(self) -> tuple[Slo, ...]:
        """The SLOs about all traffic, parsed, in file order."""
        return tuple(map(parse_slo, self.slo_texts()))

    def slos_by_class(self) -> dict[str, tuple[Slo, ...]]:
        """The SLOs that apply to the requests of each class: the shared SLOs and its own."""
        shared = self.slos()
        return {name: (*shared, *own.slos()) for name, own in self.traffic().items()}

    def all_slos(self) -> tuple[Slo, ...]:
        """Every SLO of the scenario: the shared SLOs, then those of each class."""
        own = (slo for traffic in self.classes.values() for slo in traffic.slos())
        return (*self.slos(), *own)

    def own_slo_metrics(self) -> tuple[str, ...]:
        """The per-request metrics for which requests may carry limits of their own."""
        kinds = (self.arrivals, *(own.arrivals for own in self.classes.values()))
        return tuple(dict.fromkeys(m for kind in kinds if kind for m in kind.own_slo_metrics()))

    @property
    def has_per_request_limit(self) -> bool:
        """Whether any request has a limit: of all traffic, of its class, or of its own."""
        stated = any(slo.scope == "request" for slo in self.all_slos())
        return stated or bool(self.own_slo_metrics())

    def limits_by_class(self) -> tuple[LimitsS, ...]:
        """The per-request limits of each class for the metrics in `OWN_SLO`, by class_id; the
        tightest of several, None without a limit. A limit of the request's own takes precedence."""
        return tuple(
            tuple(_tightest(slos, metric) for metric in OWN_SLO)
            for slos in self.slos_by_class().values()
        )

    @property
    def lateness_limit_s(self) -> float:
        """The p99 dispatch lateness above which a run is invalid: the configured value, or
        max(5 ms, 2 % of the tightest TTFT limit of any class)."""
        if self.instrument.lateness is not None:
            return self.instrument.lateness
        return lateness_limit_s(self.all_slos())

    def resolved(self) -> JsonObject:
        """Every key with its value, including defaults, as JSON data for `model_validate`. Without
        `sampling` where it states nothing, so that scenarios recorded before that key stay equal.
        """
        values = as_data(self)
        if self.sampling is None:
            del values["sampling"]
        return values

    def to_yaml(self) -> str:
        """The scenario as a YAML file that loads as an equal scenario. Keys that equal their
        default are left out, except `schema`."""
        values = as_data(self, exclude_defaults=True)
        return write_document({"schema": self.schema_version, **values})


def _tightest(slos: Sequence[Slo], metric: str) -> float | None:
    return min((s.limit for s in slos if s.scope == "request" and s.metric == metric), default=None)


def load_scenario(
    path_or_name: str | Path,
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    flags: Mapping[str, object] = NO_FLAGS,
) -> Scenario:
    """A scenario from a file, or a shipped scenario by name (`quickstart`,
    `scenarios/quickstart.yaml`), with the values of flags (TrafficFlags, `slo` and `seed`), then
    `a.b=c` settings applied.

    Raises ScenarioError with a line `file:line: key.path: problem` per mistake.
    """
    label, text = read_source(path_or_name)
    document = parse_document(text, label, ScenarioError)
    document.values.setdefault("name", _name_from(label))
    _set_flags(document, flags)
    _override(document, overrides)
    return _checked(document).from_source(label)


def varied(
    scenario: Scenario,
    settings: Mapping[str, object],
    flag: str = "--set",
    flags: Mapping[str, object] = NO_FLAGS,
) -> Scenario:
    """The same scenario with the values of flags (TrafficFlags, `slo` and `seed`) and values set by
    dotted path. Raises ScenarioError that names `flag`, or the flag in `flags`."""
    document = parse_document(scenario.to_yaml(), scenario.name, ScenarioError)
    document.lines.clear()  # line numbers of generated text mean nothing to the user
    _set_flags(document, flags)
    _override(document, settings, flag)
    return _checked(document).from_source(scenario.source)


def scenario_from_flags(
    *,
    slo: Sequence[str] = (),
    seed: int = 0,
    name: str = "command_line",
    overrides: Sequence[str] | Mapping[str, object] = (),
    **traffic: Any,
) -> Scenario:
    """The scenario for a command line without a scenario file. `traffic` holds fields of
    TrafficFlags. Raises ScenarioError that names the flag."""
    values: JsonObject = {"name": name, "arrivals": {"kind": "poisson"}, "slo": list(slo)}
    document = Document("command line", ScenarioError, values)
    document.sources = {("arrivals", "rate"): "--rate", ("slo",): "--slo"}
    _set_flags(document, {**asdict(TrafficFlags(**traffic)), "seed": seed})
    _override(document, overrides)
    if traffic.get("trace") is not None:
        _set_window_of_trace(document)
    return _checked(document)


def _set_window_of_trace(document: Document) -> None:
    """The length of the whole trace as the measured window, where none is stated."""
    phases = document.values.setdefault("phases", {})
    if not isinstance(phases, dict) or {"measure", "requests"} & {*phases}:
        return
    try:
        arrivals = ARRIVALS.build(document.values["arrivals"])
        warmup_s = parse_duration_s(str(phases.get("warmup", "0s")))
    except ValueError:  # the validation of the scenario names it
        return
    if isinstance(arrivals, TraceArrivals) and not arrivals.loop:
        length_s = arrivals.length_s - warmup_s
        if length_s <= 0:
            raise document.error(
                f"--warmup: {warmup_s:g} s are not shorter than the trace ({arrivals.length_s:g} s)"
            )
        phases["measure"] = write_duration(length_s)


def _set_flags(document: Document, flags: Mapping[str, object]) -> None:
    """Set the values of flags, by name in Python; None is a flag that was not given. A closed
    loop replaces open-loop arrivals; `users` of a closed loop keep their pause. Raises the
    document's error for flags that contradict each other or the document."""
    given = {name: value for name, value in flags.items() if value is not None}
    arrivals = document.values.get("arrivals")
    is_closed = isinstance(arrivals, Mapping) and arrivals.get("kind") == Users.kind
    if problem := _contradiction(given, is_closed):
        raise document.error(problem)
    loop = next((name for name in CLOSED_LOOPS if name in given), None)
    if loop == "concurrency" or (loop == "users" and not is_closed):
        override(
            document,
            {"arrivals": {"kind": Users.kind, "users": given[loop], "think": "0s"}},
            flag_of(loop),
        )
    for name, value in given.items():
        is_limit = name == "duration" and "num_prompts" in given
        key = "phases.at_most" if is_limit else FLAGS[name].key if name in FLAGS else name
        if name in FILES:
            try:
                value = _of_file(name, str(value))
            except ValueError as error:
                raise document.error(str(error)) from None
        _override(document, {key: value}, flag_of(name))
    if loop is not None:
        _make_room(document, given[loop], flag_of(loop))


def _of_file(name: str, text: str) -> JsonObject:
    """The block of a flag that names a file, `FILE[:format]`. Raises ValueError that names the
    flag for an unknown format."""
    path, colon, word = text.rpartition(":")
    if not colon or Path(text).exists() or "/" in word or not Path(path).exists():
        path, word = text, ""
    word = word.replace("-", "_")
    formats = (*FORMATS, ShareGPTPrompts.kind) if name == "dataset" else tuple(TRACES.names())
    if word and word not in formats:
        raise ValueError(
            f"{flag_of(name)} {text}: unknown format '{word}'; {nearest(word, formats)}"
        )
    if name == "dataset" and word == ShareGPTPrompts.kind:
        return {"kind": word, "path": path}
    kind = "dataset" if name == "dataset" else "trace"
    return {"kind": kind, "path": path, **({"format": word} if word else {})}


def _override(
    document: Document, settings: Sequence[str] | Mapping[str, object], flag: str = "--set"
) -> None:
    """`override`; a setting of the length of the window, or of its number of requests, replaces the
    other in the document."""
    keys = {setting.partition("=")[0].strip() for setting in settings}
    phases = document.values.get("phases")
    if isinstance(phases, dict):
        if "phases.measure" in keys and "phases.requests" not in keys:
            phases.pop("requests", None)
            phases.pop("at_most", None)
        elif "phases.requests" in keys and "phases.measure" not in keys:
            phases.pop("measure", None)
    override(document, settings, flag)


def _contradiction(given: Mapping[str, object], is_closed: bool) -> str:
    """Why flags contradict each other or a closed loop, with the remedy; "" if they do not."""
    loads = [name for name in LOADS if name in given]
    if len(loads) > 1:
        return (
            f"{' and '.join(map(flag_of, loads))}: use one: --rate sends at that rate whatever the "
            "server does (open loop), --users and --concurrency wait for answers (closed loop)"
        )
    if "trace" in given and (loop := [name for name in CLOSED_LOOPS if name in given]):
        return f"--trace states when requests are sent and {flag_of(loop[0])} does not; remove one"
    if "dataset" in given and "input_len" in given:
        return "--input-len: the prompts of --dataset have lengths of their own; remove one of them"
    if "think" in given and "concurrency" in given:
        return "--think: with --concurrency the next request starts at once; use --users N --think"
    if "think" in given and not is_closed and "users" not in given:
        return "--think: the pause of users between an answer and the next request; add --users N"
    if "rate" in given and is_closed:
        return (
            "--rate: the scenario's users wait for answers and have no rate; use --users N, or "
            f"--set 'arrivals={{kind: poisson, rate: {given['rate']}}}'"
        )
    return ""


def _make_room(document: Document, n_users: object, flag: str) -> None:
    """Raise the default limit of requests in flight for many users; a stated limit stays."""
    limits = document.values.get("limits")
    is_stated = isinstance(limits, Mapping) and "max_concurrency" in limits
    if not is_stated and isinstance(n_users, int) and 2 * n_users > Limits().max_concurrency:
        override(document, {"limits.max_concurrency": min(2 * n_users, _MOST_IN_FLIGHT)}, flag)


def shipped_scenarios() -> list[str]:
    """The names of the scenarios shipped with slobench, sorted."""
    folder = importlib.resources.files("scenarios")
    files = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in files)


def read_source(path_or_name: str | Path) -> tuple[str, str]:
    """(label, text) of a scenario file or a shipped scenario; messages use the label.

    Raises ScenarioError if it does not exist or is not UTF-8 text.
    """
    path = Path(path_or_name)
    name = path.name.removesuffix(".yaml")
    is_shipped_name = path.parent in (Path(), Path("scenarios"))
    try:
        is_file = path.exists() and not (path.is_dir() and not path.suffix)
        if is_file or not is_shipped_name:
            return str(path), read_file(path).decode("utf-8-sig")
        resource = importlib.resources.files("scenarios").joinpath(f"{name}.yaml")
        return f"scenarios/{name}.yaml", resource.read_text("utf-8")
    except FileNotFoundError:
        hint = nearest(name, shipped_scenarios())
        problem = f"no such file and no shipped scenario '{name}'; {hint}"
        if _ADDRESS.fullmatch(text := str(path_or_name)):
            url = text if "://" in text else f"http://{text}"
            problem = f"a server is a target, not a scenario; write --target {url}"
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
