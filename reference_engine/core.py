"""The engine: one `step` for every batching mode and every executor.

`EngineState` is what a step changes. A policy proposes a plan, the state carries it out: it gives
and takes blocks, preempts when there are none left, and turns sampled tokens into events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadgen.clock import Clock
from reference_engine.admission import AdmissionError, check_admission
from reference_engine.cost_model import CostModel
from reference_engine.executors.base import Executor, Row, StepBatch, StepResult
from reference_engine.explain import Account, Accounts, account
from reference_engine.kv import KvPool
from reference_engine.ledger import Ledger
from reference_engine.plan import Cause, Item, Limits, Plan, View, Why, check_plan
from reference_engine.policies.base import Policy
from reference_engine.predict.lengths import Predictor
from reference_engine.roster import Roster
from reference_engine.sequence import Request, State
from reference_engine.step_tokens import StepTokens
from reference_engine.steps import Event, StepLog, StepRecord


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    steps: int = 0
    admitted: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # computed, so recomputation counts again
    output_tokens: int = 0
    cached_tokens: int = 0
    padding_tokens: int = 0
    finished: int = 0
    cancelled: int = 0


def step(state: EngineState, executor: Executor) -> StepTokens:
    """One step: every running request may get closer to its next token. Empty when the policy
    waits on purpose (`state.wait_until_s`)."""
    view = state.view()
    plan = check_plan(state.policy.plan(view), view)
    batch = state.apply(plan)
    result = executor.execute(batch) if batch.has_work else StepResult()
    return state.commit(plan, batch, result)


class EngineState:
    """Everything one engine knows. Not thread-safe: one thread steps, admits and ends.

    `cost`, `predictor` and `log` have neutral defaults: steps that cost nothing, answers as long
    as `max_tokens`, a log that is only a ring.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KvPool,
        clock: Clock,
        policy: Policy,
        *,
        cost: CostModel | None = None,
        predictor: Predictor | None = None,
        log: StepLog | None = None,
    ) -> None:
        self.limits, self.kv, self._clock = limits, kv, clock
        self.policy = policy.fresh()
        self.roster = Roster()
        self.counters = Counters()
        self.accounts = Accounts()
        self.log = log or StepLog()
        self.wait_until_s: float | None = None
        self._ledger = Ledger()
        self._view = View(
            clock.now_s(), self.roster, kv, limits, cost, predictor, assign=self._assign
        )
        self._n_preempted = 0
        self._n_planned = 0
        self._planned_s = self._executing_s = clock.now_s()

    @property
    def has_work(self) -> bool:
        return bool(self.roster.waiting or self.roster.running)

    @property
    def is_source_closed(self) -> bool:
        """Whether nothing will arrive any more; only a simulator can set it."""
        return self._view.is_source_closed

    @is_source_closed.setter
    def is_source_closed(self, is_closed: bool) -> None:
        self._view.is_source_closed = is_closed

    def view(self) -> View:
        """The view, brought to now. There is one, and it always shows the present state."""
        self._view.now_s = self._clock.now_s()
        return self._view

    def admit(self, request: Request) -> None:
        """Put a request into the queue. Raises AdmissionError, with the request `rejected`."""
        assert self.roster.find(request.id) is None, f"{request.id} is already here"
        try:
            check_admission(request.n_prompt, request.max_tokens, self.limits, self.kv)
        except AdmissionError:
            request.state = State.rejected
            self._note("reject", request)
            raise
        self.roster.waiting[request.id] = request
        self._ledger.enter(request.id, request.arrived_s)
        self.counters.admitted += 1
        self._note("arrival", request)
        self.policy.on_arrival(request, self.view())

    def end(self, request_id: str, finish: State) -> Request | None:
        """Take a request out in whatever state it is and free its blocks; `None` when it is
        already over. For cancels (`finished_abort`) and stop strings (`finished_stop`)."""
        request = self.roster.find(request_id)
        if request is None:
            return None
        self.counters.cancelled += finish is State.finished_abort
        self._finish(request, finish, self._clock.now_s())
        self.policy.on_finish(request, self.view())
        return request

    def apply(self, plan: Plan) -> StepBatch:
        """Carry a checked plan out up to the computation: preempt, give blocks, admit, and charge
        the wait of whoever is left out. Running requests are served before admissions, and a
        step that had to preempt admits nobody."""
        now_s = self._planned_s = self._view.now_s
        self.wait_until_s = plan.wait_until_s
        self._n_preempted = 0
        for preemption in plan.preempt:
            self._preempt(self.roster.running[preemption.request_id], preemption.by, now_s)
        rows: dict[str, Row] = {}
        admissions = []
        for item in plan.items:
            if item.request_id not in self.roster.waiting:
                self._run(item, rows, now_s)
            else:
                admissions.append(item)
        decodes = self._decodes(plan, rows, now_s) if plan.decode_all else []
        causes = plan.causes
        if admissions:
            left_out = [
                (item.request_id, Cause(Why.no_kv_blocks))
                for item in admissions
                if self._n_preempted or not self._start(item, rows, now_s)
            ]
            causes = (*causes, *left_out)
        self._ledger.note(now_s, causes, plan.segments, plan.rest)
        self._executing_s = self._clock.now_s()
        return StepBatch(
            tuple(rows.values()),
            decodes,
            plan.padding,
            context_tokens=self._context(decodes),
        )

    def commit(self, plan: Plan, batch: StepBatch, result: StepResult) -> StepTokens:
        """Book what was computed: append tokens, publish full blocks, finish and free."""
        now_s = self._clock.now_s()
        record = self._record(plan, batch, result, now_s)
        requests = [row.request for row in batch.rows if row.samples]
        n_row_tokens = len(requests)
        requests += batch.decodes
        tokens = result.tokens
        assert len(tokens) == len(requests), f"{len(tokens)} tokens for {len(requests)} rows"
        ends = self._commit_rows(batch.rows, tokens, now_s)
        ends |= self._commit_decodes(
            batch.decodes, tokens[n_row_tokens:] if n_row_tokens else tokens, now_s
        )
        self.counters.output_tokens += len(tokens)
        self.counters.steps += batch.has_work
        self.counters.padding_tokens += record.padding_tokens
        self.log.add(record)
        view = self.view()
        self.policy.on_step_end(record, view)
        for request in ends:
            self.policy.on_finish(request, view)
        return StepTokens(requests, tokens, ends, result.logprobs)

    def explain(self, request_id: str) -> Account | None:
        """The account of a live or recently finished request."""
        request = self.roster.find(request_id)
        if request is None:
            return self.accounts.get(request_id)
        now_s = self._clock.now_s()
        return account(request, self._ledger.waits(request_id, now_s), now_s)

    def requests(self) -> Iterator[Request]:
        yield from self.roster

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        self.kv.check(self.requests())
        self.roster.check()
        for request in self.roster.waiting.values():
            assert not request.blocks, f"{request.id} waits and holds blocks"
        n_running = len(self.roster.running)
        assert n_running <= self.limits.max_num_seqs, f"{n_running} run"

    def _run(self, item: Item, rows: dict[str, Row], now_s: float) -> None:
        """Give a running request its tokens, at the expense of others if need be."""
        request = self.roster.running.get(item.request_id)
        if request is None:  # made room for an item before it
            return
        if self.kv.grow(request, item.n_tokens) or self._make_room(
            request, item.n_tokens, rows, now_s
        ):
            self.roster.widen(request)
            rows[request.id] = self._row(request, item.n_tokens)

    def _decodes(self, plan: Plan, rows: dict[str, Row], now_s: float) -> Sequence[Request]:
        """The requests that get their one token without being named."""
        roster = self.roster
        unnamed = {item.request_id for item in plan.items}.union(plan.hold)
        is_everybody = unnamed.isdisjoint(roster.decoding)
        if is_everybody and self.kv.extend(roster.cramped.values()):
            roster.widen_all()
        else:
            for request in list(roster.cramped.values()):
                # Growing one may preempt another that is still on this list.
                if request.id in unnamed or request.id not in roster.decoding:
                    continue
                if self.kv.grow(request, 1) or self._make_room(request, 1, rows, now_s):
                    roster.widen(request)
        if is_everybody:
            return list(roster.decoding.values())
        return [request for key, request in roster.decoding.items() if key not in unnamed]

    def _make_room(
        self, request: Request, n_tokens: int, rows: dict[str, Row], now_s: float
    ) -> bool:
        """Preempt until the request can grow; False when it had to go itself.

        The policy's victims go first. After them it is last in, first out: a request may only
        displace those admitted after it, itself at last. The first admitted can thus always
        finish, which is the progress guarantee.
        """
        for victim in self._victims(request, n_tokens):
            self._preempt(victim, request.id, now_s)
            rows.pop(victim.id, None)
            if victim is request:
                return False
            if self.kv.grow(request, n_tokens):
                return True
        raise AssertionError(f"{request.id} was not among the victims for its own blocks")

    def _victims(self, request: Request, n_tokens: int) -> Iterator[Request]:
        running = self.roster.running
        need_blocks = self.kv.missing(request, n_tokens) - self.kv.n_free
        for request_id in self.policy.victims(self._view, request, need_blocks):
            victim = running.get(request_id)
            if victim is not None and victim is not request and self._may_lose(victim):
                yield victim
        while True:
            yield running[next(reversed(running))]

    def _may_lose(self, victim: Request) -> bool:
        """Not the first admitted: something must always be able to finish."""
        return victim is not next(iter(self.roster.running.values()))

    def _start(self, item: Item, rows: dict[str, Row], now_s: float) -> bool:
        request = self.roster.waiting[item.request_id]
        if not self.kv.admit(request, item.n_tokens, min(item.reserve_tokens, request.n_most)):
            return False
        self.roster.start(request)
        request.state = State.running
        self._ledger.leave(request.id, now_s)
        if request.scheduled_s is None:
            request.scheduled_s, request.n_cached = now_s, request.n_computed
            self.counters.cached_tokens += request.n_cached
        rows[request.id] = self._row(request, item.n_tokens)
        return True

    def _row(self, request: Request, n_tokens: int) -> Row:
        start = request.n_computed
        return Row(request, start, n_tokens, n_tokens == len(request.tokens) - start)

    def _context(self, decodes: Sequence[Request]) -> int:
        if len(decodes) == len(self.roster.decoding):
            return self.roster.context_tokens
        return sum(request.n_computed for request in decodes)

    def _preempt(self, request: Request, by: str, now_s: float) -> None:
        """Back to the head of the queue without blocks; what it computed is computed again."""
        self.roster.requeue(request)
        self.kv.free(request)
        request.state = State.preempted
        request.n_preemptions += 1
        self._n_preempted += 1
        self.counters.preemptions += 1
        self._ledger.enter(request.id, now_s, Cause(Why.preempted_by, by))
        self.policy.on_requeue(request, self._view)

    def _commit_rows(
        self, rows: Sequence[Row], tokens: Sequence[int], now_s: float
    ) -> dict[Request, State]:
        """Returns the requests that ended."""
        ends: dict[Request, State] = {}
        sampled = iter(tokens)
        roster = self.roster
        for request, start, n_tokens, samples in rows:
            request.n_computed += n_tokens
            if start < request.n_prompt:
                self.counters.prompt_tokens += min(request.n_prompt - start, n_tokens)
            self.kv.publish(request)
            if request.id in roster.decoding:
                roster.context_tokens += n_tokens
            if samples:
                token = next(sampled)
                request.tokens.append(token)
                finish = self._judge(request, token, now_s)
                if finish is not None:
                    ends[request] = finish
                    continue
            if request.id in roster.decoding:
                roster.measure(request)
            elif len(request.tokens) - request.n_computed == 1:
                roster.decode(request)
        return ends

    def _commit_decodes(
        self, decodes: Sequence[Request], tokens: Sequence[int], now_s: float
    ) -> dict[Request, State]:
        """One more token each. Nearly all only append it, so that is all this loop does. Returns
        the requests that ended."""
        self.roster.context_tokens += len(decodes)
        due: list[tuple[Request, int]] = []
        for request, token in zip(decodes, tokens, strict=True):
            n = request.n_computed = request.n_computed + 1
            request.tokens.append(token)
            if n == request._n_milestone or token in request.stop_ids:
                due.append((request, token))
        ends: dict[Request, State] = {}
        cramped = self.roster.cramped
        for request, token in due:
            is_last = request.n_computed == request._n_last or token in request.stop_ids
            if not is_last and request.first_token_s is not None:
                cramped[request.id] = request  # only its room is used up
            elif (finish := self._pass_milestone(request, token, now_s)) is not None:
                ends[request] = finish
        return ends

    def _pass_milestone(self, request: Request, token: int, now_s: float) -> State | None:
        """A decode's token at the end of its room or of the answer, or that may be the end."""
        if request.n_computed <= request.n_prompt:
            self.counters.prompt_tokens += 1
        finish = self._judge(request, token, now_s)
        if finish is None:
            self.roster.measure(request)
        return finish

    def _judge(self, request: Request, token: int, now_s: float) -> State | None:
        """Whether a token, already appended, ends its request."""
        if request.first_token_s is None:
            request.first_token_s = now_s
        finish = request.verdict_on(token)
        if finish is not None:
            self._finish(request, finish, now_s)
        return finish

    def _finish(self, request: Request, finish: State, now_s: float) -> None:
        self.roster.remove(request)
        self.kv.free(request)
        request.state, request.finished_s = finish, now_s
        self.counters.finished += 1
        self._ledger.leave(request.id, now_s)
        self.accounts.add(account(request, self._ledger.pop(request.id), now_s))
        if finish is not State.finished_abort:
            self._view.predictor.observe(request)
        self._note("cancel" if finish is State.finished_abort else "finish", request)

    def _record(self, plan: Plan, batch: StepBatch, result: StepResult, now_s: float) -> StepRecord:
        items: tuple[tuple[str, int], ...] = ()
        if self.log.level == "full":
            items = tuple((row.request.id, row.n_tokens) for row in batch.all_rows())
        duration_s = result.duration_s
        record = StepRecord(
            step=self._n_planned,
            t_s=self._planned_s,
            duration_s=now_s - self._executing_s if duration_s is None else duration_s,
            plan_s=self._executing_s - self._planned_s,
            n_prefill_tokens=sum(row.n_tokens for row in batch.rows),
            n_decode=len(batch.decodes),
            context_tokens=batch.context_tokens,
            n_running=len(self.roster.running),
            n_waiting=len(self.roster.waiting),
            kv_used_blocks=self.kv.n_blocks - self.kv.n_free,
            padding_tokens=plan.padding.prefill_tokens + plan.padding.decode_rows,
            n_preempted=self._n_preempted,
            policy=self.policy.kind,
            action=plan.action,
            group=plan.group,
            items=items,
            causes=self._ledger.counts(),
        )
        self._n_planned += 1
        return record

    def _note(self, kind: str, request: Request) -> None:
        detail = {
            "n_prompt": request.n_prompt,
            "max_tokens": request.max_tokens,
            "n_output": request.n_output,
            "n_cached": request.n_cached,
            "state": request.state.name,
        }
        now_s = self._clock.now_s()
        self.log.note(Event(now_s, self._n_planned, kind, request.id, request.tenant, "", detail))

    def _assign(self, request_id: str, segment: str) -> None:
        self._ledger.assign(request_id, segment, self._view.now_s)
