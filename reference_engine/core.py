"""The engine: one `step` for every batching mode and every executor.

`EngineState` is what a step changes. A policy proposes a plan, the state carries it out: it gives
and takes blocks, preempts when there are none left, and turns sampled tokens into events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.clock import Clock
from loadgen.errors import SlobenchError
from reference_engine.executors.base import Executor, Row, StepBatch, StepResult
from reference_engine.explain import Account, Accounts, Ledger, account
from reference_engine.kv import KvPool
from reference_engine.plan import Cause, Limits, Plan, View, Why, check_plan
from reference_engine.policies.base import Policy
from reference_engine.sequence import Request, State


class TokenEvent(NamedTuple):
    """One new token of a request; `finish` is set on its last."""

    request: Request
    token: int
    finish: State | None


class AdmissionError(SlobenchError):
    """A request that could not run even alone; `code` is the OpenAI error code. A 400, never a
    wait."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    steps: int = 0
    admitted: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # computed, so recomputation counts again
    output_tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0
    cancelled: int = 0


def step(state: EngineState, policy: Policy, executor: Executor) -> list[TokenEvent]:
    """One step: every running request may get closer to its next token. Empty when the policy
    waits on purpose (`state.wait_until_s`)."""
    view = state.view()
    plan = check_plan(policy.plan(view), view)
    batch = state.apply(plan)
    result = executor.execute(batch) if batch.rows else StepResult(())
    events = state.commit(batch, result)
    policy.on_step_end(state.view())
    for event in events:
        if event.finish is not None:
            policy.on_finish(event.request, state.view())
    return events


def check_admission(n_prompt: int, max_tokens: int, limits: Limits, kv: KvPool) -> None:
    """Raises AdmissionError for a request that would not fit an empty engine. Reads only what
    never changes, so any thread may ask."""
    if n_prompt + max_tokens > limits.max_model_len:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate make {n_prompt + max_tokens}; "
            f"the context here is {limits.max_model_len} tokens: shorten the prompt or max_tokens",
            "context_length_exceeded",
        )
    n_blocks = kv.blocks_for(n_prompt + max_tokens - 1)
    if n_blocks > kv.n_blocks:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate need {n_blocks} KV blocks of "
            f"{kv.block_tokens} tokens; there are {kv.n_blocks}: start with more kv_blocks",
            "kv_capacity_exceeded",
        )


