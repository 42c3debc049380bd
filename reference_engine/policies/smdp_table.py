"""What a step does, looked up in a table of macro-states."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.queue_state import QueueState
from reference_engine.policies.sharing import causes_of, share_out
from reference_engine.policies.step_budget import StepBudget
from reference_engine.smdp.decision_table import load_table
from reference_engine.smdp.lookup import FALLBACK, Lookup
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
