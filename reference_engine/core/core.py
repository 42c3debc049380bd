"""The engine: one `step` for every batching mode and every executor.

`EngineState` is what a step changes. A policy proposes a plan, the state carries it out: it gives
and takes blocks, preempts when there are none left, and turns sampled tokens into events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from loadgen.clock import Clock
from reference_engine.accounting.accounting import Accounting
from reference_engine.accounting.explain import Account
from reference_engine.accounting.totals import EngineTotals
from reference_engine.core.commit import UNKNOWN, Due, PlannedStep, PlanRecord, book, fill, seat
from reference_engine.core.interventions import PausedTenants
from reference_engine.core.placement import Placement
from reference_engine.executors.base import Executor, Launching
from reference_engine.policies.base import Policy
from reference_engine.policies.fallback import first_come
from reference_engine.state.batch import StepBatch, StepResult, StepTokens
from reference_engine.state.cost_model import CostModel
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import (
    AdmissionError,
    Cause,
    How,
    Limits,
    Plan,
    PlanError,
    View,
    Why,
    check_admission,
    check_plan,
)
from reference_engine.state.predictor import Predictor
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request, StartForecast, State
from reference_engine.state.steps import StepEvent, StepLog, event_detail
from reference_engine.state.swap import HostPool


def step(
    state: EngineState, executor: Executor, meanwhile: Callable[[], None] | None = None
) -> StepTokens:
    """One step: every running request may get closer to its next token. Empty when the policy
    waits on purpose (`state.wait_until_s`).

    With `async_depth` 1 the next step is planned, as of the instant at which this one began,
    before it is known whether this one's tokens end their requests. A row planned for a request
    that turns out to be over is computed as padding: one wasted token per answer that stops.
    `meanwhile`, which may not touch the state, is called while the step runs, if it does so by
    itself.
    """
    return state.carry_out(state.next_step(), executor, meanwhile)


class EngineState:
    """Everything one engine knows. Not thread-safe: one thread steps, admits and ends.

    What is decided follows from the `setup`, from what it is asked and told, and from the instants
    at which that was: one reading of the clock per call and two per step, all of them in the log.
    So a log can be replayed (`replay`), and nothing below may read a clock of its own.

    `cost`, `predictor`, `log` and `host` have neutral defaults: steps that cost nothing, answers
    as long as `max_tokens`, a log that is only a ring, no memory to swap to. `preempt` decides
    where a plan leaves it open. A plan that cannot be carried out raises if `is_strict`; otherwise
    it is counted, logged and replaced by one that is first come first served.
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
        host: HostPool | None = None,
        preempt: How = How.auto,
        async_depth: int = 0,
        is_strict: bool = True,
    ) -> None:
        assert async_depth in (0, 1), f"async_depth is 0 or 1, got {async_depth}"
        self.limits, self.kv, self._clock = limits, kv, clock
        self.host, self.preempt = host or HostPool(0), preempt
        self.async_depth, self.is_strict = async_depth, is_strict
        self.policy = policy.fresh()
        self.queues = Queues()
        self.counters = EngineTotals()
        self.log = log or StepLog()
        self.wait_until_s: float | None = None
        self._view = View(
            clock.now_s(), self.queues, kv, limits, cost, predictor, assign=self._assign
        )
        self.accounting = Accounting(self.queues, limits, self._view.cost)
        self._n_planned = 0
        self._outset = PlanRecord(clock.now_s(), 0.0, 0, 0, 0, 0, self.policy.kind, ())
        self._ahead: PlannedStep | None = None
        self._last_batch, self._last_end_s = StepBatch(), clock.now_s()
        self.paused_tenants = PausedTenants(self.queues, self.accounting)

    @property
    def has_work(self) -> bool:
        return bool(self.queues.waiting or self.queues.running)

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

    def requests(self) -> Iterator[Request]:
        yield from self.queues

    # --- requests come and go

    def admit(self, request: Request) -> None:
        """Put a request into the queue. Raises AdmissionError, with the request `rejected`, when
        it could never run or the policy refuses it now."""
        assert self.queues.find(request.id) is None, f"{request.id} is already here"
        view = self.view()
        try:
            check_admission(request.n_prompt, request.max_tokens, self.limits, self.kv)
            self.policy.check_arrival(request, view)
        except AdmissionError as error:
            request.state = State.rejected
            self._note("reject", request, view.now_s, code=error.code)
            raise
        self.accounting.arrive(request, view.now_s, self._at_work(request.arrived_s))
        self.queues.enter(request)
        self.counters.admitted += 1
        self._note("arrival", request, view.now_s)
        if self.paused_tenants.is_shut_to(request):
            self.paused_tenants.hold(request, view.now_s, is_known=False)
        else:
            self.policy.on_arrival(request, view)

    def end(self, request_id: str, finish: State) -> Request | None:
        """Take a request out in whatever state it is and free its memory; `None` when it is
        already over. For cancels (`finished_abort`) and stop strings (`finished_stop`)."""
        request = self.queues.find(request_id)
        if request is None:
            return None
        self.counters.cancelled += finish is State.finished_abort
        view = self.view()
        self._finish(request, finish, view.now_s, "call")
        self.policy.on_finish(request, view)
        return request

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is planned."""
        return self._ahead is not None

    # --- one step, in its parts

    def next_step(self) -> PlannedStep:
        """The step planned ahead, or a new one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead = ahead.without_ended()
            if ahead.batch.has_work:
                return ahead
        return self._planned(self.view())

    def carry_out(
        self,
        planned: PlannedStep,
        executor: Executor,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepTokens:
        """Compute a planned step and book what came of it. The clock is read when it begins, and
        once more when it is over."""
        began_s = self.view().now_s
        batch = planned.batch
        if self.async_depth and batch.has_work and isinstance(executor, Launching):
            # The next plan is made while this step runs; it needs to know that there will be
            # tokens, and not which.
            wait = executor.launch(batch)
            if meanwhile is not None:
                meanwhile()
            due = self.book(batch, StepResult([UNKNOWN] * batch.n_tokens))
            self.plan_ahead(due, began_s)
            result = wait()
            return self.settle(planned, result, fill(batch, result.tokens, due), began_s)
        result = executor.execute(batch) if batch.has_work else StepResult()
        due = self.book(batch, result)
        if self.async_depth and batch.has_work:
            self.plan_ahead(due, began_s)
        return self.settle(planned, result, due, began_s)

    def plan_ahead(self, due: Due, now_s: float) -> None:
        """Plan the next step while it is not known yet which of the `due` ones are over."""
        for request, _ in due:
            seat(request, self.queues)
        if not (self.queues.waiting or self.queues.decoding or self.queues.prefilling):
            return
        self._view.now_s = now_s
        ahead = self._planned(self._view)
        self._ahead = ahead if ahead.batch.has_work else None

    def apply(self, plan: Plan) -> StepBatch:
        """Carry a checked plan out up to the computation: preempt, give blocks, admit, and charge
        the wait of whoever is left out."""
        now_s = self._view.now_s
        self.wait_until_s = plan.wait_until_s
        placed = Placement(
            plan, self.policy, self._view, self.queues, self.kv, self.host, self.preempt
        )
        for request, cost in self.accounting.start(placed.admitted, now_s):
            self.log_event("jump", cost, now_s, request_id=request.id, tenant=request.tenant)
        for request in placed.admitted:
            if request.scheduled_s is None:
                request.scheduled_s, request.n_cached = now_s, request.n_computed
                self.counters.cached_tokens += request.n_cached
        for request, by in placed.preempted:
            self._requeue(request, by, now_s)
        causes = (*plan.causes, *placed.left_out) if placed.left_out else plan.causes
        self.accounting.record_plan(plan, causes, now_s)
        self._outset = self._look(len(placed.preempted), now_s)
        return StepBatch(
            tuple(placed.rows.values()),
            placed.decodes,
            plan.padding,
            tuple(placed.copies),
            self._context(placed.decodes),
        )

    def commit(self, plan: Plan, batch: StepBatch, result: StepResult) -> StepTokens:
        """Book what was computed and end what is over."""
        planned = PlannedStep(plan, batch, self._outset)
        return self.settle(planned, result, self.book(batch, result), self._outset.t_s)

    def book(self, batch: StepBatch, result: StepResult) -> Due:
        """Append tokens and publish full blocks; returns the tokens that may be the last."""
        due, n_prompt = book(batch, result.tokens, self.queues, self.kv)
        self.counters.prompt_tokens += n_prompt
        return due

    def settle(
        self,
        planned: PlannedStep,
        result: StepResult,
        due: Due,
        began_s: float,
    ) -> StepTokens:
        """End the requests whose last token it was, and tell everybody."""
        view = self.view()
        now_s = view.now_s
        duration_s = now_s - began_s if result.duration_s is None else result.duration_s
        record = planned.record(self._n_planned, self.log.level, began_s, duration_s, now_s)
        self._n_planned += 1
        if planned.outset.n_waiting:
            self.accounting.prompt_rate.add(record.n_prefill_tokens, record.t_s, now_s)
        ends = self._judge(due, now_s)
        batch = self._last_batch = planned.batch
        self._last_end_s = now_s
        requests = [row.request for row in batch.rows if row.samples]
        requests += batch.decodes
        self.counters.output_tokens += len(result.tokens)
        self.counters.steps += batch.has_work
        self.counters.padding_tokens += record.padding_tokens
        self.log.add_step(record)
        self.policy.on_step_end(record, view)
        for request in ends:
            self.policy.on_finish(request, view)
        return StepTokens(requests, result.tokens, ends, result.logprobs)

    # --- questions

    def explain(self, request_id: str) -> Account | None:
        """The account of a live or recently finished request."""
        request = self.queues.find(request_id)
        if request is None:
            return self.accounting.accounts.get(request_id)
        return self.accounting.explain(request, self._clock.now_s())

    def forecast(self, n_prompt: int) -> StartForecast:
        """What a request of so many prompt tokens would be told if it arrived now."""
        return self.accounting.forecast(n_prompt, self._clock.now_s())

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """As `check`, in pieces of some 50 µs, so that whoever comes meanwhile need not wait for
        all of it; to be given up then."""
        requests = list(self.queues)
        self.queues.check()
        for request in requests:
            if request.id not in self.queues.running:
                assert not request.blocks, f"{request.id} waits and holds blocks"
                is_swapped = request.state is State.swapped
                assert bool(request.host_blocks) == is_swapped, f"{request.id}: {request.state}"
        n_running = len(self.queues.running)
        assert n_running <= self.limits.max_num_seqs, f"{n_running} run"
        yield from self.kv.checks(requests)
        yield from self.host.checks(requests)

    # --- the parts of the parts

    def _planned(self, view: View) -> PlannedStep:
        started_s = self._clock.now_s()
        plan = self._checked(view)
        batch = self.apply(plan)
        n_preempted = self._outset.n_preempted
        if plan.items and not batch.has_work and self.queues.running:
            # All it planned found no memory. The next plan may be the same: work on what runs.
            plan = first_come(view, admits=False)
            batch = self.apply(plan)
            n_preempted += self._outset.n_preempted
        plan_s = self._clock.now_s() - started_s
        self._outset = self._outset._replace(plan_s=plan_s, n_preempted=n_preempted)
        return PlannedStep(plan, batch, self._outset)

    def _checked(self, view: View) -> Plan:
        try:
            return check_plan(self.policy.plan(view), view)
        except PlanError as error:
            if self.is_strict:
                raise
            self.counters.rejected_plans += 1
            self.log_event("rejected_plan", {"error": str(error)}, view.now_s)
            return first_come(view)

    def _at_work(self, instant_s: float) -> Request | None:
        """Whose prompt most of the step was in which an instant fell; None for one after it, when
        the engine was idle."""
        return self._last_batch.main_prompt if instant_s < self._last_end_s else None

    def _look(self, n_preempted: int, now_s: float) -> PlanRecord:
        return PlanRecord(
            t_s=now_s,
            plan_s=0.0,
            n_running=len(self.queues.running),
            n_waiting=len(self.queues.waiting),
            kv_used_blocks=self.kv.n_blocks - self.kv.n_free,
            n_preempted=n_preempted,
            policy=self.policy.kind,
            causes=self.accounting.ledger.counts(),
        )

    def _context(self, decodes: Sequence[Request]) -> int:
        if len(decodes) == len(self.queues.decoding):
            return self.queues.context_tokens
        return sum(request.n_computed for request in decodes)

    def _requeue(self, request: Request, by: str, now_s: float) -> None:
        self.counters.preemptions += 1
        self.counters.swaps += request.state is State.swapped
        self.accounting.requeue(request, now_s, Cause(Why.preempted_by, by))
        if self.paused_tenants.is_shut_to(request):
            self.paused_tenants.hold(request, now_s)
        else:
            self.policy.on_requeue(request, self._view)

    def _judge(self, due: Due, now_s: float) -> dict[Request, State]:
        """Whether tokens, already appended, end their requests; returns those that did."""
        ends: dict[Request, State] = {}
        for request, token in due:
            if request.first_token_s is None:
                request.first_token_s = now_s
            finish = request.finish_after(token)
            if finish is not None:
                self._finish(request, finish, now_s, "step")
                ends[request] = finish
            elif not self.async_depth:
                seat(request, self.queues)
        return ends

    def _finish(self, request: Request, finish: State, now_s: float, ended_by: str) -> None:
        self.queues.remove(request)
        self.kv.free(request)
        self.host.drop(request)
        request.state, request.finished_s = finish, now_s
        self.counters.finished += 1
        self.paused_tenants.forget(request.id)
        self.accounting.end(request, now_s)
        if finish is not State.finished_abort:
            self._view.predictor.observe(request)
        kind = "cancel" if finish is State.finished_abort else "finish"
        self._note(kind, request, now_s, ended_by=ended_by)

    def _note(self, kind: str, request: Request, now_s: float, **more: object) -> None:
        detail = more | event_detail(kind, request, self.log.level)
        self.log_event(kind, detail, now_s, request_id=request.id, tenant=request.tenant)

    def log_event(self, kind: str, detail: Mapping[str, object], now_s: float, **who: str) -> None:
        self.log.add_event(StepEvent(now_s, self._n_planned, kind, detail=detail, **who))

    def _assign(self, request_id: str, segment: str) -> None:
        self.accounting.ledger.assign(request_id, segment, self._view.now_s)
