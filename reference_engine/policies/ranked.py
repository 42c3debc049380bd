"""Planning by rank: all decodes, then prefills and waiting requests in a common order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from math import inf
from typing import Annotated, ClassVar, NamedTuple

from pydantic import BeforeValidator, PrivateAttr

from reference_engine.policies.sorted_queue import (
    Key,
    OverdueQueue,
    Ranked,
    SortedQueue,
    ranked_prefills,
)
from reference_engine.policies.step_budget import NO_TOKENS, StepBudget, TokenBudgetPolicy
from reference_engine.policies.waiting_times import WaitingTimes
from reference_engine.state.cost_model import CostModel, StepShape
from reference_engine.state.plan import Cause, Plan, Preemption, View, Why
from reference_engine.state.sequence import Request


class BlockedRequest(NamedTuple):
    """The first waiting request in rank that could not be admitted, and the cause."""

    request: Request
    cause: Cause


def _of_word(value: object) -> object:
    return False if value == "never" else value


Preempts = Annotated[bool, BeforeValidator(_of_word)]
"""Whether a blocked request may preempt others; `never` is false."""

Candidates = Callable[[View, BlockedRequest], Iterable[Request]]
"""Decoding requests that may be preempted for a blocked request, in the order of preemption."""


def plan_by_rank(
    budget: StepBudget,
    view: View,
    prefills: Sequence[Ranked],
    waiting: Iterable[Ranked],
    candidates: Candidates | None = None,
) -> Plan:
    """A plan of all decodes that gives the rest of `budget` in order of rank to `prefills` and
    `waiting`, both sorted, lowest rank first.

    No waiting request overtakes another: once a request cannot be admitted, it blocks all behind
    it, and the rest of the budget goes to prefills. If it lacks a slot or KV blocks, it preempts as
    many of its `candidates` as it needs and is admitted in their place, in the same step.
    """
    preempted: dict[str, Preemption] = {}
    n_continued, blocked = 0, None
    for rank, request in waiting:
        while n_continued < len(prefills) and prefills[n_continued][0] < rank:
            budget.continue_prefill(prefills[n_continued][1])
            n_continued += 1
        cause = budget.admit(request)
        if cause is not None and candidates is not None:
            blocked = BlockedRequest(request, cause)
            victims = _make_room(budget, view, blocked, candidates, preempted)
            preempted |= {v.id: Preemption(v.id, by=request.id) for v in victims}
            cause = None if victims else cause
        if cause is not None:
            blocked = BlockedRequest(request, cause)
            break
        blocked = None
    for _, request in prefills[n_continued:]:
        budget.continue_prefill(request)
    budget.force_first_prefill()
    plan = Plan(
        tuple(budget.items), decode_all=True, preempt=tuple(preempted.values()), rest=NO_TOKENS
    )
    if blocked is None:
        return plan
    request, cause = blocked
    if cause.why is not Why.no_kv_blocks:
        return plan._replace(rest=cause)
    behind = Cause(Why.lower_priority, request.id)
    return plan._replace(causes=((request.id, cause),), rest=behind)


def _make_room(
    budget: StepBudget,
    view: View,
    blocked: BlockedRequest,
    candidates: Candidates,
    preempted: Container[str],
) -> list[Request]:
    """Preempts as many candidates as the blocked request needs and admits it. None, and nothing
    changed, if all of them would not be enough."""
    request, cause = blocked
    if cause.why not in (Why.no_seq_slot, Why.no_kv_blocks):
        return []
    n_missing, victims = float(-budget.blocks), list[Request]()
    if cause.want is not None:
        n_missing += cause.want
    for victim in candidates(view, blocked):
        if victim.id in preempted:
            continue
        budget.preempt(victim, request)
        victims.append(victim)
        n_missing -= len(victim.blocks)
        if n_missing > 0:
            continue
        remaining = budget.admit(request)
        if remaining is None:
            return victims
        n_missing = (remaining.want or 0.0) - budget.blocks
    for victim in victims:
        budget.keep(victim, request)
    return []


def prefill_s(n_tokens: int, cost: CostModel) -> float:
    """Seconds of a step that computes nothing but a prompt of `n_tokens`, by the cost model."""
    return cost.estimate(StepShape(1, n_tokens, n_tokens * n_tokens / 2))


class LatestStarts:
    """Waiting requests that can still meet a deadline, by the instant (seconds) at which each must
    start for that."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue = SortedQueue()

    def put(self, request: Request, latest_s: float) -> None:
        self._queue.put(request, (latest_s,))

    def drop(self, request_id: str) -> None:
        self._queue.drop(request_id)

    def take_hopeless(self, view: View, start_s: float) -> list[Request]:
        """The requests that can no longer meet their deadline if the next to start does so at
        `start_s` (seconds); each is returned once."""
        hopeless = []
        for (latest_s,), request in self._queue.walk(view):
            if latest_s >= start_s:
                break
            hopeless.append(request)
        for request in hopeless:
            self._queue.drop(request.id)
        return hopeless