class EngineState:
    """Queue, running set, KV and books. `waiting` is first come first served with preempted
    requests at the head; `running` is in order of admission."""

    def __init__(self, limits: Limits, kv: KvPool, clock: Clock) -> None:
        self.limits, self.kv, self._clock = limits, kv, clock
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.counters = Counters()
        self.accounts = Accounts()
        self.wait_until_s: float | None = None
        self._ledger = Ledger()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def view(self) -> View:
        return View(
            self._clock.now_s(),
            self.waiting.values(),
            self.running.values(),
            self.kv,
            self.limits,
        )

    def admit(self, request: Request, policy: Policy) -> None:
        """Put a request into the queue. Raises AdmissionError, with the request `rejected`."""
        assert request.id not in self.waiting, f"{request.id} already waits"
        assert request.id not in self.running, f"{request.id} already runs"
        try:
            check_admission(request.n_prompt, request.max_tokens, self.limits, self.kv)
        except AdmissionError:
            request.state = State.rejected
            raise
        self.waiting[request.id] = request
        self._ledger.enter(request.id, request.arrived_s)
        self.counters.admitted += 1
        policy.on_arrival(request, self.view())

    def end(self, request_id: str, finish: State, policy: Policy) -> Request | None:
        """Take a request out in whatever state it is and free its blocks; `None` when it is
        already over. For cancels (`finished_abort`) and stop strings (`finished_stop`)."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        if request is None:
            return None
        self._finish(request, finish, self._clock.now_s())
        self.counters.cancelled += finish is State.finished_abort
        policy.on_finish(request, self.view())
        return request

    def apply(self, plan: Plan) -> StepBatch:
        """Carry a checked plan out up to the computation: preempt, give blocks, admit, and charge
        the wait of whoever is left out. Running requests are served before admissions, and a
        step that had to preempt admits nobody."""
        now_s = self._clock.now_s()
        self.wait_until_s = plan.wait_until_s
        for request_id in plan.preempt:
            self._preempt(self.running[request_id], "policy", now_s)
        was_running = frozenset(self.running)
        rows: dict[str, Row] = {}
        n_preempted = 0
        for request_id, n_tokens in plan.items:
            if request_id in self.running:
                n_preempted += self._run(request_id, n_tokens, rows, now_s)
        causes = dict(plan.causes)
        for item in plan.items:
            if item.request_id in was_running:
                continue
            if n_preempted or not self._start(item.request_id, item.n_tokens, rows, now_s):
                causes[item.request_id] = Cause(Why.no_kv_blocks)
        self._ledger.note(now_s, causes.items(), plan.rest)
        return StepBatch(tuple(rows.values()))

    def commit(self, batch: StepBatch, result: StepResult) -> list[TokenEvent]:
        """Book what was computed: append tokens, publish full blocks, finish and free."""
        now_s = self._clock.now_s()
        self.counters.steps += bool(batch.rows)
        tokens = iter(result.tokens)
        events: list[TokenEvent] = []
        for request, start, n_tokens, samples in batch.rows:
            request.n_computed += n_tokens
            if start < request.n_prompt:
                self.counters.prompt_tokens += min(request.n_prompt - start, n_tokens)
            self.kv.publish(request)
            if samples:
                events.append(self._append(request, next(tokens), now_s))
        assert next(tokens, None) is None, "the executor sampled more tokens than were asked for"
        return events

    def explain(self, request_id: str) -> Account | None:
        """The account of a live or recently finished request."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        if request is None:
            return self.accounts.get(request_id)
        now_s = self._clock.now_s()
        return account(request, self._ledger.waits(request_id, now_s), now_s)

    def requests(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.waiting.values()

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        self.kv.check(self.requests())
        for request in self.waiting.values():
            assert not request.blocks, f"{request.id} waits and holds blocks"
        for request in self.running.values():
            assert request.n_remaining >= 1, f"{request.id} runs and has nothing to compute"
        assert len(self.running) <= self.limits.max_num_seqs, f"{len(self.running)} run"

    def _run(self, request_id: str, n_tokens: int, rows: dict[str, Row], now_s: float) -> int:
        """Give a running request its tokens; returns how many requests had to be preempted.

        Last in, first out: a request may only displace those admitted after it, itself at last.
        The first admitted can thus always finish, which is the progress guarantee.
        """
        request, n_preempted = self.running[request_id], 0
        while not self.kv.grow(request, n_tokens):
            victim = self.running[next(reversed(self.running))]
            self._preempt(victim, request_id, now_s)
            rows.pop(victim.id, None)
            n_preempted += 1
            if victim is request:
                return n_preempted
        rows[request_id] = self._row(request, n_tokens)
        return n_preempted

    def _start(self, request_id: str, n_tokens: int, rows: dict[str, Row], now_s: float) -> bool:
        request = self.waiting[request_id]
        if not self.kv.admit(request, n_tokens):
            return False
        del self.waiting[request_id]
        self.running[request_id] = request
        request.state = State.running
        self._ledger.leave(request_id, now_s)
        if request.scheduled_s is None:
            request.scheduled_s, request.n_cached = now_s, request.n_computed
            self.counters.cached_tokens += request.n_cached
        rows[request_id] = self._row(request, n_tokens)
        return True

    def _row(self, request: Request, n_tokens: int) -> Row:
        return Row(
            request,
            request.n_computed,
            n_tokens,
            n_tokens == len(request.tokens) - request.n_computed,
        )

    def _preempt(self, request: Request, by: str, now_s: float) -> None:
        """Back to the head of the queue without blocks; what it computed is computed again."""
        del self.running[request.id]
        self.kv.free(request)
        request.state = State.preempted
        request.n_preemptions += 1
        self.counters.preemptions += 1
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id, last=False)
        self._ledger.enter(request.id, now_s, Cause(Why.preempted_by, by))

    def _append(self, request: Request, token: int, now_s: float) -> TokenEvent:
        request.tokens.append(token)
        self.counters.output_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now_s
        finish = request.verdict_on(token)
        if finish is not None:
            self._finish(request, finish, now_s)
        return TokenEvent(request, token, finish)

    def _finish(self, request: Request, finish: State, now_s: float) -> None:
        self.waiting.pop(request.id, None)
        self.running.pop(request.id, None)
        self.kv.free(request)
        request.state, request.finished_s = finish, now_s
        self.counters.finished += 1
        self._ledger.leave(request.id, now_s)
        self.accounts.add(account(request, self._ledger.pop(request.id), now_s))
