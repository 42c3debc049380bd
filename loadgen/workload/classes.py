"""Classes of traffic: what each asks, alone, in sessions or in chains, and what it was promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from loadgen.errors import nearest
from loadgen.measure.slo import Slo, parse_slo, ungrounded
from loadgen.registry import Strict
from loadgen.workload.arrivals import ARRIVALS, Arrivals
from loadgen.workload.durations import DURATIONS, Durations, FixedDuration
from loadgen.workload.lengths import LENGTHS, Lengths
from loadgen.workload.presets import SloPreset, expanded
from loadgen.workload.requests import Requests

_NO_PAUSE = FixedDuration.model_construct(duration=0.0)
DEFAULT_TENANT = "default"  # is not sent to the server
Problem = tuple[tuple[str | int, ...], str]  # key path, what is wrong there


def as_validation_error(problems: Sequence[Problem]) -> ValidationError:
    """Problems as pydantic tells them, each with its key path."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError("value_error", "{problem}", {"problem": problem}),
            loc=path,
            input=None,
        )
        for path, problem in problems
    ]
    return ValidationError.from_exception_data("Scenario", details)


def _slo_entry(value: object) -> str | SloPreset:
    if isinstance(value, str):
        parse_slo(value)
        return value
    if isinstance(value, dict | SloPreset):
        return SloPreset.model_validate(value)
    raise PydanticCustomError("slo_type", "Input should be an SLO, or {preset: NAME}")


def _written(entry: str | SloPreset) -> object:
    return entry if isinstance(entry, str) else entry.model_dump()


SloEntry = Annotated[
    str | SloPreset,
    PlainValidator(_slo_entry, json_schema_input_type=str | SloPreset),
    PlainSerializer(_written),
]
SloList = Annotated[tuple[SloEntry, ...], Field(strict=False)]


class Session(Strict):
    """A conversation: `turns` requests one after the other, `think` between an answer and the next
    question, each turn's prompt holding everything said before.

    `context` says whose answers are in it: `scripted` ones of the planned lengths, known ahead, or
    the server's `real` ones.
    """

    turns: Annotated[Lengths, LENGTHS]
    think: Annotated[Durations, DURATIONS] = _NO_PAUSE
    context: Literal["scripted", "real"] = "scripted"


class Step(Strict):
    """One request of a chain, sent `think` after the last of the steps named in `after` has ended;
    without `after` it starts the chain."""

    name: Annotated[str, Field(min_length=1)]
    after: Annotated[tuple[str, ...], Field(strict=False)] = ()
    think: Annotated[Durations, DURATIONS] = _NO_PAUSE
    requests: Requests


def _ordered(chain: tuple[Step, ...]) -> tuple[Step, ...]:
    problems = list(_problems_of(chain))
    if problems:
        raise as_validation_error(problems)
    return chain


def _problems_of(chain: tuple[Step, ...]) -> Iterator[Problem]:
    above: list[str] = []
    for number, step in enumerate(chain):
        if step.name in above:
            yield (number, "name"), f"two steps are called '{step.name}'"
        for name in step.after:
            if name not in above:
                problem = f"no step above this one is called '{name}'; {nearest(name, above)}"
                yield (number, "after"), problem
        if len(set(step.after)) < len(step.after):
            yield (number, "after"), "names a step twice"
        if not step.after and step.think != _NO_PAUSE:
            yield (number, "think"), "a step without 'after' starts the chain: nothing to think on"
        above.append(step.name)


Chain = Annotated[tuple[Step, ...], Field(strict=False), AfterValidator(_ordered)]


class TrafficClass(Strict):
    """One class of traffic. `weight` is its share of the scenario's arrivals, relative to the other
    classes'; with `arrivals` of its own it is a stream of its own."""

    weight: Annotated[float, Field(gt=0)] | None = None
    arrivals: Annotated[Arrivals, ARRIVALS] | None = None
    requests: Requests | None = None
    session: Session | None = None
    chain: Chain = ()
    slo: SloList = ()
    priority: Annotated[int, Field(ge=-32768, le=32767)] = 0
    tenant: Annotated[str, Field(min_length=1, max_length=64)] = DEFAULT_TENANT

    def slo_texts(self) -> tuple[str, ...]:
        """The promises with presets written out."""
        return expanded(self.slo)

    def slos(self) -> tuple[Slo, ...]:
        """The SLOs of this class alone, parsed, in the order they are written."""
        return tuple(map(parse_slo, self.slo_texts()))

    def steps(self) -> tuple[Step, ...]:
        """The steps of its chain; a class without one has a single step."""
        if self.chain:
            return self.chain
        return (Step(name="request", requests=self.requests or Requests()),)

    def problems(self, arrivals: Arrivals | None, has_texts: bool) -> Iterator[Problem]:
        """What does not fit together, given the arrivals it has; `has_texts`: the prompts come with
        lengths of their own."""
        if self.chain and self.requests is not None:
            yield ("requests",), "a chain's requests stand in its steps; remove one of the two"
        if self.chain and self.session is not None:
            yield ("session",), "a class is a session or a chain, not both"
        is_alone = not (self.chain or self.session)
        is_replay = arrivals is not None and arrivals.gives_lengths
        if is_replay and not is_alone:
            key = "chain" if self.chain else "session"
            yield (key,), "the arrivals replay requests one by one; sessions need another kind"
        if has_texts and not is_alone:
            key = "chain" if self.chain else "session"
            yield (key,), "a dataset's prompts stand alone; sessions need prompts of another kind"
        if not self.chain and self.requests is None and not (is_replay or has_texts):
            yield ("requests",), "this key is required"
        for path, requests in self._asked():
            yield from _missing(path, requests, is_replay or has_texts)
        lonely = ungrounded(self.slos())
        if lonely is not None and not (arrivals is not None and arrivals.own_slo_metrics()):
            yield ("slo",), lonely

    def _asked(self) -> Iterator[tuple[tuple[str | int, ...], Requests]]:
        if self.requests is not None:
            yield ("requests",), self.requests
        for number, step in enumerate(self.chain):
            yield ("chain", number, "requests"), step.requests


def _missing(path: tuple[str | int, ...], asked: Requests, is_optional: bool) -> Iterator[Problem]:
    if is_optional or asked.has_lengths:
        return
    for key in ("input_tokens", "output_tokens"):
        if getattr(asked, key) is None:
            yield (*path, key), "this key is required"


def tenants_of(classes: Sequence[TrafficClass]) -> tuple[str, ...]:
    """Every tenant once, in order of appearance."""
    return tuple(dict.fromkeys(c.tenant for c in classes))