class Ranking:
    """Live requests by rank: overdue requests first, then by the key they were filed under. A
    running request is overdue if it was when it was admitted."""

    __slots__ = ("_keys", "_overdue", "_queue", "waits")

    def __init__(self) -> None:
        self.waits = WaitingTimes()
        self._overdue = OverdueQueue()
        self._queue = SortedQueue()
        self._keys: dict[str, Key] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether the request was filed and has not been dropped."""
        return request_id in self._keys

    def put(self, request: Request, key: Key, overdue_s: float = inf) -> None:
        """File a waiting request under `key`, overdue from the instant `overdue_s` on."""
        self._keys[request.id] = key
        self._queue.put(request, key)
        self._overdue.put(request, overdue_s)

    def move(self, request_id: str, key: Key) -> None:
        """Change the key of a running request."""
        self._keys[request_id] = key

    def drop(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        self._queue.drop(request_id)
        self._overdue.drop(request_id)
        self.waits.drop(request_id)

    def key(self, request_id: str) -> Key:
        return self._keys[request_id]

    def overdue_s(self, request_id: str) -> float:
        """The instant at which the request becomes overdue."""
        return self._overdue.overdue_s(request_id)

    def running(self, request_id: str, now_s: float) -> Key:
        """The rank of a running request."""
        started_s = self.waits.started_s(request_id, now_s)
        return self._overdue.rank(request_id, self._keys[request_id], started_s)

    def is_promoted(self, request_id: str, now_s: float, duration_s: float) -> bool:
        """Whether the running request was admitted because it was overdue, less than `duration_s`
        ago."""
        overdue_s = self._overdue.overdue_s(request_id)
        return self.waits.is_promoted(request_id, overdue_s, now_s, duration_s)

    def waiting(self, view: View) -> Iterator[Ranked]:
        """The waiting requests with their ranks, lowest first."""
        return self._overdue.overdue_first(self._queue.walk(view), view)

    def prefills(self, view: View) -> list[Ranked]:
        """The running requests in prefill with their ranks, lowest first."""
        return ranked_prefills(view, lambda request: self.running(request.id, view.now_s))

    def ranked_after(self, view: View, request: Request) -> list[str]:
        """Ids of the running requests that rank after `request`, last in rank first."""
        now_s = view.now_s
        own = self.running(request.id, now_s)
        ranked = [(self.running(other.id, now_s), other.id) for other in view.running]
        return [other_id for rank, other_id in sorted(ranked, reverse=True) if rank > own]


class RankedPolicy(TokenBudgetPolicy):
    """A mode that files each request in `_ranking` on arrival and serves by rank. Requests that
    rank last are preempted first."""

    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    _ranking: Ranking = PrivateAttr(default_factory=Ranking)

    def on_finish(self, request: Request, view: View) -> None:
        self._ranking.drop(request.id)

    def plan(self, view: View) -> Plan:
        budget, ranking = self.budget_after_decodes(view), self._ranking
        prefills, waiting = ranking.prefills(view), ranking.waiting(view)
        plan = plan_by_rank(budget, view, prefills, waiting, self.candidates)
        ranking.waits.start(budget.admitted, view.now_s)
        return plan

    def is_steady(self, view: View) -> bool:
        return not view.waiting

    def candidates(self, view: View, blocked: BlockedRequest) -> Iterable[Request]:
        """Decoding requests to preempt for `blocked`, in the order of preemption."""
        return ()

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        return self._ranking.ranked_after(view, request)
