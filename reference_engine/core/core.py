"""The engine: a `step` that is the same for every batching mode and every executor.

`EngineState` is the data that a step changes. A policy proposes a plan; the state carries it out:
it gives and takes blocks, preempts when none are left, and turns sampled tokens into events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from loadgen.system.clock import Clock
from reference_engine.accounting.accounting import Accounting
from reference_engine.accounting.explain import Account
from reference_engine.accounting.totals import EngineTotals
from reference_engine.core.commit import (
    Milestones,
    PlannedStep,
    StartedStep,
    append_tokens,
)
from reference_engine.core.held_answers import HeldAnswers
from reference_engine.core.interventions import PausedTenants
from reference_engine.core.pipelined import (
    Launched,
    commit_and_plan,
    next_planned,
    pipelined_step,
)
from reference_engine.core.placement import Placement
from reference_engine.executors.base import Executor
from reference_engine.policies.base import Policy, first_come
from reference_engine.state.batch import Copy, StepBatch, StepResult, StepTokens, copying_s
from reference_engine.state.cost_model import CostModel, StepCost, StepShape
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import (
    AdmissionError,
    Cause,
    How,
    Limits,
    NoProgress,
    Plan,
    PlanError,
    View,
    Why,
    check_admission,
    check_plan,
)
from reference_engine.state.predictor import MaxTokens, Predictor
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request, StartForecast, State
from reference_engine.state.steps import StepEvent, StepLog, event_detail
from reference_engine.state.swap import HostPool


def step(
    state: EngineState, executor: Executor, while_running: Callable[[], None] | None = None
) -> StepTokens:
    """Run a step and return its tokens; none when the policy waits on purpose
    (`state.wait_until_s`).

    With `async_depth` 1 the next step is planned before this step's tokens are there, see
    `pipelined`. An executor that is `Launching` then runs by itself, and `while_running` is called
    as soon as it does; it must not touch the state.
    """
    if state.async_depth:
        return pipelined_step(state, executor, while_running)
    plan = state.plan()  # by the policy, checked
    planned = state.place(plan)  # preempts, gives blocks, admits
    result = executor.execute(planned.batch) if planned.batch.has_work else StepResult()
    return state.commit(planned, result)


def start_step(state: EngineState, executor: Executor) -> StartedStep:
    """The first half of `step`, for an executor that returns a result before its time is over.
    `end_step` is due `result.duration_s` later, and nothing may touch the state until then."""
    if state.async_depth:
        planned, began_s = next_planned(state)
    else:
        planned = state.place(state.plan())
        began_s = planned.placed_s
    result = executor.execute(planned.batch) if planned.batch.has_work else StepResult()
    return StartedStep(planned, began_s, result)


def end_step(state: EngineState, started: StartedStep) -> StepTokens:
    """Commit a step that `start_step` began, and return its tokens."""
    planned, began_s, result = started
    if state.async_depth and planned.batch.has_work:
        return commit_and_plan(state, planned, result, began_s)
    return state.commit(planned, result)


class EngineState:
    """An engine's requests, memory and records. Not thread-safe: a single thread steps, admits and
    ends.

    All decisions follow from the `setup`, from the calls made here, and from the instants at which
    the clock was read: once per call, and in a step when planning begins (`t_s`), when computing
    begins (`began_s`) and when the tokens are there (`end_s`). All of these are logged, so that a
    log can be replayed (`log_replay`); nothing below this class may read a clock.

    The defaults of `cost`, `predictor`, `log` and `host` are neutral: steps cost nothing, answers
    are as long as `max_tokens`, only the latest records are kept, KV cannot be swapped. `preempt`
    decides where a plan leaves `How` open. A plan that cannot be carried out raises PlanError if
    `is_strict`; otherwise it is counted, logged and replaced by a first-come plan.
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
        self.queues, self.counters, self.log = Queues(), EngineTotals(), log or StepLog()
        self.wait_until_s: float | None = None
        self.lent: dict[
            str, list[int]
        ] = {}  # blocks of requests that leave or come, see `handover`
        # An engine with the same KV memory; while it has preempted requests, a yielding engine
        # admits none.
        self.sharing: EngineState | None = None
        self.is_yielding = False
        self._held = HeldAnswers()
        self.ahead: PlannedStep | None = None  # the next step, where it is planned already
        self.launched: Launched | None = None  # `ahead`, where it is launched already
        cost, predictor = cost or StepCost(), predictor or MaxTokens()
        self._view = View(clock.now_s(), self.queues, kv, limits, cost, predictor, self._assign)
        self.accounting = Accounting(self.queues, limits, cost)
        if self.host.keeps_prefixes and kv.prefix_cache and preempt is not How.recompute:
            kv.offload = self.host
            if preempt is How.auto:
                self.host.price_prefixes(self._recompute_s, kv.block_tokens)
        self.paused_tenants = PausedTenants(self.queues, self.accounting)
        self._n_steps = 0  # including those that only waited
        self._last_batch, self._last_end_s = StepBatch(), clock.now_s()

    @property
    def has_work(self) -> bool:
        return bool(self.queues.waiting or self.queues.running or self._held)

    @property
    def is_source_closed(self) -> bool:
        """Whether no request will arrive any more; only a simulator can set it."""
        return self._view.is_source_closed

    @is_source_closed.setter
    def is_source_closed(self, is_closed: bool) -> None:
        self._view.is_source_closed = is_closed

    def view(self, now_s: float | None = None) -> View:
        """The view, which always shows the present state, with its `now_s` set: by the clock
        unless given."""
        self._view.now_s = self._clock.now_s() if now_s is None else now_s
        return self._view

    # --- requests come and go

    def admit(self, request: Request) -> None:
        """Put a request into the queue. Raises AdmissionError, with the request `rejected`, when
        it could never run or the policy refuses it for now."""
        assert self.queues.find(request.id) is None, f"{request.id} is already here"
        view = self.view()
        try:
            check_admission(request.n_prompt, request.max_tokens, self.limits, self.kv)
            self.policy.check_arrival(request, view)
        except AdmissionError as error:
            request.state = State.rejected
            self._log_request("reject", request, view.now_s, code=error.code)
            raise
        self.accounting.arrive(request, view.now_s, self._running_prompt(request.arrived_s))
        self.queues.enter(request)
        self.counters.admitted += 1
        self._log_request("arrival", request, view.now_s)
        if request.tenant in self.paused_tenants.names:
            self.paused_tenants.hold(request, view.now_s, is_announced=False)
        else:
            self.policy.on_arrival(request, view)

    def end(self, request_id: str, finish: State) -> Request | None:
        """End a request in whatever state it is and free its memory; None when it is already over.
        For cancels (`finished_abort`) and stop strings (`finished_stop`)."""
        request = self.find(request_id)
        if request is None:
            return None
        self.counters.cancelled += finish is State.finished_abort
        view = self.view()
        if request in self._held.ends:
            request.state = finish
        else:
            self._leave(request, finish)
            self.policy.on_finish(request, view)
        if self._held:
            self._held.drop(request)
            request.first_token_s = None  # none was delivered
        self._conclude(request, view.now_s, "call")
        return request

    # --- the parts of a step

    def plan(self, now_s: float | None = None) -> Plan:
        """The policy's plan as of `now_s` (the clock's, unless given), checked."""
        if self.queues.lockstep is not None and not self.policy.counts_decodes:
            self.queues.end_lockstep()
        view = self.view(now_s)
        try:
            return check_plan(self.policy.plan(view), view)
        except PlanError as error:
            # until a copy, or the other engine, frees memory
            if isinstance(error, NoProgress) and (self.lent or self.sharing is not None):
                return Plan(rest=Cause(Why.no_kv_blocks), wait_until_s=inf)
            if self.is_strict:
                raise
            self.counters.rejected_plans += 1
            self.log_event("rejected_plan", {"error": str(error)}, view.now_s)
            return first_come(view)

    def place(self, plan: Plan, planned_since_s: float | None = None) -> PlannedStep:
        """Preempt, give blocks and admit as a checked plan states, and charge the waits of the
        requests it leaves out. `planned_since_s` is when planning began, if not at the view's
        `now_s`."""
        t_s = self._view.now_s
        batch, n_preempted = self._place(plan)
        if plan.items and not batch.has_work and self.queues.running:
            # No item found memory. The policy may plan the same again for ever, so the
            # running requests go on without it.
            plan = first_come(self._view, admits=False)
            batch, n_more = self._place(plan)
            n_preempted += n_more
        causes = self.accounting.ledger.counts()
        placed_s = self._clock.now_s()
        return PlannedStep(
            plan,
            batch,
            t_s=t_s,
            plan_s=placed_s - (t_s if planned_since_s is None else planned_since_s),
            placed_s=placed_s,
            n_running=self.queues.n_running,
            n_waiting=len(self.queues.waiting),
            kv_used_blocks=self.kv.n_blocks - self.kv.n_free,
            n_preempted=n_preempted,
            policy=self.policy.kind,
            causes=causes,
        )

    def commit(self, planned: PlannedStep, result: StepResult) -> StepTokens:
        """Append the tokens of a step that began as soon as it was placed, and finish it."""
        milestones = self.append_tokens(planned.batch, result.tokens)
        return self.finish_step(planned, result, milestones, planned.placed_s)

    def append_tokens(self, batch: StepBatch, tokens: Sequence[int]) -> Milestones:
        queues = self.queues
        now_s = 0.0 if queues.lockstep is None else self._clock.now_s()
        milestones, n_prompt = append_tokens(batch, tokens, queues, self.kv, now_s)
        self.counters.prompt_tokens += n_prompt
        return milestones

    def finish_step(
        self, planned: PlannedStep, result: StepResult, milestones: Milestones, began_s: float
    ) -> StepTokens:
        """End the requests that got their last token, log the step and notify the policy."""
        view = self.view()
        now_s, batch = view.now_s, planned.batch
        duration_s = now_s - began_s if result.duration_s is None else result.duration_s
        record = planned.record(self._n_steps, self.log.level, began_s, now_s, duration_s)
        self._n_steps += 1
        if planned.n_waiting:
            self.accounting.prompt_rate.add(record.n_prefill_tokens, record.t_s, now_s)
        is_at_end = self.policy.is_answering_at_end
        is_held = is_at_end or bool(self._held)
        ends = self._end_at(milestones, now_s, is_held)
        self._last_batch, self._last_end_s = batch, now_s
        self.counters.output_tokens += len(result.tokens)
        self.counters.steps += batch.has_work
        self.counters.padding_tokens += record.padding_tokens
        self.log.add_step(record)
        self.policy.on_step_end(record, view)
        for request in ends:
            self.policy.on_finish(request, view)
        if self.queues.lockstep is None:
            requests = batch.sampled_requests()
        else:  # the others keep the times of their tokens, if anything does
            requests = [row.request for row in batch.rows if row.samples]
        events = StepTokens(requests, result.tokens, ends, result.logprobs)
        if not is_held:
            return events
        self._held.add(events)
        return StepTokens() if is_at_end and self.queues.running else self._deliver(now_s)

    def pass_steps(self, batch: StepBatch, end_s: float, n: int) -> int:
        """Count `n` steps of a stretch as over at `end_s`; returns the number of the first."""
        first, self._n_steps = self._n_steps, self._n_steps + n
        self._last_batch, self._last_end_s = batch, end_s
        return first

    # --- reading the state

    def find(self, request_id: str) -> Request | None:
        """A live request, or a finished request whose answer is still held."""
        return self.queues.find(request_id) or self._held.find(request_id)

    def explain(self, request_id: str) -> Account | None:
        """The account of a live or recently finished request."""
        request = self.find(request_id)
        if request is None:
            return self.accounting.accounts.get(request_id)
        if self.queues.lockstep is not None:
            self.queues.lockstep.settle(request)
        return self.accounting.explain(request, self._clock.now_s())

    def forecast(self, n_prompt: int) -> StartForecast:
        """The forecast that a request of `n_prompt` tokens would get if it arrived now."""
        return self.accounting.forecast(n_prompt, self._clock.now_s())

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """As `check`, in pieces of some 50 µs, so that an arrival does not wait for all of it. Give
        the iteration up as soon as the state changes."""
        requests = list(self.queues)
        self.queues.check()
        for request in requests:
            if request.id not in self.queues.running and request.id not in self.queues.in_flight:
                assert not request.blocks, f"{request.id} waits and holds blocks"
                is_swapped = request.state is State.swapped
                assert bool(request.host_blocks) == is_swapped, f"{request.id}: {request.state}"
        n_running = self.queues.n_running
        assert n_running <= self.limits.max_num_seqs, f"{n_running} run"
        lent = [*self.lent.values()]
        if self.sharing is not None:
            requests += self.sharing.queues
            lent += self.sharing.lent.values()
        yield from self.kv.checks(requests, lent)
        yield from self.host.checks(requests)

    # --- the parts of the parts

    def _place(self, plan: Plan) -> tuple[StepBatch, int]:
        now_s, queues = self._view.now_s, self.queues
        if queues.lockstep is not None and (plan.hold or _names_decodes(plan, queues)):
            queues.end_lockstep()
        self.wait_until_s = plan.wait_until_s
        is_full = self.is_yielding and self._is_owing()
        placement = Placement(
            plan, self.policy, self._view, queues, self.host, self.preempt, not is_full
        )
        if placement.copies:
            self._count(placement.copies)
        for request, cost in self.accounting.start(placement.admitted, now_s):
            self.log_event("jump", cost, now_s, request_id=request.id, tenant=request.tenant)
        for request in placement.admitted:
            if request.scheduled_s is None:
                request.scheduled_s, request.n_cached = now_s, request.n_computed
                self.counters.cached_tokens += request.n_cached
        for request, by in placement.preempted:
            self._requeue(request, by, now_s)
        named = ((request.id, Cause(Why.preempted_by, by)) for request, by in placement.preempted)
        causes = (*plan.causes, *placement.left_out, *named)
        self.accounting.record_plan(plan, causes, now_s)
        return placement.batch(plan.padding), len(placement.preempted)

    def _count(self, copies: Sequence[Copy]) -> None:
        n_out = sum(copy.is_out for copy in copies)
        self.counters.copied_out_blocks += n_out
        self.counters.copied_back_blocks += len(copies) - n_out
        self.counters.copying_s += copying_s(copies, self.host.copy_s, self.host.latency_s)

    def _recompute_s(self, n_before: int, n_tokens: int) -> float:
        """The time (s) of a step of `n_tokens` of a prompt after `n_before`."""
        shape = StepShape(1, n_tokens, n_tokens * (n_before + n_tokens / 2))
        return self._view.cost.estimate(shape)

    def _is_owing(self) -> bool:
        """Whether preempted requests wait in the engine with which this one shares memory."""
        sharing = self.sharing
        first = None if sharing is None else next(iter(sharing.queues.waiting.values()), None)
        return first is not None and first.n_preemptions > 0

    def _requeue(self, request: Request, by: str, now_s: float) -> None:
        self.counters.preemptions += 1
        self.counters.swaps += request.state is State.swapped
        self.accounting.requeue(request, now_s, Cause(Why.preempted_by, by))
        if request.tenant in self.paused_tenants.names:
            self.paused_tenants.hold(request, now_s)
        else:
            self.policy.on_requeue(request, self._view)

    def _running_prompt(self, instant_s: float) -> Request | None:
        """The request with more than half of the tokens of the step that ran at an instant, if it
        was a prompt; None if the engine was idle then."""
        return self._last_batch.main_prompt if instant_s < self._last_end_s else None

    def _end_at(self, milestones: Milestones, now_s: float, is_held: bool) -> dict[Request, State]:
        """Set the times of first tokens, and end the requests that got their last token; with
        `is_held` they only leave the batch."""
        ends: dict[Request, State] = {}
        for request, token in milestones:
            if request.first_token_s is None:
                request.first_token_s = now_s
            finish = request.finish_after(token)
            if finish is not None:
                self._leave(request, finish)
                if not is_held:
                    self._conclude(request, now_s, "step")
                ends[request] = finish
        return ends

    def _deliver(self, now_s: float) -> StepTokens:
        """The held tokens, delivered at `now_s`."""
        events, self._held = self._held.tokens(), HeldAnswers()
        for request in dict.fromkeys(events.requests):
            request.first_token_s = now_s
        for request in events.ends:
            self._conclude(request, now_s, "step")
        return events

    def _leave(self, request: Request, finish: State) -> None:
        """Take a request out of the queues and free its memory."""
        self.queues.remove(request)
        self.kv.free(request)
        self.host.drop(request)
        request.state = finish
        self.paused_tenants.forget(request.id)

    def _conclude(self, request: Request, now_s: float, ended_by: str) -> None:
        """Account for a request that has left and whose answer is delivered."""
        request.finished_s = now_s
        self.counters.finished += 1
        self.accounting.end(request, now_s)
        is_cancelled = request.state is State.finished_abort
        if not is_cancelled:
            self._view.predictor.observe(request)
        kind = "cancel" if is_cancelled else "finish"
        self._log_request(kind, request, now_s, ended_by=ended_by)

    def _log_request(self, kind: str, request: Request, now_s: float, **more: object) -> None:
        detail = more | event_detail(kind, request, self.log.level)
        self.log_event(kind, detail, now_s, request_id=request.id, tenant=request.tenant)

    def log_event(self, kind: str, detail: Mapping[str, object], now_s: float, **ids: str) -> None:
        self.log.add_event(StepEvent(now_s, self._n_steps, kind, detail=detail, **ids))

    def _assign(self, request_id: str, segment: str) -> None:
        self.accounting.ledger.assign(request_id, segment, self._view.now_s)


def _names_decodes(plan: Plan, queues: Queues) -> bool:
    """Whether a plan gives single decoding requests a row, apart from all others."""
    return any(item.request_id in queues.decoding for item in plan.items)
