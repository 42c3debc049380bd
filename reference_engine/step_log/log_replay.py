"""A log of steps and events, replayed: does the same engine, asked the same at the same instants,
decide the same?

What came from outside is repeated (arrivals, cancels, stop strings, what an operator did), each
before the step it preceded, and so are the instants, the durations and the tokens of the steps.
Everything else is decided anew by the same core and the same policies, and compared with the log:
who got how many tokens in each step, who waited for what, who was preempted, let in before others,
finished. A policy that looks at a clock, at chance or at the order of a set decides differently.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reference_engine.accounting.explain import Account
from reference_engine.core import interventions
from reference_engine.core.core import step
from reference_engine.core.setup import MakePolicy, NotReplayable, Setup, build_policy
from reference_engine.executors.base import Caps
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request, State
from reference_engine.state.steps import StepEvent, StepLog, StepRecord

_NOT_DECIDED = ("plan_s",)  # how long planning took is the machine's doing
_UNKNOWN_TOKEN = 0  # of an answer whose end is not in the log


@dataclass(frozen=True, slots=True)
class EngineLog:
    """All steps and events of an engine, both in the order in which they happened, on the clock of
    the engine. Needs level "full" and a `start` to be replayed."""

    steps: Sequence[StepRecord]
    events: Sequence[StepEvent]

    @property
    def setup(self) -> Setup:
        """What the engine was. Raises NotReplayable where the log does not say."""
        start = next((event for event in self.events if event.kind == "start"), None)
        if start is None:
            raise NotReplayable(
                "the engine's log does not say what engine it was (it was written before replays "
                "were known); measure again with this version"
            )
        return Setup.read(start.detail)


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first thing that was decided otherwise: `where` names the step or the event, `what` its
    field, `was` is the log's value and `became` the replay's."""

    where: str
    what: str
    was: object
    became: object

    def __str__(self) -> str:
        return f"{self.where}: {self.what} was {self.was!r}, replayed {self.became!r}"


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay: steps and decisions (requests scheduled in steps, and events that
    followed from them) that were the same, and the first that was not. `n_open` requests had no
    end in the log; `accounts` are of those that had, in the order of their ends."""

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


def replay(log: EngineLog, make_policy: MakePolicy = build_policy) -> Replay:
    """Replay a log. `make_policy` builds modes from their description; a changed one shows what it
    would have decided first of all differently. Raises NotReplayable, or UnknownKind for a mode
    that is not loaded."""
    setup = log.setup
    if any(event.kind == "arrival" and "tokens" not in event.detail for event in log.events):
        raise NotReplayable(
            "the engine's log was written with log_level=sizes, which says nothing of who was "
            "scheduled; a replay needs log_level=full"
        )
    if log.steps and log.steps[0].step:
        raise NotReplayable(
            f"the engine's log begins at step {log.steps[0].step}: it served other runs before, "
            "and what it remembered of them is not in it; replay the first of them"
        )
    return _Replay(log, setup, make_policy).run()


class _Instants:
    """A clock that shows the instants of a log: each once, the last one until there are others."""

    def __init__(self) -> None:
        self._instants: deque[float] = deque((0.0,))

    def show(self, *instants_s: float) -> None:
        self._instants = deque(instants_s)

    def now_s(self) -> float:
        return self._instants[0] if len(self._instants) == 1 else self._instants.popleft()


class _RecordedExecutor:
    """An executor that answers what was answered, and took as long as it took."""

    caps = Caps()

    def __init__(self, answers: Mapping[str, Sequence[int]]) -> None:
        self.answers = dict(answers)
        self.duration_s: float | None = None

    def execute(self, batch: StepBatch) -> StepResult:
        tokens = [self._next(row.request) for row in batch.all_rows() if row.samples]
        return StepResult(tokens, duration_s=self.duration_s)

    def _next(self, request: Request) -> int:
        answer, n_output = self.answers[request.id], request.n_output
        return answer[n_output] if n_output < len(answer) else _UNKNOWN_TOKEN


class _Replay:
    def __init__(self, log: EngineLog, setup: Setup, make_policy: MakePolicy) -> None:
        self._log, self._make_policy = log, make_policy
        self._clock, self._executor = _Instants(), _RecordedExecutor({})
        self._events: list[StepEvent] = []
        self._steps: list[StepRecord] = []
        self._accounts: list[Account] = []
        kept = StepLog("full", on_step=self._steps.append, on_event=self._note)
        self._state = setup.build(self._clock, kept, make_policy)
        self._answers = _answers(log.events)
        self._inputs = deque(event for event in log.events if _is_input(event))
        self._n_same_steps = self._n_same_events = self._n_decisions = 0

    def run(self) -> Replay:
        difference = next((found for found in self._play() if found is not None), None)
        kinds = Counter(event.kind for event in self._log.events)
        n_open = kinds["arrival"] - kinds["finish"] - kinds["cancel"]
        accounts = tuple(self._accounts)
        return Replay(self._n_same_steps, self._n_decisions, n_open, difference, accounts)

    def _note(self, event: StepEvent) -> None:
        self._events.append(event)
        if event.kind in ("finish", "cancel"):
            account = self._state.explain(event.request_id)
            assert account is not None, f"{event.request_id} left no account"
            self._accounts.append(account)

    def _play(self) -> Iterator[ReplayDifference | None]:
        """One look after each thing that happened."""
        for record in self._log.steps:
            while self._inputs and self._inputs[0].step <= record.step:
                yield self._repeat(self._inputs.popleft())
            yield self._step(record)
        while self._inputs:
            yield self._repeat(self._inputs.popleft())
        if len(self._events) < len(self._log.events):
            yield _missing(self._log.events[len(self._events)])

    def _repeat(self, event: StepEvent) -> ReplayDifference | None:
        self._clock.show(event.t_s)
        _REPEAT[event.kind](self, event)
        return self._compare_events()

    def _step(self, record: StepRecord) -> ReplayDifference | None:
        state, where = self._state, f"step {record.step}"
        if not state.has_work:
            return ReplayDifference(where, "work", "some", "none")
        # The instants at which the core reads its clock in a step; see `EngineState`.
        instants_s = (record.began_s, record.end_s)
        self._clock.show(*instants_s if state.ahead is not None else (record.t_s, *instants_s))
        self._executor.duration_s = record.duration_s
        step(state, self._executor)
        became = self._steps[-1]
        for field in StepRecord._fields:
            was, is_now = getattr(record, field), getattr(became, field)
            if field not in _NOT_DECIDED and was != is_now:
                return ReplayDifference(where, *_narrowed(field, was, is_now))
        self._n_same_steps += 1
        self._n_decisions += len(record.items)
        return self._compare_events()

    def _compare_events(self) -> ReplayDifference | None:
        recorded = self._log.events
        for n in range(self._n_same_events, len(self._events)):
            became = self._events[n]
            if n >= len(recorded):
                return ReplayDifference(_name(became), "it", "not there", "there")
            was = recorded[n]
            for field in StepEvent._fields:
                before, after = (_plain(getattr(event, field)) for event in (was, became))
                if before != after:
                    return ReplayDifference(_name(was), *_narrowed(field, before, after))
            self._n_same_events += 1
            self._n_decisions += not _is_input(was)
        return None

    # --- what came from outside

    def _start(self, event: StepEvent) -> None:
        self._state.log.add_event(Setup.of(self._state).event(self._clock.now_s()))

    def _arrive(self, event: StepEvent) -> None:
        request = _request(event)
        if event.kind == "arrival":
            waiting = self._answers[request.id]
            self._executor.answers[request.id] = waiting.popleft() if waiting else ()
        with suppress(AdmissionError):  # a refusal is an event, too, and compared
            self._state.admit(request)

    def _end(self, event: StepEvent) -> None:
        self._state.end(event.request_id, State[str(event.detail["state"])])

    def _switch(self, event: StepEvent) -> None:
        policy = self._make_policy(_mapping(event.detail["after"]))
        interventions.switch_policy(self._state, policy, event.actor, str(event.detail["reason"]))

    def _pause(self, event: StepEvent) -> None:
        interventions.pause(self._state, event.tenant, event.actor, str(event.detail["reason"]))

    def _resume(self, event: StepEvent) -> None:
        interventions.resume(self._state, event.tenant, event.actor, str(event.detail["reason"]))

    def _reprioritise(self, event: StepEvent) -> None:
        priority = event.detail["after"]
        assert isinstance(priority, int), f"a priority is a number, got {priority!r}"
        reason = str(event.detail["reason"])
        interventions.reprioritise(self._state, event.request_id, priority, event.actor, reason)

    def _forget(self, event: StepEvent) -> None:
        interventions.reset_prefix_cache(self._state, event.actor, str(event.detail["reason"]))


_REPEAT = {
    "start": _Replay._start,
    "arrival": _Replay._arrive,
    "reject": _Replay._arrive,
    "cancel": _Replay._end,
    "finish": _Replay._end,
    "switch_policy": _Replay._switch,
    "pause_tenant": _Replay._pause,
    "resume_tenant": _Replay._resume,
    "reprioritise": _Replay._reprioritise,
    "reset_prefix_cache": _Replay._forget,
}


def _is_input(event: StepEvent) -> bool:
    """Whether it came from outside, and did not follow from what the engine did."""
    if event.kind in ("finish", "cancel"):
        return event.detail.get("ended_by") == "call"
    return event.kind in _REPEAT


def _answers(events: Sequence[StepEvent]) -> defaultdict[str, deque[list[int]]]:
    """The answers of each id, in the order in which requests of that id arrived: an id may be used
    again after its end."""
    answers: defaultdict[str, deque[list[int]]] = defaultdict(deque)
    for event in events:
        if event.kind in ("finish", "cancel"):
            output = event.detail.get("output", ())
            assert isinstance(output, Sequence), f"an answer is a list of ids, got {output!r}"
            answers[event.request_id].append(list(output))
    return answers


def _request(event: StepEvent) -> Request:
    asked: Mapping[str, Any] = event.detail
    return Request(
        id=event.request_id,
        tokens=list(asked["tokens"]),
        max_tokens=asked["max_tokens"],
        arrived_s=asked["arrived_s"],
        min_tokens=asked["min_tokens"],
        stop_ids=frozenset(asked["stop_ids"]),
        tenant=event.tenant,
        priority=asked["priority"],
        ttft_slo_s=asked["ttft_slo_s"],
        tpot_slo_s=asked["tpot_slo_s"],
        deadline_s=asked["deadline_s"],
        oracle_output_tokens=asked["oracle_output_tokens"],
    )


def _mapping(value: object) -> Mapping[str, Any]:
    assert isinstance(value, Mapping), f"a mode is described by a mapping, got {value!r}"
    return value


def _plain(value: object) -> Any:
    """As JSON would give it back: what a log on disk holds."""
    return json.loads(json.dumps(value))


def _narrowed(field: str, was: Any, became: Any) -> tuple[str, object, object]:
    """The first key or entry in which two values of a field differ."""
    if isinstance(was, Mapping) and isinstance(became, Mapping):
        for key in [*was, *became]:
            if was.get(key) != became.get(key):
                return f"{field}.{key}", was.get(key), became.get(key)
    if isinstance(was, list | tuple) and isinstance(became, list | tuple):
        for i in range(max(len(was), len(became))):
            one, other = (entry[i] if i < len(entry) else None for entry in (was, became))
            if one != other:
                return f"{field}[{i}]", one, other
    return field, was, became


def _name(event: StepEvent) -> str:
    whom = f" of {event.request_id or event.tenant}" if event.request_id or event.tenant else ""
    return f"{event.kind}{whom} before step {event.step}"


def _missing(event: StepEvent) -> ReplayDifference:
    return ReplayDifference(_name(event), "it", "there", "not there")
