"""Replay of a log of steps and events: does the same engine make the same decisions again?

The inputs are repeated: arrivals, cancels, stop strings and interventions, each before the step it
preceded, and the instants, durations and sampled tokens of the steps. Everything else is decided
again by the same core and the same policies, and compared with the log: the tokens that each
request got in each step, the causes of waiting, preemptions, jumps and ends. A policy that reads a
clock, draws random numbers or depends on the order of a set decides differently.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from loadgen.manifest.json_section import JsonObject
from reference_engine.accounting.explain import Account
from reference_engine.core import interventions
from reference_engine.core.core import step
from reference_engine.core.setup import MakePolicy, NotReplayable, Setup
from reference_engine.executors.base import Caps
from reference_engine.policies.base import POLICIES
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request, State
from reference_engine.state.steps import ARRIVAL_FIELDS, StepEvent, StepLog, StepRecord

_NOT_DECIDED = ("plan_s",)  # how long planning took depends on the machine
_FILLER_TOKEN = 0  # in answers that have no end in the log
_CONSEQUENCES = ("jump", "rejected_plan")  # events that follow from the engine's own decisions


@dataclass(frozen=True, slots=True)
class EngineLog:
    """All steps and events of an engine, each in the order in which they happened, on the engine's
    clock. A replay needs level "full" and a `start` event."""

    steps: Sequence[StepRecord]
    events: Sequence[StepEvent]

    @property
    def setup(self) -> Setup:
        """The engine's setup. Raises NotReplayable where the log has no `start` event."""
        start = next((event for event in self.events if event.kind == "start"), None)
        if start is None:
            raise NotReplayable(
                "the engine's log has no 'start' event with the engine's setup (it was written by "
                "a version without replays); measure again with this version"
            )
        return Setup.read(start.detail)


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first decision that differed: `where` is the step or the event, `what` the field, `was`
    the log's value and `became` the replay's."""

    where: str
    what: str
    was: object
    became: object

    def __str__(self) -> str:
        return f"{self.where}: {self.what} was {self.was!r}, replayed {self.became!r}"


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay: the number of steps and decisions (requests scheduled in steps, and
    events that follow from them) up to the first difference, if any. `n_open` requests have no end
    in the log; `accounts` are those of the others, in the order of their ends."""

    n_steps: int
    n_decisions: int
    n_open: int
    difference: ReplayDifference | None
    accounts: tuple[Account, ...] = ()

    @property
    def is_identical(self) -> bool:
        return self.difference is None

    def sentence(self) -> str:
        same = f"{self.n_steps} steps, {self.n_decisions} decisions"
        return f"identical: {same}" if self.is_identical else f"{self.difference} (after {same})"


def replay(log: EngineLog, make_policy: MakePolicy = POLICIES.build) -> Replay:
    """Replay a log. `make_policy` builds batching modes from their descriptions; with a changed
    mode the difference is its first other decision. Raises NotReplayable, or UnknownKind for a mode
    that is not loaded."""
    setup = log.setup
    if any(event.kind == "arrival" and "tokens" not in event.detail for event in log.events):
        raise NotReplayable(
            "the engine's log was written with log_level=sizes, which leaves out the requests in "
            "each step; a replay needs log_level=full"
        )
    if log.steps and log.steps[0].step:
        raise NotReplayable(
            f"the engine's log begins at step {log.steps[0].step}: the engine served other runs "
            "before, and their effects on it are not in this log; replay the first of these runs"
        )
    return _Replay(log, setup, make_policy).run()


class _RecordedClock:
    """A clock that returns the instants of a log: each once, the last until others are set."""

    def __init__(self) -> None:
        self._instants: deque[float] = deque((0.0,))

    def set(self, *instants_s: float) -> None:
        self._instants = deque(instants_s)

    def now_s(self) -> float:
        return self._instants[0] if len(self._instants) == 1 else self._instants.popleft()


class _RecordedExecutor:
    """An executor that returns the tokens and the durations of a log."""

    caps = Caps()

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[int]] = {}
        self.duration_s: float | None = None

    def execute(self, batch: StepBatch) -> StepResult:
        tokens = [self._next(request) for request in batch.sampled_requests()]
        return StepResult(tokens, duration_s=self.duration_s)

    def _next(self, request: Request) -> int:
        answer, n_output = self.answers[request.id], request.n_output
        return answer[n_output] if n_output < len(answer) else _FILLER_TOKEN


