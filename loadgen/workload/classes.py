"""Traffic classes: single requests, sessions or chains, with SLOs, a priority and a tenant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from loadgen.errors import nearest
from loadgen.measure.slo import Slo, parse_slo, ungrounded
from loadgen.registry import Strict
from loadgen.workload.agents.block import Agents
from loadgen.workload.arrivals import ARRIVALS, Arrivals
from loadgen.workload.dialogue import Context
from loadgen.workload.durations import DURATIONS, Durations, FixedDuration
from loadgen.workload.lengths import LENGTHS, Lengths
from loadgen.workload.presets import SloPreset, expanded
from loadgen.workload.requests import Requests

_NO_PAUSE = FixedDuration.model_construct(duration=0.0)
DEFAULT_TENANT = "default"  # not sent to the server
Problem = tuple[tuple[str | int, ...], str]  # key path, message


def as_validation_error(problems: Sequence[Problem]) -> ValidationError:
    """The problems as a single pydantic error, each with its key path."""
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
    """A conversation: `turns` requests in sequence, with a pause of `think` between an answer and
    the next question. The prompt of each turn contains all earlier turns.

    `context` selects the answers in it: `scripted` answers of the planned lengths, written ahead,
    or the server's `real` answers. Their `reasoning` is dropped, as most chat templates drop it
    from earlier turns, or kept: then each turn sends it back.
    """

    turns: Annotated[Lengths, LENGTHS]
    think: Annotated[Durations, DURATIONS] = _NO_PAUSE
    context: Literal["scripted", "real"] = "scripted"
    reasoning: Literal["drop", "keep"] = "drop"

    @property
    def quotes(self) -> Context:
        """The `context` of later turns in the schedule."""
        return Context.reasoned if self.reasoning == "keep" else Context[self.context]


class Step(Strict):
    """A request of a chain, sent `think` after the last step named in `after` has ended; a step
    without `after` starts the chain."""

    name: Annotated[str, Field(min_length=1)]
    after: Annotated[tuple[str, ...], Field(strict=False)] = ()
    think: Annotated[Durations, DURATIONS] = _NO_PAUSE
    requests: Requests


def _checked_chain(chain: tuple[Step, ...]) -> tuple[Step, ...]:
    problems = list(_chain_problems(chain))
    if problems:
        raise as_validation_error(problems)
    return chain


def _chain_problems(chain: tuple[Step, ...]) -> Iterator[Problem]:
    above: list[str] = []
    for number, step in enumerate(chain):
        if step.name in above:
            yield (number, "name"), f"two steps are called '{step.name}'"
        for name in step.after:
            if name not in above:
                problem = f"no earlier step is called '{name}'; {nearest(name, above)}"
                yield (number, "after"), problem
        if len(set(step.after)) < len(step.after):
            yield (number, "after"), "names a step twice"
        if not step.after and step.think != _NO_PAUSE:
            yield (number, "think"), "a step without 'after' starts the chain and has no pause"
        above.append(step.name)


Chain = Annotated[tuple[Step, ...], Field(strict=False), AfterValidator(_checked_chain)]


class TrafficClass(Strict):
    """A class of traffic. `weight` is its share of the scenario's arrivals relative to the other
    classes; a class with its own `arrivals` does not share them."""

    weight: Annotated[float, Field(gt=0)] | None = None
    arrivals: Annotated[Arrivals, ARRIVALS] | None = None
    requests: Requests | None = None
    session: Session | None = None
    chain: Chain = ()
    agents: Agents | None = None
    slo: SloList = ()
    priority: Annotated[int, Field(ge=-32768, le=32767)] = 0
    tenant: Annotated[str, Field(min_length=1, max_length=64)] = DEFAULT_TENANT

    def slo_texts(self) -> tuple[str, ...]:
        """The SLO expressions, with presets expanded."""
        return expanded(self.slo)

    def slos(self) -> tuple[Slo, ...]:
        """The SLOs of this class alone, parsed, in file order."""
        return tuple(map(parse_slo, self.slo_texts()))

    def steps(self) -> tuple[Step, ...]:
        """The steps of the chain; a class without a chain has a single step."""
        if self.chain:
            return self.chain
        return (Step(name="request", requests=self.requests or Requests()),)

    def problems(self, arrivals: Arrivals | None, has_texts: bool) -> Iterator[Problem]:
        """Contradictions between the keys, for the arrivals that the class has. `has_texts`: the
        prompts have lengths of their own."""
        if self.chain and self.requests is not None:
            yield ("requests",), "a chain's requests stand in its steps; remove requests or chain"
        if self.chain and self.session is not None:
            yield ("session",), "a class is a session or a chain, not both"
        session = self.session
        if session is not None and session.reasoning == "keep" and session.context != "real":
            yield ("session", "reasoning"), "scripted answers have none; add context: real"
        if self.agents is not None:
            yield from self._beside_agents(arrivals, has_texts)
            return
        is_alone = not (self.chain or self.session)
        is_replay = arrivals is not None and arrivals.gives_lengths
        key = "chain" if self.chain else "session"
        if is_replay and not is_alone:
            yield (key,), "the arrivals replay single requests; sessions need another kind"
        if has_texts and not is_alone:
            yield (key,), "a dataset's prompts stand alone; sessions need prompts of another kind"
        if not self.chain and self.requests is None and not (is_replay or has_texts):
            yield ("requests",), "this key is required"
        if not (is_replay or has_texts):
            yield from self._missing_lengths()
        problem = ungrounded(self.slos())
        if problem is not None and not (arrivals is not None and arrivals.own_slo_metrics()):
            yield ("slo",), problem

    def _beside_agents(self, arrivals: Arrivals | None, has_texts: bool) -> Iterator[Problem]:
        for key in ("requests", "session", "chain"):
            if getattr(self, key):
                yield (key,), "the agents' files state the requests; remove this key or agents"
        if arrivals is not None and arrivals.gives_lengths:
            yield ("agents",), "the arrivals replay single requests; agents need another kind"
        if has_texts:
            yield (
                ("agents",),
                "a dataset's prompts stand alone; agents need prompts of another kind",
            )

    def _missing_lengths(self) -> Iterator[Problem]:
        blocks: list[tuple[tuple[str | int, ...], Requests]] = [
            (("chain", number, "requests"), step.requests) for number, step in enumerate(self.chain)
        ]
        if self.requests is not None:
            blocks.insert(0, (("requests",), self.requests))
        for path, requests in blocks:
            for key in ("input_tokens", "output_tokens"):
                if not requests.has_lengths and getattr(requests, key) is None:
                    yield (*path, key), "this key is required"
