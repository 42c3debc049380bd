"""What a step does, looked up in a table of macro-states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.sharing import causes_of, share_out
from reference_engine.policies.sorted_queue import Key, SortedQueue
from reference_engine.policies.step_budget import StepBudget
from reference_engine.smdp.decision_table import FALLBACK, Lookup, load_table
from reference_engine.smdp.states import Action, MacroState, state_of
from reference_engine.state.plan import Cause, Plan, View, Why
from reference_engine.state.sequence import Request


class SmdpTable(Policy):
    """Each step begins with what the engine looks like (short prompts waiting, long ones, running
    requests, KV memory, the slack of the most urgent: `smdp.states`), and does what the table says
    for that: decode only, or beside all decodes read up to a budget of prompt tokens, short prompts
    first or first come first served, or wait for more.

    `table` is a shipped one (`hand_made`) or a file. The table for the present load is taken, load
    being the arrivals of about the last `load_window`. Where a table was made for another cost
    model or load, or never saw a state, prompts are read first come first served; `explain` and
    the step's `action` say so.

    To wait is to idle while nothing runs, `max_wait` after the oldest arrival at the longest.
    Whoever waited `starvation` is served first come first served, whatever the table says.

    Source: batching as a semi-Markov decision process (arXiv 2301.12865); macro-states of an LLM
    engine are an extension of ours.
    """

    kind: ClassVar[str] = "smdp_table"
    is_aged: ClassVar[bool] = True

    table: str = "hand_made"
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    ttft_slo: Annotated[Seconds, Field(gt=0)] = 1.0
    load_window: Annotated[Seconds, Field(gt=0)] = 30.0
    max_wait: Annotated[Seconds, Field(ge=0)] = 0.05
    starvation: Annotated[Seconds, Field(gt=0)] = 10.0

    _lookup: Lookup = PrivateAttr()
    _queue: QueueState = PrivateAttr()
    _admitted: list[Request] = PrivateAttr(default_factory=list)

    def model_post_init(self, context: object) -> None:
        file = load_table(self.table)
        self._lookup = Lookup(file, self.load_window)
        self._queue = QueueState(file.knobs.long_tokens, file.knobs.tight_share, self.ttft_slo)

    def on_arrival(self, request: Request, view: View) -> None:
        self._lookup.pace.arrive(view.now_s)
        self.on_requeue(request, view)

    def on_requeue(self, request: Request, view: View) -> None:
        if view.is_waiting(request.id):
            self._queue.put(request)

    def on_finish(self, request: Request, view: View) -> None:
        self._queue.drop(request.id)

    def plan(self, view: View) -> Plan:
        queue, now_s = self._queue, view.now_s
        for request in self._admitted:
            if not view.is_waiting(request.id):
                queue.drop(request.id)
        head = queue.head(view)
        action, note = self._lookup.decide(look(queue, head, view), view.cost, now_s)
        if not note and head is not None and head.arrived_s + self.starvation <= now_s:
            action, note = FALLBACK, "starvation"
        if action is Action.wait and head is not None and not view.running:
            until_s = head.arrived_s + self.max_wait
            if until_s > now_s and not view.is_source_closed:
                rest = Cause(Why.smdp_wait, until_s=until_s)
                return Plan(rest=rest, wait_until_s=until_s, action=action)
        if action in (Action.wait, Action.decode_only):
            if view.decoding:
                return Plan(decode_all=True, rest=Cause(Why.smdp_wait), action=action)
            action, note = FALLBACK, "nothing decodes"
        return self._read(action, note, view)

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        queue, lookup = self._queue, self._lookup
        state = look(queue, queue.head(view), view)
        table = lookup.table
        return {
            "table": lookup.file.name,
            "state": state.words(),
            "action": None if table is None else table.actions[state.number],
            "better_than_next_by": None if table is None else table.q_gap[state.number],
            "arrivals_per_s": lookup.pace.per_s(view.now_s),
            "fallbacks": dict(lookup.tallies),
        }

    def _read(self, action: Action, note: str, view: View) -> Plan:
        """All decodes and prompts, as the action says."""
        knobs = self._lookup.file.knobs
        budget = {
            Action.prefill_short: knobs.short_budget,
            Action.prefill_fcfs: knobs.fcfs_budget,
            Action.prefill_big: knobs.big_budget,
        }[action]
        # A step must hold one token for each running request.
        most_seqs = min(self.max_num_seqs, view.limits.max_step_tokens)
        tokens = len(view.decoding) + budget
        room = StepBudget(view, tokens=tokens, max_num_seqs=most_seqs, watermark=self.watermark)
        room.decode_all()
        queue, is_short_first = self._queue, action is Action.prefill_short
        reading = queue.reading(view, is_short_first)
        causes, rest = causes_of(share_out(room, reading, queue.waiting(view, is_short_first)))
        self._admitted = room.admitted
        return Plan(
            tuple(room.items),
            decode_all=True,
            causes=causes,
            rest=rest,
            action=f"{action}: {note}" if note else action,
        )


def look(queue: QueueState, head: Request | None, view: View) -> MacroState:
    """The macro-state of an engine; `head` is the first come of those that wait."""
    return state_of(
        queue.n_short,
        queue.n_long,
        head is not None and queue.is_long(head),
        len(view.running),
        view.kv.pressure,
        queue.slack(view),
    )


Ranked = tuple[Key, Request]

OK, TIGHT, LATE = range(3)


class QueueState:
    """Waiting requests in order of arrival, short and long ones (from `long_tokens` prompt tokens
    on) apart, and by the instant at which their first token is due. `tight_share` of its TTFT SLO
    left makes one tight."""

    def __init__(self, long_tokens: int, tight_share: float, ttft_slo_s: float) -> None:
        self._long_tokens, self._tight_share = long_tokens, tight_share
        self._ttft_slo_s = ttft_slo_s
        self._all, self._short, self._long, self._due = (
            SortedQueue(),
            SortedQueue(),
            SortedQueue(),
            SortedQueue(),
        )

    @property
    def n_short(self) -> int:
        return len(self._short)

    @property
    def n_long(self) -> int:
        return len(self._long)

    def put(self, request: Request) -> None:
        self.drop(request.id)
        key = (request.arrived_s,)
        self._all.put(request, key)
        (self._long if self.is_long(request) else self._short).put(request, key)
        if request.first_token_s is None:
            self._due.put(request, (request.arrived_s + self._slo_s(request),))

    def drop(self, request_id: str) -> None:
        for line in (self._all, self._short, self._long, self._due):
            line.drop(request_id)

    def is_long(self, request: Request) -> bool:
        return request.n_tokens >= self._long_tokens

    def head(self, view: View) -> Request | None:
        """The first come."""
        first = self._all.first(view)
        return None if first is None else first[1]

    def slack(self, view: View) -> int:
        """Of the request whose first token is due first, a position in `FEATURES["slack"]`."""
        first = self._due.first(view)
        if first is None:
            return OK
        (due_s,), request = first
        left_s = due_s - view.now_s
        if left_s < 0:
            return LATE
        return TIGHT if left_s < self._tight_share * self._slo_s(request) else OK

    def waiting(self, view: View, is_short_first: bool) -> Iterator[Ranked]:
        """Those that wait, with their ranks."""
        if not is_short_first:
            yield from self._all.walk(view)
            return
        for place, line in enumerate((self._short, self._long)):
            for key, request in line.walk(view):
                yield (float(place), *key), request

    def reading(self, view: View, is_short_first: bool) -> list[Ranked]:
        """The running ones that still read their prompt, ranked alike."""
        ranked: list[Ranked] = [
            (
                (float(self.is_long(request)), request.arrived_s)
                if is_short_first
                else (request.arrived_s,),
                request,
            )
            for request in view.prefilling
        ]
        return sorted(ranked, key=lambda entry: entry[0])

    def _slo_s(self, request: Request) -> float:
        return request.ttft_slo_s or self._ttft_slo_s