class _Replay:
    def __init__(self, log: EngineLog, setup: Setup, make_policy: MakePolicy) -> None:
        self._log, self._make_policy = log, make_policy
        self._clock, self._executor = _RecordedClock(), _RecordedExecutor()
        self._events: list[StepEvent] = []
        self._steps: list[StepRecord] = []
        self._accounts: list[Account] = []
        replayed = StepLog("full", on_step=self._steps.append, on_event=self._add_event)
        self._state = setup.build(self._clock, replayed, make_policy)
        self._answers = _answers(log.events)
        self._inputs = deque(event for event in log.events if _is_input(event))
        self._n_same_steps = self._n_same_events = self._n_decisions = 0

    def run(self) -> Replay:
        difference = next((result for result in self._play() if result is not None), None)
        kinds = Counter(event.kind for event in self._log.events)
        n_open = kinds["arrival"] - kinds["finish"] - kinds["cancel"]
        accounts = tuple(self._accounts)
        return Replay(self._n_same_steps, self._n_decisions, n_open, difference, accounts)

    def _add_event(self, event: StepEvent) -> None:
        self._events.append(event)
        if event.kind in ("finish", "cancel"):
            account = self._state.explain(event.request_id)
            assert account is not None, f"{event.request_id} left no account"
            self._accounts.append(account)

    def _play(self) -> Iterator[ReplayDifference | None]:
        """Repeat the log, with a comparison after each input and each step."""
        for record in self._log.steps:
            while self._inputs and self._inputs[0].step <= record.step:
                yield self._repeat(self._inputs.popleft())
            yield self._step(record)
        while self._inputs:
            yield self._repeat(self._inputs.popleft())
        if len(self._events) < len(self._log.events):
            event = self._log.events[len(self._events)]
            yield ReplayDifference(_name(event), "it", "there", "not there")

    def _repeat(self, event: StepEvent) -> ReplayDifference | None:
        self._clock.set(event.t_s)
        state, detail = self._state, JsonObject(event.detail)
        by = (event.actor, str(detail.get("reason", "")))
        match event.kind:
            case "start":
                state.log.add_event(Setup.of(state).event(event.t_s))
            case "arrival" | "reject":
                self._arrive(event)
            case "finish" | "cancel":
                state.end(event.request_id, State[detail["state"]])
            case "switch_policy":
                interventions.switch_policy(state, self._make_policy(detail["after"]), *by)
            case "pause_tenant":
                interventions.pause(state, event.tenant, *by)
            case "resume_tenant":
                interventions.resume(state, event.tenant, *by)
            case "reprioritise":
                interventions.reprioritise(state, event.request_id, int(detail["after"]), *by)
            case "cancel_request":
                interventions.note_cancel(state, event.request_id, *by)
            case "reset_prefix_cache":
                interventions.reset_prefix_cache(state, *by)
        return self._compare_events()

    def _arrive(self, event: StepEvent) -> None:
        request = _request(event)
        if event.kind == "arrival":
            answers = self._answers[request.id]
            self._executor.answers[request.id] = answers.popleft() if answers else ()
        with suppress(AdmissionError):  # its `reject` event is compared
            self._state.admit(request)

    def _step(self, record: StepRecord) -> ReplayDifference | None:
        where = f"step {record.step}"
        if not self._state.has_work:
            return ReplayDifference(where, "work", "some", "none")
        # The instants at which the core reads its clock in a step; see `EngineState`.
        instants_s = (record.began_s, record.end_s)
        is_planned = self._state.ahead is not None
        self._clock.set(*instants_s if is_planned else (record.t_s, *instants_s))
        self._executor.duration_s = record.duration_s
        step(self._state, self._executor)
        difference = _first_difference(where, record, self._steps[-1], _NOT_DECIDED)
        if difference is not None:
            return difference
        self._n_same_steps += 1
        self._n_decisions += len(record.items)
        return self._compare_events()

    def _compare_events(self) -> ReplayDifference | None:
        for n in range(self._n_same_events, len(self._events)):
            became = self._events[n]
            if n >= len(self._log.events):
                return ReplayDifference(_name(became), "it", "not there", "there")
            was = self._log.events[n]
            # As JSON returns it, which is how a log on disk holds it.
            became = became._replace(detail=json.loads(json.dumps(became.detail)))
            difference = _first_difference(_name(was), was, became)
            if difference is not None:
                return difference
            self._n_same_events += 1
            self._n_decisions += not _is_input(was)
        return None


def _is_input(event: StepEvent) -> bool:
    """Whether the event came from outside the engine."""
    if event.kind in ("finish", "cancel"):
        return event.detail.get("ended_by") == "call"
    return event.kind not in _CONSEQUENCES


def _answers(events: Sequence[StepEvent]) -> defaultdict[str, deque[list[int]]]:
    """The answers by request id, in the order in which requests of that id arrived: an id may be
    used again after its end."""
    answers: defaultdict[str, deque[list[int]]] = defaultdict(deque)
    for event in events:
        if event.kind in ("finish", "cancel"):
            detail: Mapping[str, Any] = event.detail
            answers[event.request_id].append(list(detail.get("output", ())))
    return answers


def _request(event: StepEvent) -> Request:
    detail = JsonObject(event.detail)
    names = (*ARRIVAL_FIELDS, "oracle_output_tokens")
    parameters = {name: detail[name] for name in names}
    stop_ids, tokens = frozenset(detail["stop_ids"]), list(detail["tokens"])
    return Request(event.request_id, tokens, stop_ids=stop_ids, tenant=event.tenant, **parameters)


def _first_difference(
    where: str, was: Any, became: Any, ignored: Sequence[str] = ()
) -> ReplayDifference | None:
    """The first field in which two records differ, and of a field that is a mapping or a sequence
    the first key or entry."""
    for field in was._fields:
        before, after = getattr(was, field), getattr(became, field)
        if field not in ignored and before != after:
            return ReplayDifference(where, *_narrowed(field, before, after))
    return None


def _narrowed(field: str, was: Any, became: Any) -> tuple[str, object, object]:
    if isinstance(was, Mapping) and isinstance(became, Mapping):
        for key in [*was, *became]:
            if was.get(key) != became.get(key):
                return f"{field}.{key}", was.get(key), became.get(key)
    if isinstance(was, list | tuple) and isinstance(became, list | tuple):
        for i, (before, after) in enumerate(zip_longest(was, became)):
            if before != after:
                return f"{field}[{i}]", before, after
    return field, was, became


def _name(event: StepEvent) -> str:
    subject = event.request_id or event.tenant
    return f"{event.kind}{subject and f' of {subject}'} before step {event.step}"
