"""Table-driven batching: the action of each step is looked up in a table of macro-states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.fields import Seconds
from loadgen.manifest.json_section import JsonObject
from reference_engine.policies.base import Policy
from reference_engine.policies.ranked import plan_by_rank
from reference_engine.policies.sorted_queue import Key, Ranked, SortedQueue, ranked_prefills
from reference_engine.policies.step_budget import StepBudget
from reference_engine.smdp.decision_table import FALLBACK, Knobs, Lookup, load_table
from reference_engine.smdp.states import FEATURES, Action, MacroState, state_of
from reference_engine.state.plan import Cause, Plan, View, Why
from reference_engine.state.sequence import Request

_OK, _TIGHT, _LATE = range(len(FEATURES["slack"]))


class SmdpTable(Policy):
    """Each step reads the macro-state of the engine (short prompts waiting, long prompts waiting,
    running requests, KV memory, slack of the most urgent request: `smdp.states`) and takes the
    action that the table names for it: decode only; decode and compute up to a budget of prompt
    tokens, short prompts first or first come first served; or wait for more requests.

    `table` is a shipped table (`hand_made`) or a file. A file may hold one table per range of load;
    the load is the arrival rate over about `load_window` (seconds). Where the table was made for
    another cost model or load, or never saw a state, prompts are computed first come first served;
    `explain` and the step's `action` name the reason.

    The action `wait` idles only while nothing runs, until the oldest request has waited `max_wait`
    (seconds). Once the oldest request has waited `starvation` (seconds), service is first come
    first served, whatever the table says. Requests without a TTFT SLO get `ttft_slo` (seconds).
    `max_num_seqs` and `watermark` are as in `chunked`.

    Source: batching as a semi-Markov decision process (arXiv 2301.12865). The macro-states of an
    LLM engine are an extension.
    """

    kind: ClassVar[str] = "smdp_table"
    is_aged: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

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
        self._queue = QueueState(file.knobs, self.ttft_slo)

    def on_arrival(self, request: Request, view: View) -> None:
        self._lookup.arrival_rate.arrive(view.now_s)
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
        action, note = self._lookup.decide(queue.macro_state(head, view), view.cost, now_s)
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
        return self._prefill(action, note, view)

    def explain(self, request_id: str, view: View) -> JsonObject:
        queue, lookup = self._queue, self._lookup
        state = queue.macro_state(queue.head(view), view)
        table = lookup.table
        return {
            "table": lookup.file.name,
            "state": state.words(),
            "action": None if table is None else table.actions[state.number],
            "better_than_next_by": None if table is None else table.q_gap[state.number],
            "arrivals_per_s": lookup.arrival_rate.per_s(view.now_s),
            "fallbacks": dict(lookup.fallbacks),
        }

    def _prefill(self, action: Action, note: str, view: View) -> Plan:
        """All decodes, and prompts in the order and up to the budget of the action."""
        knobs, queue = self._lookup.file.knobs, self._queue
        prompt_tokens = {
            Action.prefill_short: knobs.short_budget,
            Action.prefill_fcfs: knobs.fcfs_budget,
            Action.prefill_big: knobs.big_budget,
        }[action]
        # Each running request needs a token in a decode step.
        most_seqs = min(self.max_num_seqs, view.limits.max_step_tokens)
        tokens = len(view.decoding) + prompt_tokens
        budget = StepBudget(view, tokens=tokens, max_num_seqs=most_seqs, watermark=self.watermark)
        budget.decode_all()
        is_short_first = action is Action.prefill_short
        prefills = queue.prefills(view, is_short_first)
        waiting = queue.waiting(view, is_short_first)
        plan = plan_by_rank(budget, view, prefills, waiting)
        self._admitted = budget.admitted
        return plan._replace(action=f"{action}: {note}" if note else action)


class QueueState:
    """Waiting requests by arrival, all together and short and long prompts apart, and by the
    instant at which the first token is due.

    `knobs` define long prompts and tight slack; requests without a TTFT SLO get `ttft_slo_s`.
    """

    def __init__(self, knobs: Knobs, ttft_slo_s: float) -> None:
        self._knobs, self._ttft_slo_s = knobs, ttft_slo_s
        self._all, self._due = SortedQueue(), SortedQueue()
        self._short, self._long = SortedQueue(), SortedQueue()

    def put(self, request: Request) -> None:
        self.drop(request.id)
        key = (request.arrived_s,)
        self._all.put(request, key)
        (self._long if self._is_long(request) else self._short).put(request, key)
        if request.first_token_s is None:
            self._due.put(request, (request.arrived_s + self._slo_s(request),))

    def drop(self, request_id: str) -> None:
        for queue in (self._all, self._due, self._short, self._long):
            queue.drop(request_id)

    def head(self, view: View) -> Request | None:
        """The waiting request that arrived first."""
        first = self._all.first(view)
        return None if first is None else first[1]

    def macro_state(self, head: Request | None, view: View) -> MacroState:
        """The macro-state of the engine, given `head(view)`."""
        return state_of(
            len(self._short),
            len(self._long),
            head is not None and self._is_long(head),
            len(view.running),
            view.kv.pressure,
            self._slack(view),
        )

    def waiting(self, view: View, is_short_first: bool) -> Iterator[Ranked]:
        """The waiting requests with their ranks, lowest first."""
        if not is_short_first:
            yield from self._all.walk(view)
            return
        for place, queue in enumerate((self._short, self._long)):
            for key, request in queue.walk(view):
                yield (float(place), *key), request

    def prefills(self, view: View, is_short_first: bool) -> list[Ranked]:
        """The running requests in prefill, ranked like those that wait."""

        def rank(request: Request) -> Key:
            arrived_s = request.arrived_s
            return (float(self._is_long(request)), arrived_s) if is_short_first else (arrived_s,)

        return ranked_prefills(view, rank)

    def _is_long(self, request: Request) -> bool:
        return request.n_tokens >= self._knobs.long_tokens

    def _slack(self, view: View) -> int:
        """The slack of the request with the earliest due first token, as a position in
        `FEATURES["slack"]`."""
        first = self._due.first(view)
        if first is None:
            return _OK
        (due_s,), request = first
        left_s = due_s - view.now_s
        if left_s < 0:
            return _LATE
        return _TIGHT if left_s < self._knobs.tight_share * self._slo_s(request) else _OK

    def _slo_s(self, request: Request) -> float:
        return request.ttft_slo_s or self._ttft_slo_s
